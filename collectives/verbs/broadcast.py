"""broadcast, from one rank."""

from __future__ import annotations

import torch

from gradwire.collectives import arguments
from gradwire.collectives.run.absences import Call
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.operations import Turn
from gradwire.collectives.run.work import Work


def broadcast(
    engine: Engine, tensor: torch.Tensor, src: int, *, algorithm: str = "auto", async_op: bool = False
) -> Work | None:
    arguments.check_written(engine, tensor)
    arguments.check_root(engine, "src", src)
    chosen = engine.plans.choose("broadcast", algorithm, tensor.nbytes)
    whole = engine.whole("broadcast", chosen, tensor, tensor.numel(), root=src)
    text = f"broadcast({arguments.described(tensor)}, src={src}, {chosen})"
    call = Call(text, "broadcast", shapes=[tensor.shape], like=arguments.kind(tensor), root=src, algorithm=algorithm)

    (held,) = arguments.held([tensor], async_op)

    def body(turn: Turn) -> None:
        buffer = engine.buffer(held)
        if whole is not None:
            engine.run_whole(turn, whole, buffer.flat, buffer.flat)
        else:
            engine.over_buffer(turn, "broadcast", chosen, buffer.flat, root=src)
        buffer.store()

    return engine.submit(call, body, async_op=async_op)
