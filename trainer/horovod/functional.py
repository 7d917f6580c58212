"""Collectives that autograd can differentiate, with the gradients that Horovod gives them, and with factors.

With g(r) for the gradient that rank r has of its result, and n ranks, the gradient of a rank's input is

    allreduce       allreduce(g) with the same op, codecs and factors
    allgather       this rank's rows of the average of all g(r)
    broadcast       on the root the average of all g(r), elsewhere 0
    reducescatter   allgather(g) * prescale * postscale, times n where op is Sum
    alltoall        the rows of all g(r) that come from this rank's rows

Only those of allreduce and alltoall are the adjoints, which are the gradients of the sum of all ranks' losses. The gradients of
these gradients, as with create_graph=True, are the adjoints of the functions above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.collectives import Communicator, Work
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.reduction import Reduction
from gradwire.trainer.reducer.arguments import Adasum, Average, Sum
from gradwire.trainer.rules.adasum import adasum_

Rows = list[int]
"""How many rows of dimension 0 each rank has of a tensor."""

Begun: TypeAlias = tuple[list[Work], Callable[[], Sequence[Tensor]]]
"""The Works of an operation, and a function that returns its results when all are done."""

Begin: TypeAlias = Callable[[Sequence[Tensor], bool], Begun]
"""Begins an operation with the tensors of this rank; the bool says whether in the background."""


class Collective(NamedTuple):
    """A linear function of the tensors of all ranks. Called with this rank's tensors, it returns results that autograd can
    differentiate. gradient: the function that maps the gradients of the results to those of the tensors. adjoint: the adjoint of
    `gradient`, for the gradients of gradients."""

    begin: Begin
    gradient: Begin
    adjoint: Begin

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        return list(_Differentiable.apply(self, *tensors))


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: Collective, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.collective = collective
        _, results = collective.begin(tensors, False)
        return tuple(results())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        _, gradient, adjoint = ctx.collective
        return (None, *Collective(gradient, adjoint, gradient)(*gradients))


def allreduce_of(communicator: Communicator, reduction: Reduction, codecs: Sequence[Codec | None]) -> Collective:
    """Return the allreduce of tensors. codecs: one for each tensor, or None, which encode their gradients too."""
    reduce = partial(begin_allreduce, communicator, reduction, codecs)
    gradient = partial(_begin_differentiable, "allreduce", reduction.op, reduce)
    return Collective(reduce, gradient, reduce)


def allgather_of(communicator: Communicator, rows: Sequence[Rows]) -> Collective:
    """Return the function that returns all ranks' tensors, one after the other along dimension 0."""
    return Collective(
        partial(_begin_allgather, communicator, rows, 1.0),
        partial(_begin_reducescatter, communicator, Reduction(Average), rows),
        partial(_begin_allgather, communicator, rows, 1 / communicator.size),
    )


def reducescatter_of(communicator: Communicator, reduction: Reduction, rows: Sequence[Rows]) -> Collective:
    """Return the function that returns this rank's rows of the reduced tensors."""
    scale = reduction.prescale * reduction.postscale * (communicator.size if reduction.op == Sum else 1)
    gather = partial(_begin_allgather, communicator, rows, scale)
    return Collective(
        partial(_begin_reducescatter, communicator, reduction, rows),
        partial(_begin_differentiable, "reducescatter", reduction.op, gather),
        partial(_begin_reducescatter, communicator, Reduction(Sum, postscale=scale), rows),
    )


def broadcast_of(communicator: Communicator, root: int) -> Collective:
    """Return the function that returns the tensor of the root."""
    return Collective(
        partial(_begin_broadcast, communicator, root, 1.0),
        partial(_begin_average_on_root, communicator, root),
        partial(_begin_broadcast, communicator, root, 1 / communicator.size),
    )


def alltoall_of(communicator: Communicator, sent: Rows, received: Rows) -> Collective:
    """Return the function that sends rows to every rank, and returns those received, in rank order."""
    exchange = partial(_begin_alltoall, communicator, sent, received)
    return Collective(exchange, partial(_begin_alltoall, communicator, received, sent), exchange)


def _begin_differentiable(verb: str, op: str, begin: Begin, gradients: Sequence[Tensor], async_op: bool) -> Begun:
    """Begin to compute gradients. Raises RuntimeError for an op that has none."""
    if op not in (Sum, Average):
        raise RuntimeError(f"{verb} with op={op!r} has no gradient; only {Sum!r} and {Average!r} have")
    return begin(gradients, async_op)


def begin_allreduce(
    communicator: Communicator,
    reduction: Reduction,
    codecs: Sequence[Codec | None],
    tensors: Sequence[Tensor],
    async_op: bool,
) -> Begun:
    """Begin to reduce copies of tensors."""
    outputs = [copied(tensor) for tensor in tensors]
    plain = [output for output, codec in zip(outputs, codecs, strict=True) if codec is None]
    works, finish = begin_allreduce_(communicator, reduction, plain, async_op) if plain else ([], list)
    for number, (output, codec) in enumerate(zip(outputs, codecs, strict=True)):
        if codec is not None:
            work = communicator.allreduce(
                output,
                reduction.op,
                prescale=reduction.prescale,
                postscale=reduction.postscale,
                compression=codec,
                seed=number,
                async_op=async_op,
            )
            works.append(work)

    def finished() -> list[Tensor]:
        finish()
        return outputs

    return works, finished


def begin_allreduce_(
    communicator: Communicator, reduction: Reduction, tensors: Sequence[Tensor], async_op: bool
) -> Begun:
    """Begin to reduce tensors in place. Adasum is done when this returns, because each of its steps needs the one before."""
    op, prescale, postscale = reduction.op, reduction.prescale, reduction.postscale
    given = [tensor.detach() for tensor in tensors]
    if op == Adasum:
        adasum_(communicator, given, prescale, postscale)
        return [], lambda: tensors
    if not _scales_integers(reduction, given):
        work = communicator.grouped_allreduce(given, op, prescale=prescale, postscale=postscale, async_op=async_op)
        return [work], lambda: tensors
    contributions = [copied(tensor) if prescale == 1 else _scaled(tensor, prescale) for tensor in given]
    op, divisor = _undivided(op, communicator.size)
    work = communicator.grouped_allreduce(contributions, op, async_op=async_op)

    def finish() -> Sequence[Tensor]:
        for tensor, reduced in zip(given, contributions, strict=True):
            tensor.copy_(_scaled(reduced, postscale, divisor))
        return tensors

    return [work], finish


def _begin_allgather(
    communicator: Communicator, rows: Sequence[Rows], scale: float, tensors: Sequence[Tensor], async_op: bool
) -> Begun:
    """Begin to gather tensors along dimension 0, times a factor."""
    works, outputs = [], []
    for counts, tensor in zip(rows, tensors, strict=True):
        outputs.append(tensor.new_empty((sum(counts), *tensor.shape[1:])))
        works.append(communicator.allgather(list(outputs[-1].split(counts)), tensor.detach(), async_op=async_op))
    return works, lambda: outputs if scale == 1 else [_scaled(output, scale) for output in outputs]


def _begin_reducescatter(
    communicator: Communicator,
    reduction: Reduction,
    rows: Sequence[Rows],
    tensors: Sequence[Tensor],
    async_op: bool,
) -> Begun:
    """Begin to reduce tensors, and return this rank's rows of them."""
    op, divisor = reduction.op, 1
    if _scales_integers(reduction, tensors):
        op, divisor = _undivided(op, communicator.size)
    works, outputs = [], []
    for counts, tensor in zip(rows, tensors, strict=True):
        outputs.append(tensor.new_empty((counts[communicator.rank], *tensor.shape[1:])))
        chunks = list(_scaled(tensor, reduction.prescale).split(counts))
        works.append(communicator.reduce_scatter(outputs[-1], chunks, op, async_op=async_op))
    return works, lambda: [_scaled(output, reduction.postscale, divisor) for output in outputs]


def _begin_broadcast(
    communicator: Communicator, root: int, scale: float, tensors: Sequence[Tensor], async_op: bool
) -> Begun:
    """Begin to send copies of the root's tensors to all ranks, times a factor."""
    outputs = [copied(tensor) for tensor in tensors]
    works = [communicator.broadcast(output, root, async_op=async_op) for output in outputs]
    return works, lambda: outputs if scale == 1 else [_scaled(output, scale) for output in outputs]


def _begin_average_on_root(communicator: Communicator, root: int, tensors: Sequence[Tensor], async_op: bool) -> Begun:
    """Begin to average all ranks' tensors on the root; the other ranks return zeros."""
    outputs = [copied(tensor) for tensor in tensors]
    works = [communicator.reduce(output, root, Average, async_op=async_op) for output in outputs]
    return works, lambda: outputs if communicator.rank == root else [output.zero_() for output in outputs]


def _begin_alltoall(
    communicator: Communicator, sent: Rows, received: Rows, tensors: Sequence[Tensor], async_op: bool
) -> Begun:
    """Begin to send rows of tensors to every rank; return the rows received."""
    outputs = [tensor.new_empty((sum(received), *tensor.shape[1:])) for tensor in tensors]
    pairs = zip(outputs, tensors, strict=True)
    works = [
        communicator.alltoall(output, tensor.detach(), received, sent, async_op=async_op) for output, tensor in pairs
    ]
    return works, lambda: outputs


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy without autograd history."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _scales_integers(reduction: Reduction, tensors: Sequence[Tensor]) -> bool:
    """Return whether the factors are not 1 and a tensor has integers, which a Communicator does not multiply."""
    return reduction.is_scaled and any(is_integer(tensor) for tensor in tensors)


def _undivided(op: str, size: int) -> tuple[str, int]:
    """Return another op, and the divisor that makes its result that of this op, so that an average of integers times a factor
    is truncated only once."""
    return (Sum, size) if op == Average else (op, 1)


def _scaled(tensor: Tensor, factor: float, divisor: int = 1) -> Tensor:
    """Return tensor * factor / divisor in the tensor's dtype, without autograd history; the tensor itself if both are 1.

    Integers are multiplied and divided in float64 and then truncated toward zero, as Horovod does; those beyond 2**53
    are rounded to float64 first.
    """
    tensor = tensor.detach()
    if factor == divisor == 1:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor * (factor / divisor)
    return tensor.double().mul_(factor).div_(divisor).to(tensor.dtype)


def is_integer(tensor: Tensor) -> bool:
    """Return whether a tensor has whole numbers."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype is not torch.bool
