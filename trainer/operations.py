"""Horovod's verbs: names, argument names and defaults as in horovod.torch.

Differences, for all of them: `name` is accepted for its sake but unused, since operations are matched by the order in which
ranks call them, which must be the same on all; `process_set` is None (all ranks), a torch.distributed group or a
Communicator, and a root rank counts inside of it.

Tensors may have any shape (at least one dimension where rows are moved) and the dtypes float16, bfloat16, float32, float64,
int8, uint8, int16, int32, int64, bool. The verbs without `async` in their names can be differentiated, where the result is
differentiable, except those in place; results and gradients live on the device of the tensor given.

All raise ValueError or TypeError for arguments that cannot be meant, before anything is sent, and
collectives.CollectiveError where the ranks could not finish together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives import Communicator, Work
from trainer.compression import Cast, Compression
from trainer.functional import Allgather, Allreduce, Alltoall, Broadcast, ReduceScatter, scattered
from trainer.handles import Handle
from trainer.ops import Average, resolve_op
from trainer.world import ProcessSet, communicator_of


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Cast = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = None,
) -> Tensor:
    """A new tensor like `tensor`: its reduction over all ranks.

    op: Average (the default), Sum, Min, Max or Product; `average` is Horovod's older word for Average or Sum.
    The factors multiply before and after the reduction. compression: what floating-point tensors travel as.
    """
    (output,) = grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return output


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = None,
) -> Handle[Tensor]:
    """allreduce() in the background; synchronize() returns the new tensor."""
    output = _copy(tensor)
    return allreduce_async_(output, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = None,
) -> Tensor:
    """allreduce() in place; returns `tensor`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return handle.wait()


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = None,
) -> Handle[Tensor]:
    """allreduce() in place, in the background: leave `tensor` alone until synchronize(), which returns it."""
    work = communicator_of(process_set).allreduce(
        tensor.detach(),
        resolve_op(op, average),
        prescale=prescale_factor,
        postscale=postscale_factor,
        async_op=True,
    )
    return Handle(_work(work), tensor)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Cast = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = None,
) -> list[Tensor]:
    """allreduce() of several tensors as one operation: new tensors in the same order."""
    packed = [compression.compress(tensor) for tensor in tensors]
    reduced = Allreduce.apply(
        communicator_of(process_set),
        resolve_op(op, average),
        prescale_factor,
        postscale_factor,
        *(tensor for tensor, _ in packed),
    )
    return [compression.decompress(tensor, dtype) for tensor, (_, dtype) in zip(reduced, packed, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = None,
) -> Handle[list[Tensor]]:
    """grouped_allreduce() in the background; synchronize() returns the new tensors."""
    outputs = [_copy(tensor) for tensor in tensors]
    return grouped_allreduce_async_(outputs, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = None,
) -> list[Tensor]:
    """grouped_allreduce() in place; returns the tensors given."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return handle.wait()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = None,
) -> Handle[list[Tensor]]:
    """grouped_allreduce() in place, in the background: leave the tensors alone until synchronize(), which returns them."""
    work = communicator_of(process_set).grouped_allreduce(
        [tensor.detach() for tensor in tensors],
        resolve_op(op, average),
        prescale=prescale_factor,
        postscale=postscale_factor,
        async_op=True,
    )
    return Handle(_work(work), list(tensors))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = None) -> Tensor:
    """All ranks' tensors, one after the other along dimension 0, where they may differ in size; the other dimensions agree."""
    communicator = communicator_of(process_set)
    output: Tensor = Allgather.apply(communicator, _rows_by_rank(communicator, tensor), tensor)
    return output


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = None) -> Handle[Tensor]:
    """allgather() in the background, except for the sizes, which are exchanged before this returns."""
    communicator = communicator_of(process_set)
    rows = _rows_by_rank(communicator, tensor)
    output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    work = communicator.allgather(list(output.split(rows)), tensor.detach(), async_op=True)
    return Handle(_work(work), output)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = None) -> Tensor:
    """A new tensor like `tensor` with the values that it has on root_rank."""
    output: Tensor = Broadcast.apply(communicator_of(process_set), root_rank, tensor)
    return output


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = None
) -> Handle[Tensor]:
    """broadcast() in the background; synchronize() returns the new tensor."""
    return broadcast_async_(_copy(tensor), root_rank, name, process_set)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = None) -> Tensor:
    """broadcast() in place; returns `tensor`."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = None
) -> Handle[Tensor]:
    """broadcast() in place, in the background: leave `tensor` alone until synchronize(), which returns it."""
    work = communicator_of(process_set).broadcast(tensor.detach(), root_rank, async_op=True)
    return Handle(_work(work), tensor)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Cast = Compression.none,
    op: str = Average,
    process_set: ProcessSet = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduction: dimension 0 is divided evenly, the first ranks taking one more where it must be.

    The tensors have the same shape on all ranks.
    """
    communicator = communicator_of(process_set)
    sent, dtype = compression.compress(tensor)
    output = ReduceScatter.apply(
        communicator, _even_rows(tensor, communicator), resolve_op(op, None), prescale_factor, postscale_factor, sent
    )
    return compression.decompress(output, dtype)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """reducescatter() in the background; synchronize() returns the new tensor."""
    communicator = communicator_of(process_set)
    rows = _even_rows(tensor, communicator)
    output, chunks = scattered(communicator, rows, tensor, prescale_factor)
    work = communicator.reduce_scatter(output, chunks, resolve_op(op, None), async_op=True)
    return Handle(_work(work), output, None if postscale_factor == 1 else lambda result: result.mul_(postscale_factor))


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send a slice of rows to every rank; the rows received, in rank order.

    splits[r] rows go to rank r, all equally many where it is None. With splits the result is a pair: the rows, and an int32
    tensor (on the CPU) of how many came from each rank.
    """
    communicator = communicator_of(process_set)
    sent, received = _exchange_splits(communicator, tensor, splits)
    output: Tensor = Alltoall.apply(communicator, sent, received, tensor)
    return output if splits is None else (output, torch.tensor(received, dtype=torch.int32))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = None,
) -> Handle[Tensor] | Handle[tuple[Tensor, Tensor]]:
    """alltoall() in the background, except for the splits, which are exchanged before this returns."""
    communicator = communicator_of(process_set)
    sent, received = _exchange_splits(communicator, tensor, splits)
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    work = _work(communicator.alltoall(output, tensor.detach(), received, sent, async_op=True))
    return Handle(work, output) if splits is None else Handle(work, (output, torch.tensor(received, dtype=torch.int32)))


def barrier(process_set: ProcessSet = None) -> None:
    """Return once all ranks have called it."""
    communicator_of(process_set).barrier()


def _work(work: Work | None) -> Work:
    assert work is not None
    return work


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _rows_by_rank(communicator: Communicator, tensor: Tensor) -> list[int]:
    """The size of dimension 0 on every rank. Raises ValueError on all ranks alike where the tensors do not fit together."""
    kinds: list[tuple[tuple[int, ...], torch.dtype]] = communicator.allgather_object(
        (tuple(tensor.shape), tensor.dtype)
    )
    first_shape, first_dtype = kinds[0]
    for rank, (shape, dtype) in enumerate(kinds):
        if not shape:
            raise ValueError(f"allgather needs tensors of at least one dimension; rank {rank} gave a scalar")
        if (shape[1:], dtype) != (first_shape[1:], first_dtype):
            raise ValueError(
                f"allgather needs tensors that agree in dtype and in all dimensions but the first: "
                f"rank 0 gave {list(first_shape)} {first_dtype}, rank {rank} gave {list(shape)} {dtype}"
            )
    return [shape[0] for shape, _ in kinds]


def _even_rows(tensor: Tensor, communicator: Communicator) -> list[int]:
    """Rows of dimension 0 for every rank."""
    if tensor.dim() == 0:
        raise ValueError("reducescatter needs a tensor of at least one dimension, not a scalar")
    rows, longer = divmod(tensor.shape[0], communicator.size)
    return [rows + (rank < longer) for rank in range(communicator.size)]


def _exchange_splits(
    communicator: Communicator, tensor: Tensor, splits: Tensor | Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Rows to every rank, and rows from every rank."""
    size = communicator.size
    if tensor.dim() == 0:
        raise ValueError("alltoall needs a tensor of at least one dimension, not a scalar")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall without splits needs a multiple of {size} rows, not {rows}")
        sent = [rows // size] * size
    else:
        sent = [int(split) for split in splits]
        if len(sent) != size or min(sent) < 0 or sum(sent) != rows:
            raise ValueError(f"splits must be {size} whole numbers >= 0 that add up to {rows} rows, not {sent}")
    received = torch.empty(size, dtype=torch.int64)
    communicator.alltoall(received, torch.tensor(sent))
    return sent, received.tolist()
