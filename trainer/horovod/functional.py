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
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.collectives import Communicator, Work
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.reduction import Reduction
from gradwire.trainer.reducer.arguments import Adasum, Average, Sum
from gradwire.trainer.rules.adasum import adasum_

Rows = list[int]
"""How many rows of dimension 0 each rank has of a tensor."""

_Function: TypeAlias = Callable[..., Sequence[Tensor]]


class _Linear(torch.autograd.Function):
    """Maps (function, adjoint, *tensors) to function(*tensors): a linear function of the tensors of all ranks, and its adjoint.
    Backward functions call it, so that gradients have gradients too."""

    @staticmethod
    def forward(ctx: Any, function: _Function, adjoint: _Function, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.functions = function, adjoint
        return tuple(function(*tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        function, adjoint = ctx.functions
        return (None, None, *_Linear.apply(adjoint, function, *gradients))


class Allreduce(torch.autograd.Function):
    """Maps (communicator, reduction, codecs, *tensors) to the reduced tensors. codecs: one for each tensor, or None, which
    encode their gradients too. Differentiable for Sum and Average."""

    @staticmethod
    def forward(
        ctx: Any, communicator: Communicator, reduction: Reduction, codecs: list[Codec | None], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = communicator, reduction, codecs
        return tuple(_allreduced(*ctx.call, *tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        check_differentiable("allreduce", ctx.call[1].op)
        reduce = partial(_allreduced, *ctx.call)
        return (None, None, None, *_Linear.apply(reduce, reduce, *gradients))


class Allgather(torch.autograd.Function):
    """Maps (communicator, rows of every tensor, *tensors) to all ranks' tensors, one after the other along dimension
    0."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, rows: list[Rows], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = communicator, rows
        return tuple(begin_allgather(communicator, rows, tensors)[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        communicator, rows = ctx.call
        scatter = partial(_scattered, communicator, Reduction(Average), rows)
        gather = partial(_gathered, communicator, rows, 1 / communicator.size)
        return (None, None, *_Linear.apply(scatter, gather, *gradients))


class ReduceScatter(torch.autograd.Function):
    """Maps (communicator, reduction, rows of every tensor, *tensors) to this rank's rows of the reduced tensors. Differentiable
    for Sum and Average."""

    @staticmethod
    def forward(
        ctx: Any, communicator: Communicator, reduction: Reduction, rows: list[Rows], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = communicator, reduction, rows
        return tuple(_scattered(*ctx.call, *tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        communicator, reduction, rows = ctx.call
        check_differentiable("reducescatter", reduction.op)
        scale = reduction.prescale * reduction.postscale * (communicator.size if reduction.op == Sum else 1)
        gather = partial(_gathered, communicator, rows, scale)
        scatter = partial(_scattered, communicator, Reduction(Sum, postscale=scale), rows)
        return (None, None, None, *_Linear.apply(gather, scatter, *gradients))


class Broadcast(torch.autograd.Function):
    """Maps (communicator, root rank, tensor) to the root's tensor."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, root_rank: int, tensor: Tensor) -> Tensor:
        ctx.call = communicator, root_rank
        return _broadcast(communicator, root_rank, 1, tensor)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        communicator, root_rank = ctx.call
        average = partial(_averaged_on_root, communicator, root_rank)
        spread = partial(_broadcast, communicator, root_rank, 1 / communicator.size)
        return (None, None, *_Linear.apply(average, spread, gradient))


class Alltoall(torch.autograd.Function):
    """Maps (communicator, rows to every rank, rows from every rank, tensor) to the rows received, in rank order."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, sent: Rows, received: Rows, tensor: Tensor) -> Tensor:
        ctx.call = communicator, sent, received
        return _exchanged(communicator, sent, received, tensor)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        communicator, sent, received = ctx.call
        back = partial(_exchanged, communicator, received, sent)
        return (None, None, None, *_Linear.apply(back, partial(_exchanged, *ctx.call), gradient))


def _allreduced(
    communicator: Communicator, reduction: Reduction, codecs: list[Codec | None], *tensors: Tensor
) -> list[Tensor]:
    """Return the reduced tensors."""
    outputs = [copied(tensor) for tensor in tensors]
    pairs = list(zip(outputs, codecs, strict=True))
    if plain := [output for output, codec in pairs if codec is None]:
        _, finish = begin_allreduce(communicator, reduction, plain, async_op=False)
        finish()
    for number, (output, codec) in enumerate(pairs):
        if codec is not None:
            communicator.allreduce(
                output,
                reduction.op,
                prescale=reduction.prescale,
                postscale=reduction.postscale,
                codec=codec,
                seed=number,
            )
    return outputs


def _gathered(communicator: Communicator, rows: list[Rows], scale: float, *tensors: Tensor) -> list[Tensor]:
    """Return the rows of all ranks, times a factor."""
    return [scaled(tensor, scale) for tensor in begin_allgather(communicator, rows, tensors)[1]]


def _scattered(communicator: Communicator, reduction: Reduction, rows: list[Rows], *tensors: Tensor) -> list[Tensor]:
    """Return this rank's rows of the reduced tensors."""
    return begin_reducescatter(communicator, reduction, rows, tensors)[1]()


def _broadcast(communicator: Communicator, root_rank: int, scale: float, tensor: Tensor) -> list[Tensor]:
    """Return the root's tensor, times a factor."""
    output = copied(tensor)
    communicator.broadcast(output, root_rank)
    return [scaled(output, scale)]


def _averaged_on_root(communicator: Communicator, root_rank: int, tensor: Tensor) -> list[Tensor]:
    """Return the average of all ranks' tensors on the root, and zeros elsewhere."""
    average = copied(tensor)
    communicator.reduce(average, root_rank, Average)
    return [average if communicator.rank == root_rank else average.zero_()]


def _exchanged(communicator: Communicator, sent: Rows, received: Rows, tensor: Tensor) -> list[Tensor]:
    """Return the rows received of all ranks."""
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    communicator.alltoall(output, tensor.detach(), received, sent)
    return [output]


def check_differentiable(verb: str, op: str) -> None:
    """Raise RuntimeError for an op that has no gradient."""
    if op not in (Sum, Average):
        raise RuntimeError(f"{verb} with op={op!r} has no gradient; only {Sum!r} and {Average!r} have")


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy without autograd history."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def begin_allreduce(
    communicator: Communicator, reduction: Reduction, tensors: Sequence[Tensor], *, async_op: bool
) -> tuple[list[Work], Callable[[], None]]:
    """Begin to reduce tensors in place. Return the running Works, and a function to call when they are done.

    Adasum is done when this returns, because each of its steps needs the one before.
    """
    op, prescale, postscale = reduction.op, reduction.prescale, reduction.postscale
    if op == Adasum:
        adasum_(communicator, tensors, prescale, postscale)
        return [], lambda: None
    if not _scales_integers(reduction, tensors):
        work = communicator.grouped_allreduce(tensors, op, prescale=prescale, postscale=postscale, async_op=async_op)
        return [] if work is None else [work], lambda: None
    contributions = [copied(tensor) if prescale == 1 else scaled(tensor, prescale) for tensor in tensors]
    op, divisor = _undivided(op, communicator.size)
    work = communicator.grouped_allreduce(contributions, op, async_op=async_op)

    def finish() -> None:
        for tensor, reduced in zip(tensors, contributions, strict=True):
            tensor.detach().copy_(scaled(reduced, postscale, divisor))

    return [] if work is None else [work], finish


def begin_allgather(
    communicator: Communicator, rows: Sequence[Rows], tensors: Sequence[Tensor], *, async_op: bool = False
) -> tuple[list[Work], list[Tensor]]:
    """Begin to gather tensors along dimension 0. Return the running Works, and the results."""
    works, outputs = [], []
    for given, tensor in zip(rows, tensors, strict=True):
        outputs.append(tensor.new_empty((sum(given), *tensor.shape[1:])))
        works.append(communicator.allgather(list(outputs[-1].split(given)), tensor.detach(), async_op=async_op))
    return [work for work in works if work is not None], outputs


def begin_reducescatter(
    communicator: Communicator,
    reduction: Reduction,
    rows: Sequence[Rows],
    tensors: Sequence[Tensor],
    *,
    async_op: bool = False,
) -> tuple[list[Work], Callable[[], list[Tensor]]]:
    """Begin to reduce tensors and divide their rows. Return the running Works, and a function that returns this rank's rows
    when they are done."""
    op, divisor = reduction.op, 1
    if _scales_integers(reduction, tensors):
        op, divisor = _undivided(op, communicator.size)
    works, outputs = [], []
    for given, tensor in zip(rows, tensors, strict=True):
        outputs.append(tensor.new_empty((given[communicator.rank], *tensor.shape[1:])))
        chunks = list(scaled(tensor, reduction.prescale).split(given))
        works.append(communicator.reduce_scatter(outputs[-1], chunks, op, async_op=async_op))
    return [work for work in works if work is not None], lambda: [
        scaled(output, reduction.postscale, divisor) for output in outputs
    ]


def _scales_integers(reduction: Reduction, tensors: Sequence[Tensor]) -> bool:
    """Return whether the factors are not 1 and a tensor has integers, which a Communicator does not multiply."""
    return reduction.is_scaled and any(is_integer(tensor) for tensor in tensors)


def _undivided(op: str, size: int) -> tuple[str, int]:
    """Return another op, and the divisor that makes its result that of this op, so that an average of integers times a factor
    is truncated only once."""
    return (Sum, size) if op == Average else (op, 1)


def scaled(tensor: Tensor, factor: float, divisor: int = 1) -> Tensor:
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
