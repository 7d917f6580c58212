"""The exchange of sparse gradients, such as those of nn.Embedding(sparse=True), by their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwire.collectives import Work
from gradwire.trainer.gradients.arguments import Sum
from gradwire.trainer.gradients.combination import Combination, OperationChain
from gradwire.trainer.gradients.compression import Cast, Encoding
from gradwire.trainer.world.world import here

ABSENT = -1


class SparseGradients(OperationChain):
    """Combines the sparse gradients of some parameters: every rank gathers the indices and values of all ranks, and adds them.

    items: numbers of the parameters. A rank may have any number of rows, or no gradient. Of a dense gradient, the nonzero rows
    are sent. The parameter's cast applies to the values; a codec does not. results: the last result of each parameter, which
    the objects of one optimizer share. in_flight: whether the gradients are being exchanged.
    """

    def __init__(
        self,
        combination: Combination,
        items: Sequence[int],
        names: Sequence[str],
        parameters: Sequence[Tensor],
        encodings: Sequence[Cast | Encoding],
        results: dict[int, Tensor],
    ) -> None:
        super().__init__()
        self.items = list(items)
        self.in_flight = False
        self._combination = combination
        self._names = [names[item] for item in items]
        self._parameters = [parameters[item] for item in items]
        self._encodings = [encodings[item] for item in items]
        self._results = results

    def start(self, step: int) -> None:
        self.in_flight = True
        super().start(step)

    def is_result(self, item: int, gradient: Tensor | None) -> bool:
        """Return whether a parameter's gradient is the result of an exchange, even if more was added to it."""
        return gradient is not None and gradient is self._results.get(item)

    def forget(self) -> None:
        """Release all gradients."""
        self._results.clear()

    def finish(self) -> None:
        """Assign the results: a parameter without a gradient on this rank gets one if any rank has it."""
        for item, parameter in zip(self.items, self._parameters, strict=True):
            if item in self._results:
                parameter.grad = self._results[item]

    def _operations(self, step: int) -> Iterator[Work]:
        if not self.items:
            return
        communicator = self._combination.communicator
        mine = [self._rows_here(slot) for slot in range(len(self.items))]
        sizes = [[ABSENT, 0] if rows is None else [rows._nnz(), rows.sparse_dim()] for rows in mine]
        own_sizes = torch.tensor(sizes, device=self._parameters[0].device, dtype=torch.int64)
        everyones = own_sizes.new_empty(communicator.size, *own_sizes.shape)
        yield communicator.allgather(everyones, own_sizes, async_op=True)
        for slot, (rows, sizes) in enumerate(zip(mine, everyones.transpose(0, 1).tolist(), strict=True)):
            yield from self._gathered(slot, rows, sizes)

    def _gathered(self, slot: int, rows: Tensor | None, sizes: Sequence[Sequence[int]]) -> Iterator[Work]:
        """Combine the gradients of one parameter. sizes: by rank, the number of rows and of sparse dimensions."""
        counts = [max(0, count) for count, _ in sizes]
        dimensions = {dimension for count, dimension in sizes if count != ABSENT}
        if not dimensions:
            self._results.pop(self.items[slot], None)
            return
        if len(dimensions) > 1:
            raise ValueError(
                f"{here()}the gradient of {self._names[slot]!r} is sparse in {sorted(dimensions)} dimensions, depending "
                "on the rank"
            )
        parameter, (dimension,) = self._parameters[slot], dimensions
        cast = self._encodings[slot]
        wire = cast.dtype_on_wire(parameter.dtype) if isinstance(cast, Cast) else parameter.dtype
        indices = parameter.new_empty((sum(counts), dimension), dtype=torch.int64)
        values = parameter.new_empty((sum(counts), *parameter.shape[dimension:]), dtype=wire)
        if sum(counts):
            own_indices, own_values = indices[:0], values[:0]
            if rows is not None:
                own_indices = rows.indices().t().contiguous()
                own_values = (rows.values() / self._combination.predivide).to(wire).contiguous()
            yield from self._gather(indices, own_indices, counts)
            yield from self._gather(values, own_values, counts)
        values = values.to(parameter.dtype)
        total = torch.sparse_coo_tensor(
            indices.t(), values, parameter.shape, check_invariants=False, device=values.device
        ).coalesce()
        total._values().mul_(self._combination.predivide / self._combination.inputs)
        self._results[self.items[slot]] = total

    def _gather(self, output: Tensor, rows: Tensor, counts: Sequence[int]) -> Iterator[Work]:
        """Gather rows of all ranks."""
        nbytes = self._combination.traffic.gathered_bytes(rows.nbytes)
        self._combination.traffic.count(sent=nbytes, uncompressed=nbytes)
        yield self._combination.communicator.allgather(list(output.split(list(counts))), rows, async_op=True)

    def _rows_here(self, slot: int) -> Tensor | None:
        """Return this rank's gradient, coalesced; None if there is none."""
        gradient = self._parameters[slot].grad
        if gradient is None:
            return None
        rows = gradient.detach().to_sparse(1) if gradient.layout is torch.strided else gradient.detach().coalesce()
        untouched = self._combination.op == Sum and self.is_result(self.items[slot], gradient)
        return rows / self._combination.communicator.size if untouched else rows
