"""reduce, to one rank."""

from __future__ import annotations

import torch

from gradwire.collectives import arguments
from gradwire.collectives.reduction import Op, check_arithmetic, finish, op_name
from gradwire.collectives.run.absences import Call
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.operations import Turn
from gradwire.collectives.run.work import Work


def reduce(
    engine: Engine, tensor: torch.Tensor, dst: int, op: Op, *, algorithm: str = "auto", async_op: bool = False
) -> Work | None:
    name = op_name(engine.rank, op)
    arguments.check_written(engine, tensor)
    arguments.check_root(engine, "dst", dst)
    check_arithmetic(engine.rank, tensor.dtype, name)
    chosen = engine.plans.choose("reduce", algorithm, tensor.nbytes)
    whole = engine.whole("reduce", chosen, tensor, tensor.numel(), name, dst)
    text = f"reduce({arguments.described(tensor)}, dst={dst}, {name}, {chosen})"
    like = arguments.kind(tensor)
    call = Call(text, "reduce", shapes=[tensor.shape], like=like, op=name, root=dst, algorithm=algorithm)

    (held,) = arguments.held([tensor], async_op)

    def body(turn: Turn) -> None:
        buffer = engine.buffer(held)
        flat = buffer.flat if engine.rank == dst else buffer.expendable()
        if whole is not None:
            engine.run_whole(turn, whole, flat, flat)
        else:
            engine.over_buffer(turn, "reduce", chosen, flat, name, dst)
            if engine.rank == dst:
                finish(flat, name, engine.size)
        if engine.rank == dst:
            buffer.store()

    return engine.submit(call, body, async_op=async_op)
