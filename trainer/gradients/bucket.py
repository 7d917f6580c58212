"""Buckets: gradients of one dtype and device side by side in one buffer, to be exchanged as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.trainer.gradients.arguments import Sum
from gradwire.trainer.gradients.buffers import CodedBuffer, PlainBuffer, buffer_for
from gradwire.trainer.gradients.combination import Combination
from gradwire.trainer.gradients.compression import Cast, Encoding
from gradwire.trainer.gradients.dtensors import as_gradient_of, held_here, placed_like
from gradwire.trainer.gradients.layout import BucketPlan
from gradwire.trainer.gradients.setup import Setup
from gradwire.trainer.world.world import here


class Bucket:
    """Holds the buffer of a plan, with a view of it for the gradient of every parameter in it; of sharded ones, for
    this rank's shard.

    names and parameters: all that were planned, of which plan.items picks. kind: what they travel as. number: tells the
    bucket from others. buffer: what is exchanged. memory: in which the gradients lie, each in its span, by slot; the
    buffer's values where these have the gradients' dtype. presence: one number for each gradient: whether this rank has
    it, and after the exchange, whether any rank has; below zero where a rank has a sparse one, which is not exchanged
    here. With codes it is for presence_of() to count, and so where each rank gets its share only; else it is in the same
    message. in_flight: whether it is being exchanged. shares: by rank, which parts of the memory are whose where each rank
    gets its share; else nothing. finished_version: of the memory, when its gradients were handed out. gradients: what
    parameter.grad becomes, by slot: views of the memory, where parameters are not sharded.
    """

    def __init__(
        self,
        setup: Setup,
        plan: BucketPlan,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        kind: Cast | Encoding,
        number: int,
    ) -> None:
        combination, communicator = setup.combination, setup.combination.communicator
        self.items = plan.items
        self.names = [names[item] for item in plan.items]
        self.parameters = [parameters[item] for item in plan.items]
        self._densifies = setup.sparse_as_dense
        self._share = combination.inputs / communicator.size
        self._marks_sparse = -(communicator.size + 1)  # which dense ones of other ranks do not outweigh
        held = list(map(held_here, self.parameters))
        device, dtype = held[0].device, held[0].dtype
        if isinstance(kind, Encoding):
            shapes = list(map(_shape_in_memory, held))
            self.buffer: PlainBuffer = buffer_for(kind)(combination, kind, plan, shapes, device, number)
        else:
            values = zeros_for(communicator, plan.numel, dtype, device)
            self.buffer = PlainBuffer(combination, values, kind.codec(dtype))
        self.memory = self.buffer.values.to(dtype)
        self.shares = communicator.shares(self.memory.numel(), dtype) if combination.in_shares else ()
        others = [parts for rank, parts in enumerate(self.shares) if rank != communicator.rank]
        self._of_others = [self.memory[part] for parts in others for part in parts]
        self.spans = [slice(start, start + each.numel()) for each, start in zip(held, plan.offsets, strict=True)]
        self._views = [
            self.memory.as_strided(tensor.shape, dense_strides(tensor), offset)
            for tensor, offset in zip(held, plan.offsets, strict=True)
        ]
        self.gradients = list(map(as_gradient_of, self.parameters, self._views))
        self.presence = self.memory[plan.presence_offset :]
        self.in_flight = False
        self._absent: list[int] = []
        self._present: list[float] = []
        self.take_note()

    @property
    def coded(self) -> CodedBuffer | None:
        """Return the buffer where a codec exchanges it; None without one."""
        return self.buffer if isinstance(self.buffer, CodedBuffer) else None

    def collect(self, slot: int) -> bool:
        """Bring the gradient of the slot's parameter into the buffer and make parameter.grad what lies there.

        False, with zeros in the buffer, where the parameter has no gradient, or one that stays sparse.
        """
        parameter, view = self.parameters[slot], self._views[slot]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
            return False
        if gradient is not self.gradients[slot]:
            if gradient.layout is not torch.strided:
                if not self._densifies and self.shares:
                    raise ValueError(
                        f"{here()}the gradient of {self.names[slot]!r} is sparse, which shard_states=True does not support: give "
                        "sparse_as_dense=True, or use a layer with sparse=False"
                    )
                if not self._densifies:
                    view.zero_()
                    return False
                gradient = gradient.to_dense()
            is_sharded = self.gradients[slot] is not view
            view.copy_(held_here(placed_like(gradient, parameter)) if is_sharded else gradient)
            parameter.grad = self.gradients[slot]
        return True

    def holds_gradient(self, slot: int) -> bool:
        """Return whether parameter.grad is what lies in this bucket."""
        return self.parameters[slot].grad is self.gradients[slot]

    def scale(self, slot: int, factor: float) -> None:
        """Multiply a gradient by a factor, in place."""
        self._views[slot].mul_(factor)

    def start(self, step: int, residuals: Mapping[int, Tensor]) -> None:
        """Collect what there is and begin its exchange. Until that is done, nobody may touch the gradients.

        step: how many exchanges there have been. residuals: by slot, what exchanges before have not returned, the same on all
        ranks, in the order of memory: this rank adds its part.
        """
        self._absent = [slot for slot in range(len(self.items)) if not self.collect(slot)]
        for slot, residual in residuals.items():
            self.memory[self.spans[slot]].add_(residual, alpha=self._share)
        self.presence.fill_(1)
        for slot in self._absent:
            self.presence[slot] = 0 if self.parameters[slot].grad is None else self._marks_sparse
        if self.memory is not self.buffer.values:
            self.buffer.values.copy_(self.memory)
        self.buffer.start(step)
        self.in_flight = True

    @property
    def is_incomplete(self) -> bool:
        """Return whether what was started lacks a gradient that is absent here, or sparse."""
        return bool(self._absent)

    def found_sparse(self) -> list[int]:
        """Return the parameters of which a rank has a sparse gradient, when the exchange is done: the same on all ranks, unless
        one has a dense gradient instead."""
        self._present = self.presence.tolist() if self._absent else []
        return [self.items[slot] for slot in self._absent if self._present[slot] < 0]

    def finish(self) -> None:
        """Hand out the result, after found_sparse(). A parameter without gradient here gets one if any rank has it."""
        if self.memory is not self.buffer.values:
            self.memory.copy_(self.buffer.values)
        for slot in self._absent:
            if self._present[slot] > 0:
                self.parameters[slot].grad = self.gradients[slot]
            elif self.coded is not None:  # codes give it a result all the same
                self.coded.withhold(slot)
        if self._of_others:
            torch._foreach_zero_(self._of_others)
        self.take_note()

    def take_note(self) -> None:
        """Take note that the gradients are what they are to be."""
        self.finished_version = self.memory._version


def presence_of(buckets: Sequence[Bucket], combination: Combination) -> list[PlainBuffer]:
    """Return what counts, exactly and in one message, how many ranks have the gradients of buckets that do not say so."""
    counted = [bucket for bucket in buckets if bucket.coded is not None or bucket.shares]
    if not counted:
        return []
    lengths = [len(bucket.items) for bucket in counted]
    counts = torch.zeros(sum(lengths), device=counted[0].presence.device)
    for bucket, part in zip(counted, counts.split(lengths), strict=True):
        bucket.presence = part
    return [PlainBuffer(Combination(combination.communicator, Sum), counts)]


def zeros_for(communicator: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, where a communicator reduces and gathers them with the least copying."""
    if device.type == "cpu":
        return communicator.empty(numel, dtype=dtype).zero_()
    return torch.zeros(numel, dtype=dtype, device=device)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's strides, were it dense, so that what goes with a parameter is laid out as it is."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def _shape_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor's elements in the order in which they lie in memory, were it dense."""
    strides = dense_strides(tensor)
    return tuple(tensor.shape[d] for d in sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True))
