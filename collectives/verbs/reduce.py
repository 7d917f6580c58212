"""reduce, to one rank."""

from __future__ import annotations

import torch

from collectives import arguments
from collectives.link import native
from collectives.reduction import Op, check_arithmetic, finish, op_name
from collectives.run.engine import NATIVE, Engine
from collectives.run.operations import Turn
from collectives.run.work import Work


def reduce(
    engine: Engine, tensor: torch.Tensor, dst: int, op: Op, *, algorithm: str = "auto", async_op: bool = False
) -> Work | None:
    name = op_name(engine.rank, op)
    arguments.check_written(engine, tensor)
    arguments.check_root(engine, "dst", dst)
    check_arithmetic(engine.rank, tensor.dtype, name)
    chosen = engine.choose("reduce", algorithm, tensor.nbytes)
    call = f"reduce({arguments.described(tensor)}, dst={dst}, {name}, {chosen})"

    def body(turn: Turn) -> None:
        buffer = engine.buffer(tensor)
        flat = buffer.flat if engine.rank == dst else buffer.expendable()
        if chosen == NATIVE:
            moved, native_op = native.reducible(flat, name)
            engine.native(turn, native.reduce(moved, dst, native_op), is_cuda=moved.is_cuda)
            native.settle(flat, moved)
        else:
            engine.over_buffer(turn, "reduce", chosen, flat, name, dst)
        if engine.rank == dst:
            finish(flat, name, engine.size)
            buffer.store()

    return engine.submit(call, body, async_op=async_op)
