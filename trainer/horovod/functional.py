"""Collectives that autograd can differentiate. Gradients are the adjoints: those of the sum of all ranks' losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from collectives import Communicator
from collectives.compression.codec import Codec
from trainer.ops import Average, Sum


class Allreduce(torch.autograd.Function):
    """Maps (communicator, op, codecs, prescale, postscale, *tensors) to the reduced tensors. codecs: one for each
    tensor, or None, which encode their gradients too. Differentiable for Sum and Average."""

    @staticmethod
    def forward(
        ctx: Any,
        communicator: Communicator,
        op: str,
        codecs: list[Codec | None],
        prescale: float,
        postscale: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.call = communicator, op, codecs, prescale, postscale
        outputs = [copied(tensor) for tensor in tensors]
        pairs = list(zip(outputs, codecs, strict=True))
        if plain := [output for output, codec in pairs if codec is None]:
            communicator.grouped_allreduce(plain, op, prescale=prescale, postscale=postscale)
        for number, (output, codec) in enumerate(pairs):
            if codec is not None:
                communicator.allreduce(output, op, prescale=prescale, postscale=postscale, codec=codec, seed=number)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        op = ctx.call[1]
        if op not in (Sum, Average):
            raise RuntimeError(f"allreduce with op={op!r} has no gradient; only {Sum!r} and {Average!r} have")
        return (None, None, None, None, None, *Allreduce.forward(ctx, *ctx.call, *gradients))


class Allgather(torch.autograd.Function):
    """Maps (communicator, rows of every rank, tensor) to all ranks' tensors, one after the other along dimension 0."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, rows: list[int], tensor: Tensor) -> Tensor:
        ctx.call = communicator, rows
        return gather_rows(communicator, rows, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        communicator, rows = ctx.call
        output = gradient.new_empty((rows[communicator.rank], *gradient.shape[1:]))
        communicator.reduce_scatter(output, list(gradient.split(rows)), Sum)
        return None, None, output


class ReduceScatter(torch.autograd.Function):
    """Maps (communicator, rows of every rank, op, prescale, postscale, tensor) to this rank's rows of the reduction."""

    @staticmethod
    def forward(
        ctx: Any,
        communicator: Communicator,
        rows: list[int],
        op: str,
        prescale: float,
        postscale: float,
        tensor: Tensor,
    ) -> Tensor:
        ctx.call = communicator, rows, op, prescale * postscale
        output, chunks = scattered(communicator, rows, tensor, prescale)
        communicator.reduce_scatter(output, chunks, op)
        return output if postscale == 1 else output.mul_(postscale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        communicator, rows, op, scale = ctx.call
        if op not in (Sum, Average):
            raise RuntimeError(f"reducescatter with op={op!r} has no gradient; only {Sum!r} and {Average!r} have")
        gathered = gather_rows(communicator, rows, gradient)
        return None, None, None, None, None, gathered.mul_(scale / communicator.size if op == Average else scale)


class Broadcast(torch.autograd.Function):
    """Maps (communicator, root rank, tensor) to the root's tensor."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, root_rank: int, tensor: Tensor) -> Tensor:
        ctx.call = communicator, root_rank
        output = copied(tensor)
        communicator.broadcast(output, root_rank)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        communicator, root_rank = ctx.call
        total = copied(gradient)
        communicator.reduce(total, root_rank, Sum)
        return None, None, total if communicator.rank == root_rank else total.zero_()


class Alltoall(torch.autograd.Function):
    """Maps (communicator, rows to every rank, rows from every rank, tensor) to the rows received, in rank order."""

    @staticmethod
    def forward(ctx: Any, communicator: Communicator, sent: list[int], received: list[int], tensor: Tensor) -> Tensor:
        ctx.call = communicator, sent, received
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        communicator.alltoall(output, tensor.detach(), received, sent)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        communicator, sent, received = ctx.call
        output = gradient.new_empty((sum(sent), *gradient.shape[1:]))
        communicator.alltoall(output, gradient, sent, received)
        return None, None, None, output


def copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy without history."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def scattered(
    communicator: Communicator, rows: list[int], tensor: Tensor, prescale: float
) -> tuple[Tensor, list[Tensor]]:
    """Return output and input of a reduce_scatter: room for this rank's rows, and every rank's rows times prescale."""
    scaled = tensor.detach() if prescale == 1 else tensor.detach() * prescale
    return tensor.new_empty((rows[communicator.rank], *tensor.shape[1:])), list(scaled.split(rows))


def gather_rows(communicator: Communicator, rows: list[int], tensor: Tensor) -> Tensor:
    """Return all ranks' tensors along dimension 0; rows[r] is what rank r has of it."""
    output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    communicator.allgather(list(output.split(rows)), tensor.detach())
    return output
