"""Prepares the two halves of an allreduce: reduce_shares leaves every rank its share of the result, gather_shares spreads it."""

from __future__ import annotations

from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.engine.schedule_cache import Shares
from gradwire.collectives.reduction import Op, check_dtype, finish
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.spans import consecutive
from gradwire.collectives.verbs.movement import in_place
from gradwire.collectives.verbs.reductions import allreduce


def reduce_shares(engine: Engine, tensor: Tensor, _: Tensor, op: Op, prescale: float, postscale: float) -> PreparedCall:
    """Prepare Communicator.reduce_shares, which runs on a tensor in place."""
    shares = _shares_of(engine, tensor)
    chosen = engine.schedules.choose("allreduce", "auto", tensor.nbytes, on_gpu=tensor.is_cuda)
    if shares.algorithm != chosen:
        return allreduce(engine, tensor, tensor, op, prescale, postscale, "auto")
    reduction = arguments.reduction_of(engine, [tensor], op, prescale, postscale)
    exchange = engine.prepare("reduce_shares", chosen, tensor, tensor.numel(), reduction.op)
    divides = reduction.op == "average" and chosen in PLANNERS["allreduce"]
    spans = shares.spans[engine.rank]

    def run(given: Tensor, _: Tensor, tag: int, deadline: float) -> None:
        buffer = engine.buffer(given)
        reduction.begin(buffer.flat)
        exchange(buffer.flat, buffer.flat, tag, deadline)
        for span in spans:
            if divides:
                finish(buffer.flat[span.start : span.stop], "average", engine.size)
            reduction.end(buffer.flat[span.start : span.stop])
        buffer.store()

    text = f"reduce_shares({arguments.described(tensor)}{engine.place(tensor)}, {reduction}, {chosen})"
    direct = None if divides or reduction.is_scaled else exchange
    return PreparedCall(text, text, run, direct, engine.notes(chosen, tensor.nbytes, tensor))


def gather_shares(engine: Engine, tensor: Tensor, _: Tensor) -> PreparedCall:
    """Prepare Communicator.gather_shares, which runs on a tensor in place."""
    shares = _shares_of(engine, tensor)
    algorithm = shares.algorithm or "rsag"
    layout = consecutive([span.length for (span,) in shares.spans]) if shares.algorithm is None else None
    exchange = engine.prepare("gather_shares", algorithm, tensor, tensor.numel(), layout=layout)
    text = f"gather_shares({arguments.described(tensor)}, {algorithm})"
    notes = engine.notes(algorithm, tensor.nbytes, tensor)
    return PreparedCall(text, text, in_place(engine, exchange), exchange, notes)


def _shares_of(engine: Engine, tensor: Tensor) -> Shares:
    """Return the ranks' shares of a tensor. Raises TypeError or ValueError for one that cannot be reduced."""
    arguments.check_written(engine, tensor)
    check_dtype(engine.rank, tensor.dtype)
    return engine.schedules.shares(tensor.numel(), tensor.element_size())
