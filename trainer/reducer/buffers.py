"""Buffers of gradients, exchanged uncompressed or as codes, with the residuals of error feedback."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.collectives import PreparedOperation, Work
from gradwire.collectives.compression.codec import NUMBERS, Codec, MatrixCodec, rehearse
from gradwire.collectives.compression.feedback import Feedback
from gradwire.trainer.reducer.arguments import Sum
from gradwire.trainer.reducer.compression import Encoding
from gradwire.trainer.reducer.layout import BucketPlan
from gradwire.trainer.reducer.setup import Combination

Exported: TypeAlias = dict[str, Tensor]
"""The state that moves with a parameter when its buffer changes, the same on all ranks. "residual": the part of its gradients
that no exchange has returned yet, in the units of the result, flat, in the order of memory. Other names: the codec's state for
the parameter."""


class OperationChain:
    """Runs operations one after the other.

    chained: whether there may be more than one operation. wait() and complete() wait for one operation before they begin the
    next, so all ranks must wait for several chains in the same order. ended_s: the end of the last operation of the last exchange
    on the host, by time.perf_counter().
    """

    chained = True

    def __init__(self) -> None:
        self.ended_s = self._exchange_s = 0.0
        self._work: Work | None = None
        self._following: Iterator[Work] = iter(())
        self._waited: list[Work] = []  # the operations of this exchange that were waited for
        self._last: list[Work] = []  # the operations of the last exchange

    @abstractmethod
    def start(self, step: int) -> None:
        """Begin the first operation. step: the number of earlier exchanges."""

    def _begin(self, operations: Iterator[Work]) -> None:
        """Begin the first of the operations, of which each begins when it is taken."""
        self._following, self._waited = operations, []
        self._work = next(operations, None)

    def wait(self) -> None:
        """Wait for the first operation, and begin those that depend on it. Raises its error."""
        if self._work is not None:
            self._work.wait()
            self._waited.append(self._work)
            self.ended_s = self._work.ended_s
            self._work = next(self._following, None)
            if self._work is None:
                self._last = self._waited

    def begin(self) -> None:
        """Let the operation that was started begin in the background, also if it is awaited. Any thread may call this."""
        if (work := self._work) is not None:
            work.begin()

    def complete(self) -> None:
        """Wait for the remaining operations. Raises their error."""
        while self._work is not None:
            self.wait()

    def finish(self) -> None:
        """After complete(), wait on the host until GPUs have finished the last exchange too. Raises its error, if it has failed
        since."""
        for work in self._last:
            work.wait(math.inf)

    @property
    def exchange_s(self) -> float:
        """Return how long the operations of the last exchange ran; until a GPU has finished it, of the one before."""
        known = [seconds for work in self._last if (seconds := work.seconds) is not None]
        if len(known) == len(self._last):
            self._exchange_s = sum(known)
        return self._exchange_s


class PlainBuffer(OperationChain):
    """Combines numbers over the ranks in one operation, uncompressed or by a codec without error feedback.

    codec: encodes the values; None leaves them uncompressed. items, views: the parameters whose gradients the buffer holds, and
    the places of these gradients in it, if they are copied there; a parameter's index in items is its slot.
    """

    chained = False
    items: Sequence[int] = ()
    views: Sequence[Tensor] = ()

    def __init__(self, combination: Combination, values: Tensor, codec: Codec | None = None) -> None:
        super().__init__()
        self.values = values
        self.codec: Codec | MatrixCodec | None = codec
        self.combination = combination
        self._cast = codec
        self._prepared: PreparedOperation | None = None
        self._wire_bytes: int | None = None

    @classmethod
    def packed(cls, combination: Combination, gradients: Mapping[int, Tensor]) -> PlainBuffer:
        """Return a buffer with places for these gradients, by parameter, one after the other."""
        shapes = [gradient.shape for gradient in gradients.values()]
        values = next(iter(gradients.values())).new_empty(sum(map(math.prod, shapes)))
        buffer = cls(combination, values)
        buffer.items = list(gradients)
        parts = values.split([math.prod(shape) for shape in shapes])
        buffer.views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return buffer

    def start(self, step: int, *, awaited: bool = False) -> None:
        """Begin to combine the values, which must not be used until complete(). step: the number of earlier exchanges. awaited:
        see PreparedOperation.start()."""
        self._following, self._waited = iter(()), []
        combination, traffic = self.combination, self.combination.traffic
        if self._wire_bytes is None:
            self._wire_bytes = traffic.wire_bytes(self.values.nbytes)
        if self._cast is not None:
            traffic.count(uncompressed=self._wire_bytes)
            self._work = combination.start(self.values, self._cast, awaited=awaited)
            return
        # Shares are half of an allreduce.
        traffic.count(self._wire_bytes // 2 if combination.in_shares else self._wire_bytes, self._wire_bytes)
        if self._prepared is None:
            self._prepared = combination.prepare(self.values)
        self._work = self._prepared.start(awaited=awaited)


class CodedBuffer(PlainBuffer):
    """Exchanges numbers as codes, after a warm-up in which they are uncompressed, and keeps the residuals, which are float32.

    plan: the places of the gradients; a parameter's index in it is its slot. shapes: by slot, in the order of memory. dtype:
    that of the gradients; the values have it too, unless no codec takes it: they are float32 then. number: differs between the
    buffers of one exchange.
    """

    def __init__(
        self,
        combination: Combination,
        encoding: Encoding,
        plan: BucketPlan,
        shapes: Sequence[Sequence[int]],
        device: torch.device,
        dtype: torch.dtype,
        number: int,
    ) -> None:
        dtype = dtype if dtype in NUMBERS else torch.float32
        super().__init__(combination, torch.zeros(plan.presence_offset, device=device, dtype=dtype))
        self.codec = encoding.codec
        self.items = plan.items
        self.shard_start = 0
        self._encoding = encoding
        self._number = number
        stops = [start + math.prod(shape) for start, shape in zip(plan.offsets, shapes, strict=True)]
        self.spans = [slice(start, stop) for start, stop in zip(plan.offsets, stops, strict=True)]
        self.views = [self.values[span].view(list(shape)) for span, shape in zip(self.spans, shapes, strict=True)]
        gaps = zip(stops, (*plan.offsets[1:], plan.presence_offset), strict=True)
        self._gaps = [self.values[start:stop] for start, stop in gaps if start < stop]
        # Compiles now, not in the first step.
        rehearse(encoding.codec, device, with_feedback=encoding.feedback, dtype=dtype)
        self.restart()

    def start(self, step: int, *, awaited: bool = False) -> None:
        for gap in self._gaps:  # the last result's code may have changed them
            gap.zero_()
        warmup = self._encoding.warmup_steps
        if step < warmup:
            super().start(step, awaited=awaited)
            return
        traffic = self.combination.traffic
        traffic.count(uncompressed=traffic.wire_bytes(self.values.nbytes))
        self._begin(self._codes(step - warmup))

    @abstractmethod
    def _codes(self, step: int) -> Iterator[Work]:
        """Begin the operations of a codec. step: the number of exchanges since the warm-up."""

    @abstractmethod
    def restart(self) -> None:
        """Reset the residuals and the codec's state."""

    @property
    @abstractmethod
    def with_feedback(self) -> Collection[int]:
        """Return the slots of the parameters that have error feedback."""

    @abstractmethod
    def residual(self) -> Tensor:
        """Return this rank's residuals: the errors that error feedback has not yet added to the values."""

    def _no_residual(self) -> Tensor:
        """Return a zero for each of the values."""
        return torch.zeros_like(self.values, dtype=torch.float32)

    @abstractmethod
    def _codec_states(self) -> list[Exported]:
        """Return the codec's state summed over all ranks, by slot. Collective."""

    @abstractmethod
    def _add(self, slot: int, exported: Exported) -> None:
        """Add this rank's part of `exported` to a slot with error feedback."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors between exchanges. "worker": the residuals of its gradients, (numel,); "owner": the
        residuals of the results that it encodes for all ranks, from shard_start on. Other names: the codec's state."""

    def export(self) -> list[Exported]:
        """Return by slot the residual and the codec's state that move with each parameter; empty without error feedback.
        Collective."""
        if not (slots := self.with_feedback):
            return [{} for _ in self.items]
        residual = self.residual()
        self.combination.start(residual, divided=True).wait()
        entries = enumerate(zip(self.spans, self._codec_states(), strict=True))
        return [{"residual": residual[span], **state} if slot in slots else {} for slot, (span, state) in entries]

    def add_exported(self, slot: int, exported: Exported) -> bool:
        """Add what export() has returned for a parameter, on all ranks. Return False, with nothing added, if the slot has no
        error feedback. Sends nothing."""
        if slot not in self.with_feedback:
            return False
        self._add(slot, {name: tensor.to(self.values.device) for name, tensor in exported.items()})
        return True

    def add_unused(self, slot: int) -> None:
        """Add a result that no gradient gets to the residual. NaN and Inf become zero, since they would stay there for ever."""
        result = self.values[self.spans[slot]].to(torch.float32)
        self.add_exported(slot, {"residual": result.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)})

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: tensors, numbers, strings, and lists of them."""
        return {
            "parameters": list(self.items),
            "starts": [span.start for span in self.spans],
            "numel": self.values.numel(),
            "encoding": self._encoding.identity,
            "shard_start": self.shard_start,
            "tensors": self.tensors(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load a state_dict(). Return False, with nothing loaded, for that of another buffer. Raises ValueError for a state that
        no buffer can have saved."""
        mine = self.state_dict()
        tensors = mine.pop("tensors")
        if any(state.get(key) != value for key, value in mine.items()):
            return False
        saved = state["tensors"]
        # The states of codecs are divided into pieces, which also depend on topology and segments.
        if difference := {name for name in saved.keys() ^ tensors.keys() if not name.startswith("state.")}:
            raise ValueError(
                f"{min(difference)!r} of a bucket is {'missing' if min(difference) in tensors else 'unknown'}"
            )
        if saved.keys() != tensors.keys() or any(saved[name].shape != tensor.shape for name, tensor in tensors.items()):
            return False
        for name, tensor in tensors.items():
            if saved[name].dtype is not tensor.dtype:
                raise ValueError(f"{name!r} of a bucket has dtype {saved[name].dtype}, not {tensor.dtype}")
        self._load(saved)
        return True

    def _load(self, saved: dict[str, Tensor]) -> None:
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])


class CodecBuffer(CodedBuffer):
    """Exchanges the codes of a Codec, which encodes the buffer as a whole."""

    def restart(self) -> None:
        assert isinstance(self._encoding.codec, Codec)
        self._codec = self._encoding.codec
        self._feedback: Feedback | None = None
        if self._encoding.feedback:
            communicator, values = self.combination.communicator, self.values
            self._feedback = communicator.new_feedback(self._codec, values.numel(), values.device)
            self.shard_start = self._feedback.shard.start

    def _codes(self, step: int) -> Iterator[Work]:
        yield self.combination.start(self.values, self._codec, self._feedback, step, self._number)

    @property
    def with_feedback(self) -> Collection[int]:
        return () if self._feedback is None else range(len(self.items))

    def residual(self) -> Tensor:
        feedback = self._feedback
        return self._no_residual() if feedback is None else feedback.unsent_error(self.combination.inputs)

    def _codec_states(self) -> list[Exported]:
        states: list[Exported] = [{} for _ in self.items]
        for name in self._codec.remembers:
            total = self._no_residual()
            for start, state in self._states():
                total[start : start + state[name].numel()].copy_(state[name])
            self.combination.communicator.allreduce(total, Sum)
            for entry, span in zip(states, self.spans, strict=True):
                entry[name] = total[span]
        return states

    def _add(self, slot: int, exported: Exported) -> None:
        assert self._feedback is not None
        partition, start = self._feedback.partition, self.spans[slot].start
        if not partition.group:  # other ranks of this host encode all of it
            return
        encoders, combination = len(partition.group), self.combination
        first, last = partition.shards[0].start, partition.shards[-1].stop
        share = combination.inputs / encoders / combination.predivide
        _add_overlap(self._feedback.worker[first:last], first, exported["residual"], start, share)
        for name in exported.keys() & set(self._codec.remembers):
            for place, state in self._states():
                _add_overlap(state[name], place, exported[name], start, 1 / encoders)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self._feedback is None else self._feedback.tensors()

    def _states(self) -> list[tuple[int, dict[str, Tensor]]]:
        """Return the codec's states, each with the place in the buffer where its numbers begin."""
        assert self._feedback is not None
        pairs = zip(self._feedback.partition.chunks, self._feedback.state, strict=True)
        return [
            (span.start, state)
            for chunk, states in pairs
            for span, state in zip(chunk, states, strict=True)
            if state is not None
        ]


class MatrixBuffer(CodedBuffer):
    """Exchanges the sums of a MatrixCodec. The later sums depend on the first, which start() begins."""

    chained = True

    def restart(self) -> None:
        assert isinstance(self._encoding.codec, MatrixCodec)
        self._codec = self._encoding.codec
        self._state = self._codec.new_state([tuple(view.shape) for view in self.views], self.values.device)

    def _codes(self, step: int) -> Iterator[Work]:
        if self.combination.predivide != 1:
            self.values.div_(self.combination.predivide)
        for sums in self._state.exchange(self.views):
            yield self.combination.start(sums, divided=True)

    @property
    def with_feedback(self) -> dict[int, tuple[Tensor, dict[str, Tensor]]]:
        """Return, by slot, the error of each compressed matrix and the codec's state for it."""
        found = {slot: self._state.kept(slot) for slot in range(len(self.items))}
        return {slot: kept for slot, kept in found.items() if kept is not None}

    def residual(self) -> Tensor:
        total = self._no_residual()
        for slot, (error, _) in self.with_feedback.items():
            total[self.spans[slot]].copy_(error.view(-1))
        return total

    def _codec_states(self) -> list[Exported]:
        known = self.with_feedback
        return [
            {name: tensor.clone() for name, tensor in known[slot][1].items()} if slot in known else {}
            for slot in range(len(self.items))
        ]

    def _add(self, slot: int, exported: Exported) -> None:
        error, state = self.with_feedback[slot]
        error.view(-1).add_(exported["residual"], alpha=self.combination.share / self.combination.predivide)
        for name, tensor in state.items():
            if name in exported and exported[name].shape == tensor.shape:
                tensor.copy_(exported[name])

    def tensors(self) -> dict[str, Tensor]:
        known = self.with_feedback
        found = {"worker": self.residual(), "owner": self._no_residual()[:0]} if known else {}
        return found | {f"{name}.{slot}": x for slot, (_, state) in known.items() for name, x in state.items()}

    def _load(self, saved: dict[str, Tensor]) -> None:
        super()._load(saved)
        for slot, (error, _) in self.with_feedback.items():
            error.view(-1).copy_(saved["worker"][self.spans[slot]])


def buffer_for(encoding: Encoding) -> type[CodedBuffer]:
    """Return the kind of buffer for an encoding."""
    return MatrixBuffer if isinstance(encoding.codec, MatrixCodec) else CodecBuffer


def _add_overlap(target: Tensor, place: int, numbers: Tensor, start: int, share: float) -> None:
    """Add `share` times the numbers, which begin at `start` in a buffer, to `target`, the part of the buffer that begins at
    `place`."""
    first, last = max(place, start), min(place + target.numel(), start + numbers.numel())
    if first < last:
        target[first - place : last - place].add_(numbers[first - start : last - start], alpha=share)
