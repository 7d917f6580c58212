"""allgather, of equal or unequal parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.collectives import arguments
from gradwire.collectives.plan.spans import consecutive
from gradwire.collectives.run.absences import Call
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.operations import Turn
from gradwire.collectives.run.staging import apart
from gradwire.collectives.run.work import Work


def allgather(
    engine: Engine,
    output: torch.Tensor | Sequence[torch.Tensor],
    input: torch.Tensor,
    *,
    algorithm: str = "auto",
    async_op: bool = False,
) -> Work | None:
    parts = arguments.listed(output)
    arguments.check_tensors(engine, input, *parts)
    arguments.check_written(engine, *parts)
    lengths = arguments.part_lengths(engine, "output", output, input, "input")
    chosen = engine.plans.choose_for_parts("allgather", algorithm, lengths, input.element_size())
    whole = engine.whole("allgather", chosen, input, input.numel())
    text = f"allgather({arguments.dtype_name(input)}{lengths}, {chosen})"
    call = Call(text, "allgather", parts=lengths, like=arguments.kind(input), algorithm=algorithm)

    mine, *theirs = arguments.held([input, *parts], async_op)

    def body(turn: Turn) -> None:
        source = engine.buffer(mine).flat
        result = engine.buffer(*theirs, fill=False)
        layout = consecutive(lengths)
        place = result.flat[layout[engine.rank].start : layout[engine.rank].stop]
        if source.data_ptr() != place.data_ptr():
            source = apart(source, result.flat)
        if whole is not None:
            engine.run_whole(turn, whole, source, result.flat)
        else:
            place.copy_(source)
            engine.over_blocks(turn, "allgather", chosen, result.flat, layout)
        result.store()

    return engine.submit(call, body, async_op=async_op, signature=arguments.signature(text, lengths))
