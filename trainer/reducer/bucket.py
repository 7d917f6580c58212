"""Buckets: gradients of one dtype and device, fused into one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_, is_not

import torch
from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.trainer.reducer.buffers import CodedBuffer, PlainBuffer, buffer_for
from gradwire.trainer.reducer.compression import Cast, Encoding
from gradwire.trainer.reducer.dtensors import as_gradient_of, held_here, is_placed_like, placed_like
from gradwire.trainer.reducer.layout import BucketPlan
from gradwire.trainer.reducer.residuals import Residuals
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.reducer.streams import WritingStreams, keep_for

_SMALL = 1 << 14
"""Gradients of at most this many elements are copied together, since a call takes about as long as the copy of one."""

# What a step does for every parameter is done by these, since a loop in Python takes as long as the exchange of small gradients.
_grad_of = attrgetter("grad")
_layout_of = attrgetter("layout")
_is_set_to = Tensor.is_set_to


class Bucket:
    """The buffer of a plan, with a view for the gradient of every parameter in the plan, or of this rank's shard if the
    parameter is sharded. The index of a parameter in the bucket is its slot.

    An exchange has three steps: copy_in() the gradients, launch() the exchange, and finalize() it when the buffer is complete.

    names, parameters: of all plans; plan.items selects those of this bucket. kind: the cast or codec by which gradients are
    sent. number: differs between buckets. densified: the parameters of all buckets whose sparse gradients were made dense.

    buffer: the buffer that is exchanged. memory: holds the gradients, each in its span, by slot; it is the buffer's values if
    these have the gradients' dtype. presence: one number for each gradient: whether this rank has the gradient, and after the
    exchange, whether any rank has it; below zero if a rank has a sparse gradient, which the bucket does not exchange.
    counts_presence: whether it is in the bucket's message; with codes or shares, Presence has it in a message of its own. kinds:
    by slot, the dtype and device of the memory. streams: those that write the gradients; None on the CPU. missing: how many
    gradients have not arrived in this window. in_flight: whether the bucket is being exchanged. shares: by rank, the parts of the
    memory that are the rank's share; empty if each rank gets the whole memory. gradients: the future parameter.grad, by slot:
    tensors in the memory, if parameters are not sharded. To autograd they are no views, so that grad.detach_() works. own_grads:
    by slot, the gradients in memory of the program's own, which are there before backward() or before an exchange outside of it:
    they remain parameter.grad, and the results are copied to them. at_once: by slot, whether to copy in the gradient as soon as
    it arrives: a large one, to free its memory, and that of a sharded parameter, since all ranks of its mesh must do so in the
    same order. The others are copied together, which takes less time.
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
        communicator = setup.communicator
        self.items = plan.items
        self.number = number
        self.names = [names[item] for item in plan.items]
        self.parameters = [parameters[item] for item in plan.items]
        self._densifies, self._densified = setup.sparse_as_dense, densified
        self._marks_sparse = -(communicator.size + 1)  # below zero whatever the dense gradients of other ranks add
        held = list(map(held_here, self.parameters))
        device, dtype = held[0].device, held[0].dtype
        if isinstance(kind, Encoding):
            shapes = list(map(_shape_in_memory, held))
            self.buffer: PlainBuffer = buffer_for(kind)(setup, kind, plan, shapes, device, dtype, number)
        else:
            values = zeros_for(communicator, plan.numel, dtype, device)
            self.buffer = PlainBuffer(setup, values, kind.codec(dtype))
        self.memory = self.buffer.values.to(dtype)
        self.shares = communicator.shares(self.memory.numel(), dtype, device) if setup.in_shares else ()
        self._rank = communicator.rank
        others = [parts for rank, parts in enumerate(self.shares) if rank != self._rank]
        self._of_others = [self.memory[part] for parts in others for part in parts]
        self.spans = [slice(start, start + each.numel()) for each, start in zip(held, plan.offsets, strict=True)]
        self._views = [
            self.memory.as_strided(tensor.shape, dense_strides(tensor), offset)
            for tensor, offset in zip(held, plan.offsets, strict=True)
        ]
        self._is_sharded = [tensor is not own for tensor, own in zip(held, self.parameters, strict=True)]
        self.at_once = [
            tensor.numel() > _SMALL or tensor is not own for tensor, own in zip(held, self.parameters, strict=True)
        ]
        self.kinds = [(dtype, device)] * len(held)
        self._takes_gradients = setup.gradient_as_bucket_view
        self._is_plain = self._takes_gradients and not any(self._is_sharded)
        self.gradients = [self._new_gradient(slot) for slot in range(len(held))]
        self.own_grads: dict[int, Tensor] = {}
        self._versions: list[tuple[int, int, int] | None] = []
        self.presence = self.memory[plan.presence_offset :]
        self.counts_presence = self.coded is None and not self.shares
        self.streams = WritingStreams(device) if device.type == "cuda" else None
        self.missing = len(held)
        self.in_flight = False
        self.absent: list[int] = []
        """The slots that were launched without a gradient, because this rank has none or a sparse one."""
        self.present: list[float] = []
        """The presence after the exchange, by slot."""

    @property
    def coded(self) -> CodedBuffer | None:
        """Return the buffer if a codec exchanges it; else None."""
        return self.buffer if isinstance(self.buffer, CodedBuffer) else None

    def open(self, arrived: int | None = None) -> None:
        """Begin a window: expect all gradients, and find those in memory of the program's own.

        arrived: the slot whose gradient has arrived already. It counts as the program's if it was changed in place: backward()
        has added to it, or, if the model uses the parameter several times, to its own sum, which is then kept like the program's.
        """
        self.missing = len(self.items)
        self.own_grads = {}
        gradients = [*map(_grad_of, self.parameters)]
        if arrived is not None and (fresh := gradients[arrived]) is not None and not fresh._version:
            gradients[arrived] = None
        if not any(map(is_not, gradients, repeat(None))) or self._all_lie_there(gradients):
            return
        for slot, (gradient, parameter) in enumerate(zip(gradients, self.parameters, strict=True)):
            if gradient is None or (gradient is self.gradients[slot] and self._lies_there(slot, gradient)):
                continue
            if _is_writable(gradient) and (not self._is_sharded[slot] or is_placed_like(gradient, parameter)):
                self.own_grads[slot] = gradient

    def copy_in(self) -> list[int]:
        """Copy the gradients of all parameters into the memory: see copy_slots()."""
        stream = None if self.streams is None else self.streams.join()
        gradients = [*map(_grad_of, self.parameters)]
        if not (
            self._is_plain
            and not self.own_grads
            and all(map(is_not, gradients, repeat(None)))
            and all(map(is_, map(_layout_of, gradients), repeat(torch.strided)))
            and all(map(_is_set_to, self.gradients, self._views))
        ):
            return self.copy_slots(range(len(self.items)), stream)
        moved = [*map(is_not, gradients, self.gradients)]
        if any(moved):
            sources = [*compress(gradients, moved)]
            torch._foreach_copy_([*compress(self._views, moved)], sources)
            if stream is not None:
                keep_for(stream, sources)
        for parameter, result in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = result
        return []

    def copy_slots(self, slots: Iterable[int], stream: torch.cuda.Stream | None = None) -> list[int]:
        """Copy the gradients of these slots' parameters into the memory, unless they are there. Make each parameter.grad the
        tensor in the memory, unless it is the program's. stream: the current one, if gradients may be those of others.

        Return the slots, with zeros in the memory, of parameters without a gradient, or with one that stays sparse.
        """
        absent, found = [], []
        for slot in slots:
            gradient = self.parameters[slot].grad
            if gradient is not None and gradient.layout is not torch.strided:
                gradient = self._densely(slot, gradient)
            if gradient is None:
                absent.append(slot)
            elif gradient is not self.gradients[slot] or not self._lies_there(slot, gradient):
                found.append((slot, gradient))
        if found:
            parts = [self._part_here(slot, each) if self._is_sharded[slot] else each for slot, each in found]
            torch._foreach_copy_([self._views[slot] for slot, _ in found], parts)
            if stream is not None:
                keep_for(stream, parts)
            self._take_gradients([slot for slot, gradient in found if self.own_grads.get(slot) is not gradient])
        for slot in absent:
            self._views[slot].zero_()
        return absent

    def _densely(self, slot: int, gradient: Tensor) -> Tensor | None:
        """Make a sparse gradient dense, and return it; None if it stays sparse."""
        if self._densifies:
            self._densified.add(self.items[slot])
            self.parameters[slot].grad = dense = gradient.to_dense()
            return dense
        if self.shares:
            raise ValueError(
                f"rank {self._rank}: the gradient of {self.names[slot]!r} is sparse, which rules.Sharded does not support: give "
                "sparse_as_dense=True, or use a layer with sparse=False"
            )
        return None

    def _part_here(self, slot: int, gradient: Tensor) -> Tensor:
        """Return this rank's part of the gradient of a sharded parameter."""
        part = held_here(placed_like(gradient, self.parameters[slot]))
        if part.is_cpu and torch.cuda.is_initialized() and part.is_pinned():
            # With CPUOffloadPolicy(), some versions of torch call hooks while the gradient is still on its way from the GPU.
            torch.cuda.current_stream().synchronize()
        return part

    def _lies_there(self, slot: int, gradient: Tensor) -> bool:
        """Return whether a gradient is in the slot's memory: a program may have given the slot's tensor other memory."""
        return (held_here(gradient) if self._is_sharded[slot] else gradient).is_set_to(self._views[slot])

    def _all_lie_there(self, gradients: Sequence[Tensor | None]) -> bool:
        """Return whether the gradients of all slots are those in the memory."""
        return (
            not any(self._is_sharded)
            and all(map(is_, gradients, self.gradients))
            and all(map(_is_set_to, self.gradients, self._views))
        )

    def _new_gradient(self, slot: int) -> Tensor:
        return as_gradient_of(self.parameters[slot], self._views[slot].data)

    def gradients_in_memory(self, slots: Sequence[int] | None = None) -> list[Tensor]:
        """Return the gradients of these slots, by default of all, made anew if the program has given the last ones other
        memory."""
        slots = range(len(self.items)) if slots is None else slots
        for slot in slots:
            if not self._lies_there(slot, self.gradients[slot]):
                self.gradients[slot] = self._new_gradient(slot)
        return [self.gradients[slot] for slot in slots]

    def place_gradients(self) -> None:
        """Make every parameter.grad the tensor in the memory, before there are gradients."""
        for parameter, gradient in zip(self.parameters, self.gradients_in_memory(), strict=True):
            parameter.grad = gradient

    def _take_gradients(self, slots: Sequence[int]) -> None:
        """Make parameter.grad the tensor in the memory, in place of one that backward() has made, or of none. If gradients are
        not to be in buckets, the one of backward() stays, as if the program had made it."""
        if self._takes_gradients:
            for slot, gradient in zip(slots, self.gradients_in_memory(slots), strict=True):
                self.parameters[slot].grad = gradient
            return
        for slot in slots:
            parameter = self.parameters[slot]
            own = parameter.grad
            if own is None or (self._is_sharded[slot] and not is_placed_like(own, parameter)):
                parameter.grad = own = torch.empty_like(parameter, requires_grad=False)
            self.own_grads[slot] = own

    def take_over(self, slot: int, other: Bucket, other_slot: int) -> None:
        """Copy in a parameter's gradient from another bucket, if it is there."""
        gradient = self.parameters[slot].grad
        if gradient is not None and gradient is other.gradients[other_slot]:
            other._keep()
            self.copy_slots([slot])

    def _keep(self) -> None:
        """On a GPU, keep the memory until the current stream has used it."""
        if self.streams is not None:
            self.streams.keep((self.memory, self.buffer.values))

    def fill(self) -> dict[int, Tensor]:
        """Give zeros to the parameters that require gradients and have none; return these zeros by parameter."""
        slots = [slot for slot, each in enumerate(self.parameters) if each.requires_grad and each.grad is None]
        self._take_gradients(slots)
        pairs = [(self.items[slot], self.parameters[slot].grad) for slot in slots]
        return {item: gradient.zero_() for item, gradient in pairs if gradient is not None}

    def empty(self, slot: int, zeros: Tensor) -> None:
        """Set the gradient of a slot's parameter to None, if it consists of the zeros that fill() returned, or of the zeros in
        another bucket that has replaced that one."""
        gradient = self.parameters[slot].grad
        if gradient is None or not (gradient is zeros or gradient is self.gradients[slot]):
            return
        if not held_here(gradient).any():
            self.parameters[slot].grad = None

    def scale(self, slot: int, factor: float) -> None:
        """Multiply the gradient of the slot's parameter by a factor, in place."""
        gradient = self.parameters[slot].grad
        assert gradient is not None
        held_here(gradient).mul_(factor)

    def discard(self) -> None:
        """Discard this rank's gradients, even NaN. finalize() returns the program's own tensors, if any rank has a gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def launch(self, step: int, residuals: Residuals, factor: float, *, awaited: bool = False) -> None:
        """Copy in this rank's gradients, multiply them by a factor, add their residuals, and begin the exchange. Do not use the
        gradients until it is done. step: the number of earlier exchanges. awaited: see PreparedOperation.start()."""
        self.absent = self.copy_in()
        if factor != 1.0:
            self.memory.mul_(factor)
        if residuals:
            parts = {item: self.memory[span] for item, span in zip(self.items, self.spans, strict=True)}
            residuals.add_to(parts, self.buffer.combination.share)
        if self.counts_presence:
            self.presence.fill_(1)
            if self.absent or self._densified:
                self.mark_absent()
        if self.memory is not self.buffer.values:
            self.buffer.values.copy_(self.memory)
        self.buffer.start(step, awaited=awaited)
        self.in_flight = True

    def mark_absent(self) -> None:
        """Mark in the presence, which is 1, the slots without a dense gradient on this rank."""
        for slot in self.absent:
            self.presence[slot] = 0 if self.parameters[slot].grad is None else self._marks_sparse
        if self._densified:
            for slot, item in enumerate(self.items):
                if item in self._densified and slot not in self.absent:
                    self.presence[slot] = self._marks_sparse

    def found_sparse(self) -> list[int]:
        """Return, after the exchange, the parameters for which a rank has a gradient that stays sparse, the same on all ranks."""
        if self._densifies:
            return []
        return [item for item, number in zip(self.items, self.present, strict=True) if number < 0]

    def finalize(self) -> None:
        """Assign the results, after found_sparse(). A parameter without a gradient on this rank gets one if any rank has it."""
        self._keep()
        if self.memory is not self.buffer.values:
            self.memory.copy_(self.buffer.values)
        for slot in self.absent:
            if self.present[slot] > 0 or (self.present[slot] < 0 and self._densifies):
                if slot in self.own_grads:  # discard() has removed it
                    self.parameters[slot].grad = self.own_grads[slot]
                else:
                    self._take_gradients([slot])
                if self.present[slot] < 0:
                    self._densified.add(self.items[slot])
            elif self.coded is not None:  # the code has a result for it nevertheless
                self.coded.add_unused(slot)
        if self._of_others:
            torch._foreach_zero_(self._of_others)
        if self.own_grads:
            self.copy_out()

    @torch.no_grad()
    def copy_out(self) -> None:
        """Copy results to the gradients in memory of the program's own."""
        for slot, gradient in self.own_grads.items():
            if self.parameters[slot].grad is gradient:
                held_here(gradient).copy_(self._views[slot])

    def record_versions(self) -> None:
        """Record the gradients, for changed(). Call it when all buckets are finished: gradients of the program may be parts of
        one tensor, which have one version."""
        self._versions = self._now()

    def changed(self) -> str | None:
        """Return the name of a parameter whose gradient has been changed or replaced since record_versions(), as far as torch
        notices; None if there is none. Changes through grad.data in the same memory are not detected; step() uses them."""
        now = self._now()
        if now == self._versions:
            return None
        pairs = enumerate(zip(now, self._versions, strict=True))
        slots = [slot for slot, (new, old) in pairs if new != old and self.parameters[slot].grad is not None]
        return self.names[slots[0]] if slots else None

    def _now(self) -> list[tuple[int, int, int] | None]:
        """Return the identity, version and address of each gradient."""
        gradients = map(_grad_of, self.parameters)
        return [g if g is None else (id(g), g._version, g.data_ptr()) for g in gradients]


def _is_writable(gradient: Tensor) -> bool:
    """Return whether results can be copied to a gradient: not to a sparse one, nor to one whose elements share memory."""
    if gradient.layout is not torch.strided:
        return False
    return not any(stride == 0 and length > 1 for stride, length in zip(gradient.stride(), gradient.shape, strict=True))


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
