"""alltoall, of equal parts or of rows counted by splits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.collectives import arguments
from gradwire.collectives.errors import Mismatch
from gradwire.collectives.plan.spans import consecutive
from gradwire.collectives.run.absences import Call
from gradwire.collectives.run.engine import Engine
from gradwire.collectives.run.operations import Turn
from gradwire.collectives.run.staging import apart
from gradwire.collectives.run.work import Work


def alltoall(
    engine: Engine,
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    *,
    algorithm: str = "auto",
    async_op: bool = False,
) -> Work | None:
    arguments.check_tensors(engine, output, input)
    arguments.check_written(engine, output)
    if (output_splits is None) != (input_splits is None):
        raise ValueError(f"rank {engine.rank}: alltoall needs both output_splits and input_splits, or neither")
    if input_splits is None and output.numel() != input.numel():
        raise ValueError(
            f"rank {engine.rank}: alltoall without splits needs an output of input's {input.numel()} elements, not of "
            f"{output.numel()}"
        )
    incoming = arguments.split_lengths(engine, "output", output, output_splits)
    outgoing = arguments.split_lengths(engine, "input", input, input_splits)
    chosen = engine.plans.choose("alltoall", algorithm, input.nbytes)
    whole = engine.whole("alltoall", chosen, input, input.numel(), lengths=(outgoing, incoming))
    shape = "splits" if input_splits is not None else arguments.described(input)
    text = f"alltoall({arguments.dtype_name(input)}, {shape}, {chosen})"
    shapes = [input.shape] if input_splits is None else []
    call = Call(text, "alltoall", shapes=shapes, like=arguments.kind(input), algorithm=algorithm)

    mine, theirs = arguments.held([input, output], async_op)

    def body(turn: Turn) -> None:
        if input_splits is not None:
            _check_splits(engine, turn, outgoing, incoming)
        result = engine.buffer(theirs, fill=False)
        source = apart(engine.buffer(mine).flat, result.flat)
        if whole is not None:
            engine.run_whole(turn, whole, source, result.flat)
        else:
            sent, landed = consecutive(outgoing), consecutive(incoming)
            own = source[sent[engine.rank].start : sent[engine.rank].stop]
            result.flat[landed[engine.rank].start : landed[engine.rank].stop].copy_(own)
            engine.between(turn, "alltoall", chosen, source, sent, result.flat, landed)
        result.store()

    return engine.submit(call, body, async_op=async_op)


def _check_splits(engine: Engine, turn: Turn, outgoing: list[int], incoming: list[int]) -> None:
    """Compare what every rank sends with what every rank expects; the same verdict on all ranks, nothing sent yet."""
    size = engine.size
    rows = engine.table(turn, outgoing + incoming)
    wrong = {
        rank: f"alltoall with input splits {row[:size]} and output splits {row[size:]} (elements)"
        for rank, row in enumerate(rows)
        if any(row[other] != rows[other][size + rank] for other in range(size))
        or any(row[size + other] != rows[other][rank] for other in range(size))
    }
    if wrong:
        raise Mismatch(wrong, rank=engine.rank, operation=turn.call, places=engine.places(turn))
