"""The two halves of an allreduce: reduce_shares leaves every rank its share of the result, gather_shares spreads it."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.engine.buffers import kept
from gradwire.collectives.engine.plans import Shares
from gradwire.collectives.engine.prepared import PreparedCall, PreparedOperation
from gradwire.collectives.engine.work import Work
from gradwire.collectives.reduction import Op, check_dtype, finish
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.spans import consecutive
from gradwire.collectives.verbs.reductions import Reductions, prepared


class Halves(Reductions):
    """The verbs between which each rank can work on its share of a result, before the ranks exchange their shares."""

    def reduce_shares(
        self,
        tensor: Tensor,
        op: Op = "sum",
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        async_op: bool = False,
    ) -> Work:
        """Reduce `tensor` over all ranks, in place, and keep only this rank's share of the result: the first half of
        allreduce.

        In this rank's slices of shares(), `tensor` has the same bits as after allreduce with the same arguments, except
        where allreduce corrects its algorithm (see Communicator.tune). The rest of `tensor` is undefined. Only the
        algorithms ring, rsag, direct and shared consist of such halves. If allreduce would run another algorithm, the whole
        `tensor` is reduced.
        """
        call = self._reducing(tensor, op, prescale, postscale)
        held = kept(tensor) if async_op else tensor
        return self._engine.run(call, held, held, async_op=async_op)

    def prepare_reduce_shares(
        self, tensor: Tensor, op: Op = "sum", *, prescale: float = 1.0, postscale: float = 1.0
    ) -> PreparedOperation:
        """Return a prepared reduce_shares of a tensor; see prepare_allreduce."""
        return PreparedOperation(self._engine, tensor, self._reducing(tensor, op, prescale, postscale))

    def shares(self, numel: int, dtype: torch.dtype = torch.float32) -> tuple[tuple[slice, ...], ...]:
        """Return, for each rank, the slices of a tensor of numel elements that are its share: reduce_shares reduces these
        slices on that rank, and gather_shares copies them from that rank.

        The slices of a rank are in order, and all ranks have nearly equal numbers of elements. Not a collective call; the
        result is the same on all ranks.
        """
        spans = self._engine.plans.shares(numel, dtype.itemsize).spans
        return tuple(tuple(slice(span.start, span.stop) for span in mine) for mine in spans)

    def gather_shares(self, tensor: Tensor, *, async_op: bool = False) -> Work:
        """Copy every rank's share, as in shares(), into `tensor` on all ranks, in place: the second half of allreduce."""
        engine = self._engine
        known: PreparedCall | None = engine.known(tensor, "gather_shares")
        call = known or self._gathering(tensor)
        if known is None:
            engine.keep(tensor, "gather_shares", call)
        held = kept(tensor) if async_op else tensor
        return engine.run(call, held, held, direct=known is not None, async_op=async_op)

    def _reducing(self, tensor: Tensor, op: Op, prescale: float, postscale: float) -> PreparedCall:
        """Check and prepare a reduce_shares."""
        engine = self._engine
        shares = self._shares_of(tensor)
        chosen = engine.plans.choose("allreduce", "auto", tensor.nbytes, on_gpu=tensor.is_cuda)
        if shares.algorithm != chosen:
            return prepared(engine, tensor, op, prescale, postscale, "auto")
        reduction = arguments.reduction_of(engine, [tensor], op, prescale, postscale)
        exchange = engine.prepare("reduce_shares", chosen, tensor, tensor.numel(), reduction.op)
        divides = chosen in PLANNERS["allreduce"]
        spans = shares.spans[self.rank]

        def run(source: Tensor, destination: Tensor, tag: int, deadline: float) -> None:
            buffer = engine.buffer(source)
            reduction.begin(buffer.flat)
            exchange(buffer.flat, buffer.flat, tag, deadline)
            for span in spans:
                if divides:
                    finish(buffer.flat[span.start : span.stop], reduction.op, engine.size)
                reduction.end(buffer.flat[span.start : span.stop])
            buffer.store()

        text = f"reduce_shares({arguments.described(tensor)}{engine.place(tensor)}, {reduction}, {chosen})"
        direct = None if divides or reduction.is_scaled else exchange
        notes = engine.notes(chosen, tensor.nbytes, tensor)
        return PreparedCall(text, text, run, direct, notes)

    def _gathering(self, tensor: Tensor) -> PreparedCall:
        """Check and prepare a gather_shares."""
        engine = self._engine
        shares = self._shares_of(tensor)
        algorithm = shares.algorithm or "rsag"
        layout = consecutive([span.length for (span,) in shares.spans]) if shares.algorithm is None else None
        exchange = engine.prepare("gather_shares", algorithm, tensor, tensor.numel(), layout=layout)

        def run(source: Tensor, destination: Tensor, tag: int, deadline: float) -> None:
            buffer = engine.buffer(source)
            exchange(buffer.flat, buffer.flat, tag, deadline)
            buffer.store()

        text = f"gather_shares({arguments.described(tensor)}, {algorithm})"
        notes = engine.notes(algorithm, tensor.nbytes, tensor)
        return PreparedCall(text, text, run, exchange, notes)

    def _shares_of(self, tensor: Tensor) -> Shares:
        """Return the ranks' shares of a tensor. Raises TypeError or ValueError for one that cannot be reduced."""
        arguments.check_written(self._engine, tensor)
        check_dtype(self.rank, tensor.dtype)
        return self._engine.plans.shares(tensor.numel(), tensor.element_size())
