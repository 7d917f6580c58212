"""barrier: a message of one byte that needs everyone."""

from __future__ import annotations

import torch

from gradwire.collectives.run.absences import Call
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.operations import Turn
from gradwire.collectives.run.work import Work


def barrier(engine: Engine, *, algorithm: str = "auto", async_op: bool = False) -> Work | None:
    chosen = engine.plans.choose("barrier", algorithm, 1)
    call = Call(f"barrier({chosen})", "barrier", joinable=True, algorithm=algorithm)
    nothing = torch.empty(0, dtype=torch.uint8, device=engine.control_device)
    whole = engine.whole("barrier", chosen, nothing, 0)

    def body(turn: Turn) -> None:
        if whole is not None:
            engine.run_whole(turn, whole, nothing, nothing)
        else:
            engine.meet(turn, chosen)

    return engine.submit(call, body, async_op=async_op)
