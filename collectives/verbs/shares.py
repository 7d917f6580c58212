"""The two halves of an allreduce: reduce_shares leaves every rank its share of the result, gather_shares spreads it."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.engine.operations import Turn
from gradwire.collectives.engine.plans import Shares
from gradwire.collectives.engine.prepared import PreparedOperation
from gradwire.collectives.engine.work import DONE, Work
from gradwire.collectives.reduction import Op, check_dtype
from gradwire.collectives.schedules.spans import Layout, consecutive
from gradwire.collectives.verbs.reductions import Reductions


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
        spans = self._halved(tensor)
        if spans is None:
            return self.allreduce(tensor, op, prescale=prescale, postscale=postscale, async_op=async_op)
        call, body, _ = self._planned([tensor], op, prescale, postscale, "auto", async_op, spans)
        return self._engine.submit(call, body, async_op=async_op)

    def prepare_reduce_shares(
        self, tensor: Tensor, op: Op = "sum", *, prescale: float = 1.0, postscale: float = 1.0
    ) -> PreparedOperation:
        """Return a prepared reduce_shares of a tensor; see prepare_allreduce."""
        planned = self._planned([tensor], op, prescale, postscale, "auto", True, self._halved(tensor))
        return PreparedOperation(self._engine, tensor, *planned)

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
        if not async_op and engine.repeat(tensor, "gather_shares"):
            return DONE
        shares = self._shares_of(tensor)
        algorithm = shares.algorithm
        call = f"gather_shares({arguments.described(tensor)}, {algorithm or 'rsag'})"
        whole = None if algorithm is None else engine.whole("gather_shares", algorithm, tensor, tensor.numel())
        if whole is not None:
            engine.remember_whole(tensor, "gather_shares", call, whole)
        (held,) = arguments.held([tensor], async_op)

        def body(turn: Turn) -> None:
            buffer = engine.buffer(held)
            layout = consecutive([span.length for (span,) in shares.spans]) if algorithm is None else None
            engine.over_buffer(turn, "allgather", algorithm or "rsag", buffer.flat, layout=layout, whole=whole)
            buffer.store()

        return engine.submit(call, body, async_op=async_op)

    def _shares_of(self, tensor: Tensor) -> Shares:
        """Return the ranks' shares of a tensor. Raises TypeError or ValueError for one that cannot be reduced."""
        arguments.check_written(self._engine, tensor)
        check_dtype(self.rank, tensor.dtype)
        return self._engine.plans.shares(tensor.numel(), tensor.element_size())

    def _halved(self, tensor: Tensor) -> Layout | None:
        """Return this rank's share of a tensor; None if its allreduce has no halves."""
        shares = self._shares_of(tensor)
        runs = self._engine.plans.choose("allreduce", "auto", tensor.nbytes, on_gpu=tensor.is_cuda)
        return shares.spans[self.rank] if runs == shares.algorithm else None
