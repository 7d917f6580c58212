"""reduce_scatter, of equal or unequal parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives import arguments
from collectives.link import native
from collectives.plan.spans import consecutive
from collectives.reduction import Op, check_arithmetic, finish, op_name
from collectives.run.engine import NATIVE, Engine
from collectives.run.operations import Turn
from collectives.run.work import Work


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
    chosen = engine.choose_for_parts("reduce_scatter", algorithm, lengths, output.element_size())
    call = f"reduce_scatter({arguments.dtype_name(output)}{lengths}, {name}, {chosen})"

    def body(turn: Turn) -> None:
        source = engine.buffer(*parts)
        result = engine.buffer(output, fill=False)
        if chosen == NATIVE:
            moved, native_op = native.reducible(source.flat, name)
            landed = torch.empty(lengths[engine.rank], dtype=moved.dtype, device=moved.device)
            engine.native(turn, native.reduce_scatter(landed, moved, native_op), is_cuda=moved.is_cuda)
            native.settle(result.flat, landed)
        else:
            layout = consecutive(lengths)
            whole = source.expendable()
            engine.over_blocks(turn, "reduce_scatter", chosen, whole, layout, name)
            result.flat.copy_(whole[layout[engine.rank].start : layout[engine.rank].stop])
        finish(result.flat, name, engine.size)
        result.store()

    return engine.submit(call, body, async_op=async_op)
