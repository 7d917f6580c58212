"""Which gradients the ranks have: each exchange counts it, beside the gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.trainer.reducer.arguments import Sum
from gradwire.trainer.reducer.bucket import Bucket
from gradwire.trainer.reducer.buffers import PlainBuffer
from gradwire.trainer.reducer.setup import Combination
from gradwire.trainer.reducer.traffic import Traffic


class Presence:
    """Tells after an exchange which gradients of some buckets any rank has, and which are sparse on a rank: Bucket.presence.

    Buckets whose own messages do not count it share one message that does, exactly. A rank that lacks a gradient reads the counts
    at once. On a GPU, a rank that has all of its gradients does not wait for that: nothing that it does next depends on them,
    unless a gradient is sparse on another rank and dense here, which is an error. It reads a copy before its next exchange.

    buffers: the message, if there is one. is_on_gpu: whether a GPU has counts.
    """

    def __init__(self, buckets: Sequence[Bucket], communicator: Communicator) -> None:
        self._buckets = buckets
        self._counted = [bucket for bucket in buckets if not bucket.counts_presence]
        self.buffers: list[PlainBuffer] = []
        if self._counted:
            lengths = [len(bucket.items) for bucket in self._counted]
            counts = torch.zeros(sum(lengths), device=self._counted[0].presence.device, dtype=torch.float32)
            for bucket, part in zip(self._counted, counts.split(lengths), strict=True):
                bucket.presence = part
            combination = Combination(communicator, Sum, traffic=Traffic(communicator))
            self.buffers.append(PlainBuffer(combination, counts))
        parts = defaultdict(list)
        for bucket in buckets:
            if bucket.presence.is_cuda:
                parts[bucket.presence.dtype, bucket.presence.device].append(bucket)
        self._copies = list(map(_Copy, parts.values()))
        self.is_on_gpu = bool(self._copies)

    def start(self, step: int, *, awaited: bool) -> None:
        """Begin to count what is not counted in the messages of the buckets, which are launched. awaited: see
        PreparedOperation.start()."""
        for buffer in self.buffers:
            buffer.values.fill_(1)
            for bucket in self._counted:
                bucket.mark_absent()
            buffer.start(step, awaited=awaited)

    def copy(self) -> None:
        """Begin to copy the counts of the last exchange from GPUs, for read()."""
        for copy in self._copies:
            copy.begin()

    def read(self) -> list[int]:
        """Set Bucket.present of all buckets, and return the parameters whose gradients stay sparse on a rank, the same on all
        ranks. On GPUs, the host waits for the exchange and for copy(); raises the error of an exchange that has failed there."""
        is_sparse_somewhere = False
        if self.is_on_gpu:  # the last message on each device ends after the others
            every = [*(bucket.buffer for bucket in self._buckets), *self.buffers]
            for buffer in {each.values.device: each for each in every}.values():
                buffer.finish()
        for copy in self._copies:
            copy.end()
        for bucket in self._buckets:
            if not bucket.presence.is_cuda:
                bucket.present = bucket.presence.tolist()
            is_sparse_somewhere |= min(bucket.present) < 0
        return [index for bucket in self._buckets for index in bucket.found_sparse()] if is_sparse_somewhere else []


class _Copy:
    """A copy in pinned memory of the counts of buckets on one GPU, of one dtype."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._parts: list[Tensor] = [bucket.presence for bucket in buckets]
        self._gathered = torch.cat(self._parts)
        self._pinned = torch.zeros(self._gathered.shape, dtype=self._gathered.dtype, device="cpu", pin_memory=True)
        self._done = torch.cuda.Event(blocking=True)

    def begin(self) -> None:
        torch.cat(self._parts, out=self._gathered)
        self._pinned.copy_(self._gathered, non_blocking=True)
        self._done.record(torch.cuda.current_stream(self._gathered.device))

    def end(self) -> None:
        if not self._done.query():
            self._done.synchronize()
        counts = self._pinned.split([len(part) for part in self._parts])
        for bucket, part in zip(self._buckets, counts, strict=True):
            bucket.present = part.tolist()
