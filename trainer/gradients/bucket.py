"""Buckets: gradients of one dtype and device, fused into one buffer."""

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
    """The buffer of a plan, with a view for the gradient of every parameter in the plan, or of this rank's shard if the
    parameter is sharded.

    names, parameters: of all plans; plan.items selects those of this bucket. kind: the cast or codec by which gradients are
    sent. number: differs between buckets. buffer: the buffer that is exchanged. memory: holds the gradients, each in its span,
    by slot; it is the buffer's values if these have the gradients' dtype. presence: one number for each gradient: whether this
    rank has the gradient, and after the exchange, whether any rank has it; below zero if a rank has a sparse gradient, which
    the bucket does not exchange. With codes or shares, the buffer of presence_of() holds the presence and has its own message;
    else it is in the bucket's message. in_flight: whether the bucket is being exchanged. shares: by rank, the parts of the
    memory that are the rank's share; empty if each rank gets the whole memory. finished_version: the memory's version when its
    gradients were assigned. gradients: the future parameter.grad, by slot: views of the memory, if parameters are not sharded.
    """

    def __init__(
        self,
        setup: Setup,
        plan: BucketPlan,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        kind: Cast | Encoding,
        number: int,
        densified: set[int],
    ) -> None:
        combination, communicator = setup.combination, setup.combination.communicator
        self.items = plan.items
        self.names = [names[item] for item in plan.items]
        self.parameters = [parameters[item] for item in plan.items]
        self._densifies, self._densified = setup.sparse_as_dense, densified
        self._share = combination.inputs / communicator.size
        self._marks_sparse = -(communicator.size + 1)  # below zero whatever the dense gradients of other ranks add
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
        """Return the buffer if a codec exchanges it; else None."""
        return self.buffer if isinstance(self.buffer, CodedBuffer) else None

    def collect(self, slot: int) -> bool:
        """Copy the gradient of the slot's parameter into the memory, and make parameter.grad the view of it.

        Return False, with zeros in the memory, if the parameter has no gradient, or one that stays sparse.
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
                self._densified.add(self.items[slot])
            is_sharded = self.gradients[slot] is not view
            view.copy_(held_here(placed_like(gradient, parameter)) if is_sharded else gradient)
            parameter.grad = self.gradients[slot]
        return True

    def holds_gradient(self, slot: int) -> bool:
        """Return whether parameter.grad is the view of this bucket."""
        return self.parameters[slot].grad is self.gradients[slot]

    def scale(self, slot: int, factor: float) -> None:
        """Multiply a gradient by a factor, in place."""
        self._views[slot].mul_(factor)

    def start(self, step: int, residuals: Mapping[int, Tensor]) -> None:
        """Collect this rank's gradients and begin their exchange. Do not use the gradients until the exchange is done.

        step: the number of earlier exchanges. residuals: by slot, in the order of memory, errors of earlier exchanges, the same
        on all ranks; this rank adds its part of them.
        """
        self._absent = [slot for slot in range(len(self.items)) if not self.collect(slot)]
        for slot, residual in residuals.items():
            self.memory[self.spans[slot]].add_(residual, alpha=self._share)
        self.presence.fill_(1)
        for slot in self._absent:
            self.presence[slot] = 0 if self.parameters[slot].grad is None else self._marks_sparse
        if self._densified:
            for slot, item in enumerate(self.items):
                if item in self._densified and slot not in self._absent:
                    self.presence[slot] = self._marks_sparse
        if self.memory is not self.buffer.values:
            self.buffer.values.copy_(self.memory)
        self.buffer.start(step)
        self.in_flight = True

    @property
    def is_incomplete(self) -> bool:
        """Return whether the bucket was started without some gradient, because this rank has none or a sparse one."""
        return bool(self._absent)

    def found_sparse(self) -> list[int]:
        """Return, after the exchange, the parameters for which a rank has a sparse gradient. All ranks return the same, except
        that a rank omits parameters for which it has a dense gradient."""
        self._present = self.presence.tolist() if self._absent else []
        return [self.items[slot] for slot in self._absent if self._present[slot] < 0 and not self._densifies]

    def finish(self) -> None:
        """Assign the results, after found_sparse(). A parameter without a gradient on this rank gets one if any rank has it."""
        if self.memory is not self.buffer.values:
            self.memory.copy_(self.buffer.values)
        for slot in self._absent:
            if self._present[slot] > 0 or (self._present[slot] < 0 and self._densifies):
                self.parameters[slot].grad = self.gradients[slot]
                if self._present[slot] < 0:
                    self._densified.add(self.items[slot])
            elif self.coded is not None:  # the code has a result for it nevertheless
                self.coded.withhold(slot)
        if self._of_others:
            torch._foreach_zero_(self._of_others)
        self.take_note()

    def take_note(self) -> None:
        """Record the memory's version with the finished gradients."""
        self.finished_version = self.memory._version


def presence_of(buckets: Sequence[Bucket], combination: Combination) -> list[PlainBuffer]:
    """Return a buffer that counts, exactly and in one message, how many ranks have each gradient, for the buckets whose own
    message does not count them."""
    counted = [bucket for bucket in buckets if bucket.coded is not None or bucket.shares]
    if not counted:
        return []
    lengths = [len(bucket.items) for bucket in counted]
    counts = torch.zeros(sum(lengths), device=counted[0].presence.device, dtype=torch.float32)
    for bucket, part in zip(counted, counts.split(lengths), strict=True):
        bucket.presence = part
    return [PlainBuffer(Combination(combination.communicator, Sum), counts)]


def zeros_for(communicator: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in memory that a communicator reduces and gathers with the fewest copies."""
    if device.type == "cpu":
        return communicator.empty(numel, dtype=dtype).zero_()
    return torch.zeros(numel, dtype=dtype, device=device)


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's strides as if it were dense, for tensors that are laid out like a parameter."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def _shape_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor with its dimensions in the order of memory, as if it were dense."""
    strides = dense_strides(tensor)
    return tuple(tensor.shape[d] for d in sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True))
