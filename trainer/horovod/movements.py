"""Horovod's verbs that move tensors, and its allreduce of sparse tensors, which gathers them. The docstring of gradwire
describes their common arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.collectives.sparse import begin_sum
from gradwire.trainer.horovod.functional import Collective, allgather_of, alltoall_of, broadcast_of, copied
from gradwire.trainer.horovod.handles import Handle, NamedCall
from gradwire.trainer.reducer.arguments import Average, Sum, check_group, check_tensor
from gradwire.trainer.world.process_sets import ProcessSetLike, global_process_set, refused
from gradwire.trainer.world.world import root_in

T = TypeVar("T")


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSetLike = global_process_set) -> Tensor:
    """Return all ranks' tensors, concatenated along dimension 0, the only one in which their sizes may differ.

    The gradient is Horovod's: the gradients of the results are averaged over the ranks, and each rank gets the rows of its own
    tensor.
    """
    return _allgather("allgather", [tensor], name, process_set)[0]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Handle[Tensor]:
    """Run allgather() in the background, except for the sizes, which are exchanged before this returns."""
    return _allgather_async("allgather", [tensor], itemgetter(0), name, process_set)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> list[Tensor]:
    """Run allgather() of several tensors, whose sizes are exchanged together; return new tensors."""
    return _allgather("grouped_allgather", tensors, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Handle[list[Tensor]]:
    """Run grouped_allgather() in the background, except for the sizes, which are exchanged before this returns."""
    return _allgather_async("grouped_allgather", tensors, list, name, process_set)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Tensor:
    """Return a new tensor like `tensor` with the values that it has on root_rank.

    The gradient is Horovod's: on root_rank, the average over the ranks of the gradients of their results; on other ranks, 0.
    """
    with NamedCall("broadcast", name, process_set) as call:
        return broadcast_of(call.communicator, root_in(call.communicator, root_rank))(check_tensor(tensor))[0]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Handle[Tensor]:
    """Run broadcast() in the background; synchronize() returns the new tensor."""
    return _broadcast_async(tensor, root_rank, name, process_set, in_place=False)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Tensor:
    """Run broadcast() in place, and return `tensor`."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> Handle[Tensor]:
    """Run broadcast() in place, in the background: leave `tensor` alone until synchronize(), which returns it."""
    return _broadcast_async(tensor, root_rank, name, process_set, in_place=True)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send a slice of rows to every rank; return the rows received, in rank order.

    splits: splits[r] rows go to rank r; None for equal parts. Rows have the same shape on all ranks. With splits the result is
    a pair: the rows, and an int32 tensor of the number of rows from each rank, on the device of splits.

    The gradient of a row is that of the same row on the rank that received it.
    """
    with NamedCall("alltoall", name, process_set) as call:
        collective, counts = _alltoall(call.communicator, tensor, splits)
        (output,) = collective(tensor)
        return output if splits is None else (output, counts)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSetLike = global_process_set,
) -> Handle[tuple[Tensor, Tensor]]:
    """Run alltoall() in the background, except for the splits, which are exchanged before this returns; synchronize()
    returns the pair, also without splits."""
    with NamedCall("alltoall", name, process_set) as call:
        collective, counts = _alltoall(call.communicator, tensor, splits)
        works, finish = collective.begin([tensor], True)
        return Handle(call, works, lambda: (finish()[0], counts))


class SparseHandle(Handle[Tensor]):
    """Stands for a sparse allreduce under way; Horovod's code calls it where it synchronizes others."""

    def __call__(self) -> Tensor:
        return self.wait()


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: str, process_set: ProcessSetLike = global_process_set
) -> SparseHandle:
    """Sum or average sparse COO tensors, such as an embedding's gradient, in the background.

    synchronize(handle), or handle(), returns the new, coalesced tensor. The numbers of elements are exchanged before this
    returns. The elements of all ranks are sent to every rank, which is efficient if they are few.

    tensor: of the same shape, dtype and sparse dimensions on all ranks; it may have any number of elements on each rank.
    Elements with the same index are summed.
    op: Average or Sum; Average needs a floating-point dtype.
    """
    with NamedCall("sparse_allreduce", name, process_set) as call:
        communicator = call.communicator
        if not isinstance(tensor, Tensor) or tensor.layout != torch.sparse_coo:
            given = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"sparse_allreduce_async needs a tensor of layout torch.sparse_coo, not {given}")
        if op not in (Average, Sum):
            raise ValueError(f"op of a sparse allreduce must be {Average!r} or {Sum!r}, not {op!r}")
        if op == Average and not tensor.dtype.is_floating_point:
            raise TypeError(f"the average of sparse tensors needs floating-point values, not {tensor.dtype}")
        mine = tensor.detach().coalesce()
        indices, values = check_group(communicator.rank, call.verb, [mine.indices().t(), mine.values()])
        kind = [list(tensor.shape), tensor.sparse_dim(), str(tensor.dtype)]
        everyones = communicator.allgather_record([kind, len(indices)])
        for rank, (theirs, _) in enumerate(everyones):
            if theirs != kind:
                raise refused(
                    communicator,
                    call.verb,
                    f"needs tensors that agree in shape, sparse dimensions and dtype: this rank gave {kind}, rank {rank} "
                    f"{theirs}",
                )
        works, finish = begin_sum(communicator, indices, values, [count for _, count in everyones], tensor.shape)
        return SparseHandle(call, works, lambda: finish() / communicator.size if op == Average else finish())


def barrier(process_set: ProcessSetLike = global_process_set) -> None:
    """Return once all ranks have called it."""
    with NamedCall("barrier", None, process_set) as call:
        call.communicator.barrier()


def _broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSetLike, *, in_place: bool
) -> Handle[Tensor]:
    with NamedCall("broadcast", name, process_set) as call:
        root = root_in(call.communicator, root_rank)
        output = check_tensor(tensor) if in_place else copied(check_tensor(tensor))
        work = call.communicator.broadcast(output.detach(), root, async_op=True)
        return Handle(call, [work], lambda: output)


def _allgather(verb: str, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSetLike) -> list[Tensor]:
    with NamedCall(verb, name, process_set) as call:
        return _gathering(call, tensors)(*tensors)


def _allgather_async(
    verb: str,
    tensors: Sequence[Tensor],
    result: Callable[[Sequence[Tensor]], T],
    name: str | None,
    process_set: ProcessSetLike,
) -> Handle[T]:
    """Return the handle of an allgather, whose result is `result` of the gathered tensors."""
    with NamedCall(verb, name, process_set) as call:
        works, finish = _gathering(call, tensors).begin(tensors, True)
        return Handle(call, works, lambda: result(finish()))


_Kind: TypeAlias = tuple[list[int], str]
"""Shape and dtype of a rank's tensor."""


def _gathering(call: NamedCall, tensors: Sequence[Tensor]) -> Collective:
    """Return the function that gathers the tensors. Raises Refused on all ranks if they do not fit."""
    communicator, verb = call.communicator, call.verb
    mine = [_kind(tensor) for tensor in check_group(communicator.rank, verb, tensors)]
    everyones: list[list[_Kind]] = communicator.allgather_record(mine)
    for rank, kinds in enumerate(everyones):
        if len(kinds) != len(mine):
            raise refused(communicator, verb, f"rank {rank} gave {len(kinds)} tensors, this rank {len(mine)}")
    rows = []
    for kinds in map(list, zip(*everyones, strict=True)):
        for rank, (shape, _) in enumerate(kinds):
            if not shape:
                raise refused(communicator, verb, f"needs tensors of at least one dimension; rank {rank} gave a scalar")
        _check_rows_fit(communicator, verb, kinds)
        rows.append([shape[0] for shape, _ in kinds])
    return allgather_of(communicator, rows)


def _alltoall(
    communicator: Communicator, tensor: Tensor, splits: Tensor | Sequence[int] | None
) -> tuple[Collective, Tensor]:
    """Return the function that exchanges rows, and the numbers of rows from every rank. Raises Refused on all ranks if the splits
    or the tensors do not fit."""
    check_group(communicator.rank, "alltoall", [tensor])
    given: list[Any] | None = None if splits is None else torch.as_tensor(splits, device="cpu").tolist()
    everyones: list[tuple[_Kind, list[Any] | None]] = communicator.allgather_record((_kind(tensor), given))
    for rank, ((shape, _), theirs) in enumerate(everyones):
        _check_splits(communicator, rank, shape, theirs)
    kinds = [kind for kind, _ in everyones]
    _check_rows_fit(communicator, "alltoall", kinds)
    sent = [[shape[0] // communicator.size] * communicator.size if s is None else s for (shape, _), s in everyones]
    received = [rows[communicator.rank] for rows in sent]
    counts = torch.tensor(received, dtype=torch.int32, device=splits.device if isinstance(splits, Tensor) else "cpu")
    return alltoall_of(communicator, sent[communicator.rank], received), counts


def _check_splits(communicator: Communicator, rank: int, shape: list[int], splits: list[Any] | None) -> None:
    """Raise Refused if a rank's tensor cannot be split as given."""
    size = communicator.size
    if not shape:
        reason = f"needs a tensor of at least one dimension; rank {rank} gave a scalar"
    elif splits is None:
        if shape[0] % size == 0:
            return
        reason = f"without splits it needs a multiple of {size} rows, not {shape[0]} as on rank {rank}"
    else:
        are_counts = isinstance(splits, list) and all(isinstance(rows, int) and rows >= 0 for rows in splits)
        if are_counts and (len(splits), sum(splits)) == (size, shape[0]):
            return
        reason = f"splits must be {size} whole numbers >= 0 that add up to {shape[0]} rows; rank {rank} gave {splits}"
    raise refused(communicator, "alltoall", reason)


def _kind(tensor: Tensor) -> _Kind:
    return list(tensor.shape), str(tensor.dtype)


def _check_rows_fit(communicator: Communicator, verb: str, kinds: Sequence[_Kind]) -> None:
    """Raise Refused if rows of the ranks' tensors differ in shape or dtype."""
    first_shape, first_dtype = kinds[0]
    for rank, (shape, dtype) in enumerate(kinds):
        if (shape[1:], dtype) != (first_shape[1:], first_dtype):
            raise refused(
                communicator,
                verb,
                "needs tensors that agree in dtype and in all dimensions but the first: "
                f"rank 0 gave {first_shape} {first_dtype}, rank {rank} gave {shape} {dtype}",
            )
