"""Horovod's allreduce of sparse tensors, which gathers them."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.trainer.gradients.arguments import Average, Sum, check_group
from gradwire.trainer.horovod.functional import begin_allgather
from gradwire.trainer.horovod.handles import Call, Handle
from gradwire.trainer.world.process_sets import ProcessSetLike, global_process_set, refused
from gradwire.trainer.world.world import communicator_of, here


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

    tensor: of the same shape, dtype and sparse dimensions on all ranks; with any number of elements, whose repeated indices
    are summed.
    op: Average or Sum; Average needs a floating-point dtype.
    """
    communicator = communicator_of(process_set)
    size = communicator.size
    with (call := Call("sparse_allreduce", name, communicator)):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.sparse_coo:
            given = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{here()}sparse_allreduce_async needs a tensor of layout torch.sparse_coo, not {given}")
        if op not in (Average, Sum):
            raise ValueError(f"{here()}op of a sparse allreduce must be {Average!r} or {Sum!r}, not {op!r}")
        if op == Average and not tensor.dtype.is_floating_point:
            raise TypeError(f"{here()}the average of sparse tensors needs floating-point values, not {tensor.dtype}")
        mine = tensor.detach().coalesce()
        elements = check_group(communicator.rank, "sparse_allreduce", [mine.indices().t().contiguous(), mine.values()])
        kind = [list(tensor.shape), tensor.sparse_dim(), str(tensor.dtype)]
        everyones = communicator.allgather_record([kind, mine.indices().shape[1]])
        for rank, (theirs, _) in enumerate(everyones):
            if theirs != kind:
                raise refused(
                    communicator,
                    "sparse_allreduce",
                    f"needs tensors that agree in shape, sparse dimensions and dtype: this rank gave {kind}, rank {rank} "
                    f"{theirs}",
                )
        rows = [count for _, count in everyones]
        works, outputs = begin_allgather(communicator, [rows, rows], elements, async_op=True)

        def finish() -> Tensor:
            indices, values = outputs
            values = values / size if op == Average else values
            return torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()

        return SparseHandle(call, works, finish)
