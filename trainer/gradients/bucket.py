"""Buckets: gradients of one dtype and device side by side in one buffer, to be reduced by one operation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives import Communicator, Work
from collectives.compression.codec import Codec
from collectives.compression.feedback import Feedback
from trainer.compression import Cast
from trainer.gradients.shards import as_gradient_of, held_here, placed_like

MiB = 1024 * 1024
DEFAULT_BUCKET_BYTES = 25 * MiB
FIRST_BUCKET_BYTES = 1 * MiB
"""The first bucket is smaller, so that communication starts soon after backward has."""
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Item:
    """What planning has to know of a gradient. Only gradients of one kind (dtype, device, what they travel as) share a bucket."""

    numel: int
    itemsize: int
    kind: Hashable


@dataclass(frozen=True)
class BucketPlan:
    """Where gradients lie in one buffer, in elements.

    Gradient items[i] starts at offsets[i], a multiple of ALIGNMENT_BYTES. From presence_offset on there is one element per
    gradient, in the same order: how many ranks have it. numel: length of the buffer.
    """

    items: tuple[int, ...]
    offsets: tuple[int, ...]
    presence_offset: int
    numel: int


def plan_buckets(
    items: Sequence[Item], order: Sequence[int], *, bucket_bytes: int, first_bucket_bytes: int = FIRST_BUCKET_BYTES
) -> tuple[BucketPlan, ...]:
    """Distribute items over buckets, following the order in which gradients are expected; order holds indices of items.

    A bucket holds at most bucket_bytes of gradients, the very first to fill first_bucket_bytes, unless a single gradient is
    larger: it has a bucket for itself. Buckets come in the order in which they fill up. Pure: equal arguments, equal plans.
    """
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    full: list[list[int]] = []
    limit = min(first_bucket_bytes, bucket_bytes)
    for index in order:
        kind, wanted = items[index].kind, _padded_bytes(items[index])
        if kind in filling and filled_bytes[kind] + wanted > limit:
            full.append(filling.pop(kind))
            limit = bucket_bytes
        if kind not in filling:
            filling[kind], filled_bytes[kind] = [], 0
        filling[kind].append(index)
        filled_bytes[kind] += wanted
    position = {index: place for place, index in enumerate(order)}
    buckets = sorted([*full, *filling.values()], key=lambda members: position[members[-1]])
    return tuple(lay_out(items, members) for members in buckets)


def lay_out(items: Sequence[Item], members: Sequence[int]) -> BucketPlan:
    """The plan of a bucket for some of the items, in this order."""
    offsets = []
    end = 0
    for index in members:
        offsets.append(end)
        end += _padded_bytes(items[index]) // items[index].itemsize
    return BucketPlan(tuple(members), tuple(offsets), presence_offset=end, numel=end + len(members))


def _padded_bytes(item: Item) -> int:
    return -(-item.numel * item.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Reduction:
    """How buckets are reduced: among whom, and "sum" or "average", dividing by `predivide` before and multiplying after."""

    communicator: Communicator
    op: str
    predivide: float

    def start(
        self, tensor: Tensor, codec: Codec | None = None, feedback: Feedback | None = None, step: int = 0, seed: int = 0
    ) -> Work:
        work = self.communicator.allreduce(
            tensor,
            self.op,
            prescale=1 / self.predivide,
            postscale=self.predivide,
            codec=codec,
            feedback=feedback,
            step=step,
            seed=seed,
            async_op=True,
        )
        assert work is not None
        return work


class Bucket:
    """The buffer of a plan, with a view of it for the gradient of every parameter in it; of sharded ones, for this rank's shard.

    names and parameters: all that were planned, of which plan.items picks. wire: what is reduced, zeros; where it has the
    gradients' dtype, it is their buffer too.
    """

    def __init__(
        self,
        plan: BucketPlan,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        reduction: Reduction,
        wire: Tensor,
    ) -> None:
        self.items = plan.items
        self.names = [names[item] for item in plan.items]
        self._parameters = [parameters[item] for item in plan.items]
        self._reduction = reduction
        self._wire = wire
        dtype = self._parameters[0].dtype
        self._buffer = wire if wire.dtype == dtype else wire.to(dtype)
        self._views = [
            self._buffer.as_strided(held.shape, dense_strides(held), offset)
            for held, offset in zip(map(held_here, self._parameters), plan.offsets, strict=True)
        ]
        self._gradients = list(map(as_gradient_of, self._parameters, self._views))
        """What parameter.grad becomes: the views, where parameters are not sharded."""
        self.presence = self._buffer[plan.presence_offset :]
        """One number for each gradient: whether this rank has it, and after complete(), whether any rank has."""
        self._absent: list[int] = []
        self._work: Work | None = None
        self._in_flight = False

    @property
    def in_flight(self) -> bool:
        """True from start() to forget()."""
        return self._in_flight

    def collect(self, slot: int) -> bool:
        """Bring the gradient of the slot's parameter into the buffer and make parameter.grad what lies there.

        False, with zeros in the buffer, where the parameter has no gradient.
        """
        parameter, view = self._parameters[slot], self._views[slot]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
            return False
        if gradient is not self._gradients[slot]:
            if gradient.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of {self.names[slot]!r} is sparse ({gradient.layout}), which cannot be exchanged: "
                    "make it dense, for example nn.Embedding(..., sparse=False)"
                )
            is_sharded = self._gradients[slot] is not view
            view.copy_(held_here(placed_like(gradient, parameter)) if is_sharded else gradient)
            parameter.grad = self._gradients[slot]
        return True

    def holds_gradient(self, slot: int) -> bool:
        """Whether parameter.grad is what lies in this bucket."""
        return self._parameters[slot].grad is self._gradients[slot]

    def scale(self, slot: int, factor: float) -> None:
        self._views[slot].mul_(factor)

    def start(self, step: int) -> None:
        """Collect what there is and begin its reduction. Until complete(), nobody may touch the gradients.

        step: how many exchanges there have been.
        """
        self._absent = [slot for slot in range(len(self.items)) if not self.collect(slot)]
        self.presence.fill_(1)
        if self._absent:
            self.presence[self._absent] = 0
        if self._wire is not self._buffer:
            self._wire.copy_(self._buffer)
        self._send(step)
        self._in_flight = True

    def _send(self, step: int) -> None:
        self._work = self._reduction.start(self._wire)

    def wait(self) -> None:
        """Until what start() began is done. Raises its error."""
        assert self._work is not None
        self._work.wait()

    def complete(self) -> None:
        """Until the reduction is done, where it takes more than one operation. Raises its error."""

    def finish(self) -> None:
        """Hand out the result: a parameter without gradient on this rank gets one if any rank has it."""
        if self._wire is not self._buffer:
            self._buffer.copy_(self._wire)
        if self._absent:
            present = self.presence.tolist()
            for slot in self._absent:
                if present[slot]:
                    self._parameters[slot].grad = self._gradients[slot]
                else:
                    self._on_absent_everywhere(slot)

    def _on_absent_everywhere(self, slot: int) -> None:
        """For buckets that have a result all the same."""

    def forget(self) -> None:
        """Be ready for the next start()."""
        self._work = None
        self._in_flight = False


def cast_bucket(
    plan: BucketPlan, names: Sequence[str], parameters: Sequence[Tensor], cast: Cast, reduction: Reduction
) -> Bucket:
    """A bucket that travels as a floating-point dtype, with presence in the same message."""
    like = parameters[plan.items[0]]
    wire = _wire_memory(reduction.communicator, plan.numel, cast.dtype_on_wire(like.dtype), like.device)
    return Bucket(plan, names, parameters, reduction, wire)


def _wire_memory(communicator: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, where the communicator reduces them with the least copying."""
    if device.type == "cpu":
        return communicator.empty(numel, dtype=dtype).zero_()
    return torch.zeros(numel, dtype=dtype, device=device)


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's strides where it is dense, so that optimizers see gradients laid out like parameters."""
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
