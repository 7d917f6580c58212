"""Buckets whose gradients travel as codes, and what these still owe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from collectives import Work
from collectives.compression.codec import Codec
from collectives.compression.feedback import Feedback
from collectives.compression.powersgd import PowerSGD
from trainer.compression import Encoding
from trainer.gradients.bucket import Bucket, BucketPlan, Reduction
from trainer.ops import Average, Sum

Owed: TypeAlias = dict[str, Tensor]
"""What one parameter takes along when its bucket changes, the same on all ranks. "residual": of its gradients, what no exchange
has returned yet, as it would be in the result, flat, in the order of memory; what else its codec remembers, by name."""


class EncodedBucket(Bucket, ABC):
    """A bucket that a codec exchanges, as float32. number: tells it from others. Its presence is for Presence to reduce."""

    def __init__(
        self,
        plan: BucketPlan,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        encoding: Encoding,
        reduction: Reduction,
        number: int,
    ) -> None:
        wire = torch.zeros(plan.presence_offset, device=parameters[plan.items[0]].device)
        super().__init__(plan, names, parameters, reduction, wire)
        self._encoding = encoding
        self._number = number
        stops = [start + view.numel() for start, view in zip(plan.offsets, self._views, strict=True)]
        self._spans = [slice(start, stop) for start, stop in zip(plan.offsets, stops, strict=True)]
        gaps = zip(stops, (*plan.offsets[1:], plan.presence_offset), strict=True)
        self._gaps = [wire[start:stop] for start, stop in gaps if start < stop]
        self.restart()

    @abstractmethod
    def restart(self) -> None:
        """Owe nothing, remember nothing."""

    @abstractmethod
    def _send_codes(self, step: int) -> Work:
        """step: without the warm-up."""

    def _send(self, step: int) -> None:
        for gap in self._gaps:  # where the last result's code may have left something
            gap.zero_()
        warm_up = self._encoding.warmup_steps
        self._work = self._reduction.start(self._wire) if step < warm_up else self._send_codes(step - warm_up)

    def _on_absent_everywhere(self, slot: int) -> None:
        """Nobody will look at this part of the result: it is owed again. (What is not finite would be for ever.)"""
        result = self._wire[self._spans[slot]]
        self.give(slot, {"residual": result.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)})

    @abstractmethod
    def take(self) -> list[Owed]:
        """What is owed to each parameter, by slot. Collective."""

    @abstractmethod
    def give(self, slot: int, owed: Owed) -> bool:
        """Let a parameter have what take() said of it, in addition; whether there is a place for it. Not collective, but for all
        ranks to do."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What is kept from one exchange to the next on this rank: the tensors themselves, by name."""

    @property
    def shard_start(self) -> int:
        """Where in the bucket what this rank keeps as "owner" begins."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: tensors, numbers, strings, and lists of them."""
        return {
            "parameters": list(self.items),
            "starts": [span.start for span in self._spans],
            "numel": self._wire.numel(),
            "encoding": repr(self._encoding),
            "shard_start": self.shard_start,
            "tensors": self.tensors(),
        }

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether load_state_dict() can take this. Raises ValueError for what this bucket cannot have saved."""
        mine = self.state_dict()
        saved, tensors = state["tensors"], mine.pop("tensors")
        if any(state[key] != value for key, value in mine.items()):
            return False
        # What codecs remember lies in pieces, which topology and segments decide about too.
        if difference := {name for name in saved.keys() ^ tensors.keys() if not name.startswith("state.")}:
            raise ValueError(
                f"{min(difference)!r} of a bucket is {'missing' if min(difference) in tensors else 'unknown'}"
            )
        if saved.keys() != tensors.keys() or any(saved[name].shape != tensor.shape for name, tensor in tensors.items()):
            return False
        for name, tensor in tensors.items():
            if saved[name].dtype is not tensor.dtype:
                raise ValueError(f"{name!r} of a bucket has dtype {saved[name].dtype}, not {tensor.dtype}")
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where state_dict() was taken. state: one that fits."""
        for name, tensor in self.tensors().items():
            tensor.copy_(state["tensors"][name])


class CodecBucket(EncodedBucket):
    """Encoded by a codec of collectives.compression."""

    def restart(self) -> None:
        assert isinstance(self._encoding.codec, Codec)
        self._codec = self._encoding.codec
        self._feedback: Feedback | None = None
        if self._encoding.feedback:
            communicator, wire = self._reduction.communicator, self._wire
            self._feedback = communicator.new_feedback(self._codec, wire.numel(), wire.device)

    def _send_codes(self, step: int) -> Work:
        return self._reduction.start(self._wire, self._codec, self._feedback, step, self._number)

    def take(self) -> list[Owed]:
        feedback, reduction = self._feedback, self._reduction
        if feedback is None:
            return [{} for _ in self.items]
        owed = feedback.owed(_inputs_of(reduction))
        reduction.communicator.allreduce(owed, reduction.op, postscale=reduction.predivide)
        taken: list[Owed] = [{"residual": owed[span]} for span in self._spans]
        if "momentum" in self._remembered():
            momentum = torch.zeros_like(owed)
            for span, state in self._states():
                momentum[span].copy_(state["momentum"])
            reduction.communicator.allreduce(momentum, Sum)
            for entry, span in zip(taken, self._spans, strict=True):
                entry["momentum"] = momentum[span]
        return taken

    def give(self, slot: int, owed: Owed) -> bool:
        if self._feedback is None:
            return False
        if not self._feedback.sharing.group:
            return True
        feedback, encoders = self._feedback, len(self._feedback.sharing.group)
        share = _inputs_of(self._reduction) / encoders / self._reduction.predivide
        whole = self._spans[slot]
        mine = self._encoded_here(whole)
        part = slice(mine.start - whole.start, mine.stop - whole.start)
        feedback.worker[mine].add_(owed["residual"][part], alpha=share)
        if "momentum" in owed and "momentum" in self._remembered():
            for span, state in self._states():
                start, stop = max(span.start, whole.start), min(span.stop, whole.stop)
                if start < stop:
                    momentum = owed["momentum"][start - whole.start : stop - whole.start]
                    state["momentum"][start - span.start : stop - span.start].add_(momentum, alpha=1 / encoders)
        return True

    def tensors(self) -> dict[str, Tensor]:
        return {} if self._feedback is None else self._feedback.state_dict()

    @property
    def shard_start(self) -> int:
        return 0 if self._feedback is None else self._feedback.shard.start

    def _encoded_here(self, span: slice) -> slice:
        """Of a span, the part that this rank encodes: not all where ranks of a host share the work."""
        assert self._feedback is not None
        shards = self._feedback.sharing.shards
        start = min(max(span.start, shards[0].start), span.stop)
        return slice(start, max(start, min(span.stop, shards[-1].stop)))

    def _remembered(self) -> Sequence[str]:
        """Names of what the codec keeps, beside residuals."""
        return tuple(self._codec.new_state(1, torch.device("cpu")) or ())

    def _states(self) -> list[tuple[slice, dict[str, Tensor]]]:
        """What the codec keeps, with the part of the bucket that it is about."""
        assert self._feedback is not None
        pairs = zip(self._feedback.sharing.chunks, self._feedback.state, strict=True)
        return [
            (slice(span.start, span.stop), state)
            for chunk, states in pairs
            for span, state in zip(chunk, states, strict=True)
            if state is not None
        ]


class LowRankBucket(EncodedBucket):
    """Encoded by PowerSGD, whose second sum depends on the first. That one starts with the bucket, the second in wait()."""

    def restart(self) -> None:
        assert isinstance(self._encoding.codec, PowerSGD)
        self._shapes = [_shape_in_memory(view) for view in self._views]
        self._state = self._encoding.codec.new_state(self._shapes, self._wire.device)
        self._sums: Iterator[Tensor] = iter(())

    def _send_codes(self, step: int) -> Work:
        if self._reduction.predivide != 1:
            self._wire.div_(self._reduction.predivide)
        matrices = [self._wire[span].view(shape) for span, shape in zip(self._spans, self._shapes, strict=True)]
        self._sums = self._state.exchange(matrices)
        work = self._next_sum()
        assert work is not None
        return work

    def wait(self) -> None:
        super().wait()
        self._work = self._next_sum()

    def complete(self) -> None:
        while self._work is not None:
            self._work.wait()
            self._work = self._next_sum()

    def _next_sum(self) -> Work | None:
        """Begin the next sum of this exchange, if there is one."""
        sums = next(self._sums, None)
        if sums is None:
            return None
        scale = self._reduction.predivide / _inputs_of(self._reduction)
        return self._reduction.communicator.allreduce(sums, Sum, postscale=scale, async_op=True)

    def take(self) -> list[Owed]:
        reduction, kept = self._reduction, self._kept()
        owed = torch.zeros_like(self._wire)
        for slot, (error, _) in kept.items():
            owed[self._spans[slot]].copy_(error.view(-1))
        reduction.communicator.allreduce(owed, reduction.op, postscale=reduction.predivide)
        return [
            {"residual": owed[span], "basis": kept[slot][1].clone()} if slot in kept else {}
            for slot, span in enumerate(self._spans)
        ]

    def give(self, slot: int, owed: Owed) -> bool:
        kept = self._kept()
        if slot not in kept:
            return False
        error, basis = kept[slot]
        reduction = self._reduction
        share = _inputs_of(reduction) / reduction.communicator.size / reduction.predivide
        error.view(-1).add_(owed["residual"], alpha=share)
        if "basis" in owed and owed["basis"].shape == basis.shape:
            basis.copy_(owed["basis"])
        return True

    def tensors(self) -> dict[str, Tensor]:
        kept = self._kept().items()
        errors = {f"error.{slot}": error for slot, (error, _) in kept}
        return errors | {f"basis.{slot}": basis for slot, (_, basis) in kept}

    def _kept(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Error and basis of each matrix that is compressed, by slot."""
        found = {slot: self._state.kept(slot) for slot in range(len(self.items))}
        return {slot: kept for slot, kept in found.items() if kept is not None}


class Presence:
    """How many ranks have the gradients of encoded buckets: exact, in one message for all of them, after what they start with."""

    def __init__(self, buckets: Sequence[Bucket], reduction: Reduction) -> None:
        encoded = [bucket for bucket in buckets if isinstance(bucket, EncodedBucket)]
        self._counts = torch.zeros(sum(len(bucket.items) for bucket in encoded))
        if encoded:
            self._counts = self._counts.to(encoded[0].presence.device)
        for bucket, part in zip(encoded, self._counts.split([len(bucket.items) for bucket in encoded]), strict=True):
            bucket.presence = part
        self._communicator = reduction.communicator
        self._work: Work | None = None

    def start(self) -> None:
        """Once all buckets are started; again does nothing."""
        if self._counts.numel() and self._work is None:
            self._work = self._communicator.allreduce(self._counts, Sum, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()

    def forget(self) -> None:
        self._work = None


def encoded_bucket(
    plan: BucketPlan,
    names: Sequence[str],
    parameters: Sequence[Tensor],
    encoding: Encoding,
    reduction: Reduction,
    number: int,
) -> EncodedBucket:
    kind = LowRankBucket if isinstance(encoding.codec, PowerSGD) else CodecBucket
    return kind(plan, names, parameters, encoding, reduction, number)


def _inputs_of(reduction: Reduction) -> int:
    """How many times a part of the result is in the sum of what ranks give."""
    return reduction.communicator.size if reduction.op == Average else 1


def _shape_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a dense tensor's elements in the order in which they lie in memory."""
    return tuple(tensor.shape[d] for d in sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))
