"""reduce_scatter, of equal or unequal parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.collectives import arguments
from gradwire.collectives.plan.spans import consecutive
from gradwire.collectives.reduction import Op, check_arithmetic, finish, op_name
from gradwire.collectives.run.absences import Call
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.operations import Turn
from gradwire.collectives.run.work import Work


def reduce_scatter(
    engine: Engine,
    output: torch.Tensor,
    input: torch.Tensor | Sequence[torch.Tensor],
    op: Op,
    *,
    algorithm: str = "auto",
    async_op: bool = False,
) -> Work | None:
    name = op_name(engine.rank, op)
    parts = arguments.listed(input)
    arguments.check_tensors(engine, output, *parts)
    arguments.check_written(engine, output)
    check_arithmetic(engine.rank, output.dtype, name)
    lengths = arguments.part_lengths(engine, "input", input, output, "output")
    chosen = engine.plans.choose_for_parts("reduce_scatter", algorithm, lengths, output.element_size())
    whole = engine.whole("reduce_scatter", chosen, output, sum(lengths), name)
    first = [lengths[0]] if isinstance(input, torch.Tensor) else list(parts[0].shape)
    row = ", ".join(map(str, first[1:]))  # with which the lengths say what shape all parts have
    shape = f"shape=[..., {row}], " if row else ""
    text = f"reduce_scatter({arguments.dtype_name(output)}{lengths}, {shape}{name}, {chosen})"
    like = arguments.kind(output)
    call = Call(text, "reduce_scatter", parts=lengths, first=first, like=like, op=name, algorithm=algorithm)

    mine, *theirs = arguments.held([output, *parts], async_op)

    def body(turn: Turn) -> None:
        source = engine.buffer(*theirs)
        result = engine.buffer(mine, fill=False)
        if whole is not None:
            engine.run_whole(turn, whole, source.flat, result.flat)
        else:
            layout = consecutive(lengths)
            every = source.expendable()
            engine.over_blocks(turn, "reduce_scatter", chosen, every, layout, name)
            result.flat.copy_(every[layout[engine.rank].start : layout[engine.rank].stop])
            finish(result.flat, name, engine.size)
        result.store()

    return engine.submit(call, body, async_op=async_op, signature=arguments.signature(text, lengths))
