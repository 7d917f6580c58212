"""The two halves of an allreduce: reduce_shares leaves every rank its share of the result, gather_shares spreads it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradwire.collectives import arguments
from gradwire.collectives.link.base import Whole
from gradwire.collectives.plan.spans import consecutive
from gradwire.collectives.reduction import Op, check_arithmetic, finish, op_name
from gradwire.collectives.run.absences import Call
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.operations import Turn
from gradwire.collectives.run.plans import Shares
from gradwire.collectives.run.prepared import PreparedOperation
from gradwire.collectives.run.work import Work


def shares_of(engine: Engine, tensor: torch.Tensor) -> Shares:
    """Return whose is what of a tensor. Raises TypeError and ValueError for one that cannot be reduced."""
    arguments.check_written(engine, tensor)
    return engine.plans.shares(tensor.numel(), tensor.element_size())


def reduce_shares(
    engine: Engine, tensor: torch.Tensor, op: Op, prescale: float, postscale: float, shares: Shares, async_op: bool
) -> Work | None:
    """Do the first half. shares: of the tensor; their algorithm has halves."""
    call, body, _ = _planned(engine, tensor, op, prescale, postscale, shares, async_op)
    return engine.submit(call, body, async_op=async_op)


def prepare_reduce_shares(
    engine: Engine, tensor: torch.Tensor, op: Op, prescale: float, postscale: float, shares: Shares
) -> PreparedOperation:
    """Do all of reduce_shares that can be done once for many runs."""
    call, body, whole = _planned(engine, tensor, op, prescale, postscale, shares, True)
    return PreparedOperation(engine, tensor, call, body, whole if prescale == postscale == 1.0 else None)


def _planned(
    engine: Engine, tensor: torch.Tensor, op: Op, prescale: float, postscale: float, shares: Shares, async_op: bool
) -> tuple[Call, Callable[[Turn], None], Whole | None]:
    """Check the arguments, and return what is called, the body, and what the link has made ready."""
    name = op_name(engine.rank, op)
    check_arithmetic(engine.rank, tensor.dtype, name, prescale, postscale)
    algorithm = shares.algorithm
    assert algorithm is not None
    scales = f", prescale={prescale}, postscale={postscale}" if (prescale, postscale) != (1.0, 1.0) else ""
    call = Call(f"reduce_shares({arguments.described(tensor)}, {name}{scales}, {algorithm})", "reduce_shares")
    whole = engine.whole("reduce_shares", algorithm, tensor, tensor.numel(), name)

    (held,) = arguments.held([tensor], async_op)

    def body(turn: Turn) -> None:
        buffer = engine.buffer(held)
        if prescale != 1.0:
            buffer.flat.mul_(prescale)
        if whole is not None:
            engine.run_whole(turn, whole, buffer.flat, buffer.flat)
        else:
            engine.over_buffer(turn, "reduce_scatter", algorithm, buffer.flat, name)
        for span in shares.spans[engine.rank]:
            finish(buffer.flat[span.start : span.stop], name if whole is None else "sum", engine.size, postscale)
        buffer.store()

    return call, body, whole


def gather_shares(engine: Engine, tensor: torch.Tensor, async_op: bool) -> Work | None:
    """Do the second half, at once where an equal call has been made ready before; where the algorithm has none, an allgather of
    what is each rank's."""
    if not async_op and engine.repeat(tensor, "gather_shares"):
        return None
    shares = shares_of(engine, tensor)
    algorithm = shares.algorithm
    call = Call(f"gather_shares({arguments.described(tensor)}, {algorithm or 'rsag'})", "gather_shares")

    whole = None if algorithm is None else engine.whole("gather_shares", algorithm, tensor, tensor.numel())
    if whole is not None:
        engine.remember(tensor, "gather_shares", call, whole)

    (held,) = arguments.held([tensor], async_op)

    def body(turn: Turn) -> None:
        buffer = engine.buffer(held)
        if whole is not None:
            engine.run_whole(turn, whole, buffer.flat, buffer.flat)
        elif algorithm is not None:
            engine.over_buffer(turn, "allgather", algorithm, buffer.flat)
        else:
            lengths = [span.length for (span,) in shares.spans]
            engine.over_blocks(turn, "allgather", "rsag", buffer.flat, consecutive(lengths))
        buffer.store()

    return engine.submit(call, body, async_op=async_op)
