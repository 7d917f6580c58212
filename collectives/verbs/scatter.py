"""scatter, of equal parts from one rank."""

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


def scatter(
    engine: Engine,
    output: torch.Tensor,
    input: Sequence[torch.Tensor] | None,
    src: int,
    *,
    algorithm: str = "auto",
    async_op: bool = False,
) -> Work | None:
    arguments.check_root(engine, "src", src)
    parts = arguments.rooted_list(engine, "input", input, output, "src", src)
    arguments.check_written(engine, output)
    chosen = engine.plans.choose("scatter", algorithm, output.nbytes * engine.size)
    whole = engine.whole("scatter", chosen, output, output.numel() * len(parts), root=src)
    text = f"scatter({arguments.described(output)}, src={src}, {chosen})"
    call = Call(text, "scatter", shapes=[output.shape], like=arguments.kind(output), root=src, algorithm=algorithm)

    mine, *theirs = arguments.held([output, *parts], async_op)

    def body(turn: Turn) -> None:
        result = engine.buffer(mine, fill=False)
        source = apart(engine.buffer(*(theirs or [mine.new_empty(0)])).flat, result.flat)
        if whole is not None:
            engine.run_whole(turn, whole, source, result.flat)
        else:
            own = only(engine.rank, engine.size, result.flat.numel())
            layout = consecutive([result.flat.numel()] * engine.size) if parts else own
            if parts:
                result.flat.copy_(source[layout[src].start : layout[src].stop])
            engine.between(turn, "scatter", chosen, source, layout, result.flat, own, src)
        result.store()

    return engine.submit(call, body, async_op=async_op)
