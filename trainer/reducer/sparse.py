"""The exchange of sparse gradients, such as those of nn.Embedding(sparse=True), by their rows."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from gradwire.collectives import Work
from gradwire.collectives.errors import ranks_text
from gradwire.collectives.sparse import begin_sum
from gradwire.trainer.reducer.arguments import Sum
from gradwire.trainer.reducer.buffers import OperationChain
from gradwire.trainer.reducer.compression import Cast, Encoding
from gradwire.trainer.reducer.dtensors import shard_of
from gradwire.trainer.reducer.setup import Combination

ABSENT = -1

_LEAST_BYTES = 4 << 20
"""The size from which a table is worth the search for its module, which takes about a tenth of a second. To send a smaller one
once takes less time."""

_KINDS = (nn.Embedding, nn.EmbeddingBag)


def large_tables(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that may be large tables of embeddings."""
    return [each for each in parameters if each.dim() == 2 and each.nbytes >= _LEAST_BYTES and not shard_of(each)]


def of_sparse_modules(tables: Iterable[Tensor]) -> set[Tensor]:
    """Return the tables of embeddings with sparse=True, whose gradients are sparse if nothing else uses the table.

    The search goes through all objects of the process, since an optimizer does not know the model.
    """
    kinds: set[type[nn.Module]] = {*_KINDS, *(derived for kind in _KINDS for derived in _subclasses(kind))}
    modules = [each for each in gc.get_objects() if type(each) in kinds]
    found = {id(vars(each).get("_parameters", {}).get("weight")) for each in modules if vars(each).get("sparse")}
    return {table for table in tables if id(table) in found}


def _subclasses(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


class SparseGradients(OperationChain):
    """Combines the sparse gradients of some parameters: every rank gathers the indices and values of all ranks, and adds them.

    items: numbers of the parameters. A rank may have any number of rows, or no gradient. Of a dense gradient, the nonzero rows
    are sent. If all ranks that have a gradient have a dense one, so is the result. The parameter's cast applies to the values; a
    codec does not. results: the last result of each parameter, which the objects of one optimizer share. was_dense: None if no
    bucket has exchanged the gradients. If one has, complete() raises ValueError on all ranks if any rank had a dense gradient; on
    a rank that gives True, all of them were dense, whatever has become of them since.
    in_flight: whether the gradients are being exchanged. found_dense: the parameters with a dense result.
    """

    def __init__(
        self,
        combination: Combination,
        items: Sequence[int],
        names: Sequence[str],
        parameters: Sequence[Tensor],
        encodings: Sequence[Cast | Encoding],
        results: dict[int, Tensor],
        was_dense: bool | None = None,
    ) -> None:
        super().__init__()
        self.items = list(items)
        self.in_flight = False
        self.found_dense: set[int] = set()
        self._combination = combination
        self._names = [names[item] for item in items]
        self._parameters = [parameters[item] for item in items]
        self._encodings = [encodings[item] for item in items]
        self._results = results
        self._was_dense = was_dense
        self._factor = 1.0

    @property
    def devices(self) -> list[torch.device]:
        """Return the devices of the parameters."""
        return [parameter.device for parameter in self._parameters]

    def discard(self) -> None:
        """Discard this rank's gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def start(self, step: int, factor: float = 1.0) -> None:
        """Begin to exchange this rank's gradients, multiplied by a factor. step: see OperationChain.start()."""
        self._factor = factor
        self.in_flight = True
        self._begin(self._operations())

    def assign(self) -> None:
        """Assign the results: a parameter without a gradient on this rank gets one if any rank has it."""
        for item, parameter in zip(self.items, self._parameters, strict=True):
            if item in self._results:
                parameter.grad = self._results[item]

    def _operations(self) -> Iterator[Work]:
        if not self.items:
            return
        communicator = self._combination.communicator
        mine = [None if self._was_dense else self._rows_here(slot) for slot in range(len(self.items))]
        dense = [each.grad is not None and each.grad.layout is torch.strided for each in self._parameters]
        absent = 0 if self._was_dense else ABSENT
        sizes = [
            [absent, 0, 1] if rows is None else [rows._nnz(), rows.sparse_dim(), int(is_dense)]
            for rows, is_dense in zip(mine, dense, strict=True)
        ]
        own_sizes = torch.tensor(sizes, device=self._parameters[0].device, dtype=torch.int64)
        everyones = own_sizes.new_empty(communicator.size, *own_sizes.shape)
        yield communicator.allgather(everyones, own_sizes, async_op=True)
        for slot, (rows, sizes) in enumerate(zip(mine, everyones.transpose(0, 1).tolist(), strict=True)):
            yield from self._gathered(slot, rows, sizes)

    def _gathered(self, slot: int, rows: Tensor | None, sizes: Sequence[Sequence[int]]) -> Iterator[Work]:
        """Combine the gradients of one parameter. sizes: by rank, the number of rows, the number of sparse dimensions, and
        whether the gradient is not sparse."""
        counts = [max(0, count) for count, _, _ in sizes]
        communicator = self._combination.communicator
        dimensions = {dimension for count, dimension, _ in sizes if count != ABSENT}
        if not dimensions:
            self._results.pop(self.items[slot], None)
            return
        are_dense = [rank for rank, (count, _, is_dense) in enumerate(sizes) if is_dense and count != ABSENT]
        if are_dense and self._was_dense is not None:
            raise ValueError(
                f"rank {communicator.rank}: the gradient of {self._names[slot]!r} is dense on {ranks_text(are_dense)} and "
                "sparse on others: give sparse_as_dense=True, or use layers with the same sparse= on all ranks"
            )
        if len(dimensions) > 1:
            raise ValueError(
                f"rank {communicator.rank}: the gradient of {self._names[slot]!r} is sparse in {sorted(dimensions)} dimensions, "
                "depending on the rank"
            )
        parameter, (dimension,) = self._parameters[slot], dimensions
        cast = self._encodings[slot]
        wire = cast.dtype_on_wire(parameter.dtype) if isinstance(cast, Cast) else parameter.dtype
        indices = parameter.new_empty((0, dimension), dtype=torch.int64)
        values = parameter.new_empty((0, *parameter.shape[dimension:]), dtype=wire)
        if rows is not None:
            indices, values = rows.indices().t(), (rows.values() / self._combination.predivide).to(wire)
        if sum(counts):
            nbytes = self._combination.traffic.gathered_bytes(indices.nbytes + values.nbytes)
            self._combination.traffic.count(sent=nbytes, uncompressed=nbytes)
        works, add = begin_sum(communicator, indices, values, counts, parameter.shape, parameter.dtype)
        yield from works
        total = add()
        total._values().mul_(self._combination.predivide / self._combination.inputs)
        if all(is_dense for _, _, is_dense in sizes):
            self.found_dense.add(self.items[slot])
            total = total.to_dense()
        self._results[self.items[slot]] = total

    def _rows_here(self, slot: int) -> Tensor | None:
        """Return this rank's gradient, coalesced and multiplied by the factor; None if there is none."""
        gradient = self._parameters[slot].grad
        if gradient is None:
            return None
        rows = gradient.detach().to_sparse(1) if gradient.layout is torch.strided else gradient.detach().coalesce()
        untouched = self._combination.op == Sum and gradient is self._results.get(self.items[slot])
        if untouched:
            return rows / self._combination.communicator.size
        return rows if self._factor == 1.0 else rows * self._factor
