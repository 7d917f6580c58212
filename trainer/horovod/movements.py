"""Horovod's verbs that move. What holds for all verbs stands in the package's docstring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from collectives import Communicator
from trainer.horovod.functional import Allgather, Alltoall, Broadcast, copied
from trainer.horovod.handles import Handle
from trainer.process_sets import ProcessSetLike, global_process_set
from trainer.validation import check_tensor
from trainer.world import communicator_of, here, root_in


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSetLike = global_process_set) -> Tensor:
    """Return all ranks' tensors, one after the other along dimension 0, which alone may differ in size."""
    communicator = communicator_of(process_set)
    output: Tensor = Allgather.apply(communicator, _rows_by_rank(communicator, tensor), tensor)
    return output


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Handle[Tensor]:
    """Run allgather() in the background, except for the sizes, which are exchanged before this returns."""
    communicator = communicator_of(process_set)
    rows = _rows_by_rank(communicator, tensor)
    output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    work = communicator.allgather(list(output.split(rows)), tensor.detach(), async_op=True)
    return Handle(work, output)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Tensor:
    """Return a new tensor like `tensor` with the values that it has on root_rank."""
    communicator = communicator_of(process_set)
    output: Tensor = Broadcast.apply(communicator, root_in(communicator, root_rank), check_tensor(tensor))
    return output


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Handle[Tensor]:
    """Run broadcast() in the background; synchronize() returns the new tensor."""
    return broadcast_async_(copied(check_tensor(tensor)), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Tensor:
    """Run broadcast() in place, and return `tensor`."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Handle[Tensor]:
    """Run broadcast() in place, in the background: leave `tensor` alone until synchronize(), which returns it."""
    communicator = communicator_of(process_set)
    root = root_in(communicator, root_rank)
    work = communicator.broadcast(check_tensor(tensor).detach(), root, async_op=True)
    return Handle(work, tensor)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send a slice of rows to every rank; return the rows received, in rank order.

    splits[r] rows go to rank r, all equally many where it is None; rows are alike on all ranks. With splits the result
    is a pair: the rows, and an int32 tensor (on the CPU) of how many came from each rank.
    """
    communicator = communicator_of(process_set)
    sent, received = _exchange_splits(communicator, tensor, splits)
    output: Tensor = Alltoall.apply(communicator, sent, received, tensor)
    return output if splits is None else (output, torch.tensor(received, dtype=torch.int32))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Handle[Tensor] | Handle[tuple[Tensor, Tensor]]:
    """Run alltoall() in the background, except for the splits, which are exchanged before this returns."""
    communicator = communicator_of(process_set)
    sent, received = _exchange_splits(communicator, tensor, splits)
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    work = communicator.alltoall(output, tensor.detach(), received, sent, async_op=True)
    return Handle(work, output) if splits is None else Handle(work, (output, torch.tensor(received, dtype=torch.int32)))


def barrier(process_set: ProcessSetLike = global_process_set) -> None:
    """Return once all ranks have called it."""
    communicator_of(process_set).barrier()


_Kind: TypeAlias = tuple[list[int], str]
"""Shape and dtype of a rank's tensor."""


def _rows_by_rank(communicator: Communicator, tensor: Tensor) -> list[int]:
    """Return the size of dimension 0 on every rank. Raises ValueError on all ranks where tensors do not fit."""
    kinds: list[_Kind] = communicator.allgather_record(_kind(check_tensor(tensor)))
    for rank, (shape, _) in enumerate(kinds):
        if not shape:
            raise ValueError(f"{here()}allgather needs tensors of at least one dimension; rank {rank} gave a scalar")
    _check_rows_fit("allgather", kinds)
    return [shape[0] for shape, _ in kinds]


def _exchange_splits(
    communicator: Communicator, tensor: Tensor, splits: Tensor | Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Return rows to every rank, and rows from every rank. Raises ValueError on all ranks where they do not fit."""
    size = communicator.size
    if check_tensor(tensor).dim() == 0:
        raise ValueError(f"{here()}alltoall needs a tensor of at least one dimension, not a scalar")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"{here()}alltoall without splits needs a multiple of {size} rows, not {rows}")
        sent = [rows // size] * size
    else:
        sent = [int(split) for split in splits]
        if len(sent) != size or min(sent) < 0 or sum(sent) != rows:
            raise ValueError(f"{here()}splits must be {size} whole numbers >= 0 that add up to {rows} rows, not {sent}")
    everyones: list[tuple[_Kind, list[int]]] = communicator.allgather_record((_kind(tensor), sent))
    _check_rows_fit("alltoall", [kind for kind, _ in everyones])
    return sent, [theirs[communicator.rank] for _, theirs in everyones]


def _kind(tensor: Tensor) -> _Kind:
    return list(tensor.shape), str(tensor.dtype)


def _check_rows_fit(verb: str, kinds: Sequence[_Kind]) -> None:
    """Raise ValueError where rows of the ranks' tensors differ in shape or dtype."""
    first_shape, first_dtype = kinds[0]
    for rank, (shape, dtype) in enumerate(kinds):
        if (shape[1:], dtype) != (first_shape[1:], first_dtype):
            raise ValueError(
                f"{here()}{verb} needs tensors that agree in dtype and in all dimensions but the first: "
                f"rank 0 gave {first_shape} {first_dtype}, rank {rank} gave {shape} {dtype}"
            )
