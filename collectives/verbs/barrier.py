"""barrier: a message of one byte that needs everyone."""

from __future__ import annotations

import torch

from collectives.link import native
from collectives.plan.selection import SHARED
from collectives.run.engine import NATIVE, Engine
from collectives.run.operations import Turn
from collectives.run.work import Work


def barrier(engine: Engine, *, algorithm: str = "auto", async_op: bool = False) -> Work | None:
    chosen = engine.choose("barrier", algorithm, 1)
    call = f"barrier({chosen})"

    if chosen == SHARED:
        engine.prepare([torch.uint8])

    def body(turn: Turn) -> None:
        if chosen == NATIVE:
            engine.native(turn, native.barrier(), is_cuda=engine.control_device == "cuda")
        elif chosen == SHARED:
            engine.in_shared_memory(turn, torch.empty(0, dtype=torch.uint8), "max")
        else:
            engine.meet(turn, chosen)

    return engine.submit(call, body, async_op=async_op)
