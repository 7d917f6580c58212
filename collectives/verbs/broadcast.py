"""broadcast, from one rank."""

from __future__ import annotations

import torch

from collectives import arguments
from collectives.link import native
from collectives.run.engine import NATIVE, Engine
from collectives.run.operations import Turn
from collectives.run.work import Work


def broadcast(
    engine: Engine, tensor: torch.Tensor, src: int, *, algorithm: str = "auto", async_op: bool = False
) -> Work | None:
    arguments.check_written(engine, tensor)
    arguments.check_root(engine, "src", src)
    chosen = engine.choose("broadcast", algorithm, tensor.nbytes)
    call = f"broadcast({arguments.described(tensor)}, src={src}, {chosen})"

    def body(turn: Turn) -> None:
        buffer = engine.buffer(tensor)
        if chosen == NATIVE:
            engine.native(turn, native.broadcast(buffer.flat, src), is_cuda=buffer.flat.is_cuda)
        else:
            engine.over_buffer(turn, "broadcast", chosen, buffer.flat, root=src)
        buffer.store()

    return engine.submit(call, body, async_op=async_op)
