"""gather, of equal parts to one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.collectives import arguments
from gradwire.collectives.plan.spans import consecutive, only
from gradwire.collectives.run.absences import Call
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.operations import Turn
from gradwire.collectives.run.staging import apart
from gradwire.collectives.run.work import Work


def gather(
    engine: Engine,
    input: torch.Tensor,
    output: Sequence[torch.Tensor] | None,
    dst: int,
    *,
    algorithm: str = "auto",
    async_op: bool = False,
) -> Work | None:
    arguments.check_root(engine, "dst", dst)
    parts = arguments.rooted_list(engine, "output", output, input, "dst", dst)
    arguments.check_written(engine, *parts)
    chosen = engine.plans.choose("gather", algorithm, input.nbytes * engine.size)
    whole = engine.whole("gather", chosen, input, input.numel(), root=dst)
    text = f"gather({arguments.described(input)}, dst={dst}, {chosen})"
    call = Call(text, "gather", shapes=[input.shape], like=arguments.kind(input), root=dst, algorithm=algorithm)

    mine, *theirs = arguments.held([input, *parts], async_op)

    def body(turn: Turn) -> None:
        result = engine.buffer(*(theirs or [mine.new_empty(0)]), fill=False)
        source = apart(engine.buffer(mine).flat, result.flat)
        if whole is not None:
            engine.run_whole(turn, whole, source, result.flat)
        else:
            own = only(engine.rank, engine.size, source.numel())
            layout = consecutive([source.numel()] * engine.size) if parts else own
            if parts:
                result.flat[layout[dst].start : layout[dst].stop].copy_(source)
            engine.between(turn, "gather", chosen, source, own, result.flat, layout, dst)
        result.store()

    return engine.submit(call, body, async_op=async_op)
