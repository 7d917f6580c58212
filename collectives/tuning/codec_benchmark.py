"""Measure how quickly codecs encode and decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median_low

import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.tuning.cost_model import CodecCost

#: How many numbers are encoded, more than a core's cache holds, and how often.
_NUMEL, _TIMES = 1 << 20, 5


def codec_costs(engine: Engine, codecs: Sequence[Codec], device: torch.device) -> list[CodecCost]:
    """Measure codecs on all ranks at once, and return their costs on the median rank, to which Costs.slowness refers. A
    collective call; raises the errors of an operation."""
    for codec in codecs:
        engine.rehearse(codec, device, torch.float32, with_feedback=codec.needs_feedback)
    costs = []

    def run(_: object, __: object, tag: int, deadline: float) -> None:
        for codec in codecs:
            engine.meet(tag, deadline)
            mine = speed_of(codec, device)
            table = engine.table(
                [round(1e18 * each) for each in (mine.encode_byte_s, mine.decode_byte_s)], tag, deadline
            )
            encode_s, decode_s = (median_low(column) / 1e18 for column in zip(*table, strict=True))
            costs.append(CodecCost(codec.identity, encode_s, decode_s))

    text = ", ".join(["tune", *(codec.identity for codec in codecs)])
    engine.run(PreparedCall(text, text, run), None, None)
    return costs


def speed_of(codec: Codec, device: torch.device) -> CodecCost:
    """Return the processor's seconds to encode and decode a byte on this machine; on a GPU, the elapsed seconds."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    values = torch.randn(_NUMEL, generator=generator, dtype=torch.float32, device="cpu").to(device)
    wire = torch.empty(codec.wire_bytes(_NUMEL), dtype=torch.uint8, device=device)
    residual = torch.zeros_like(values) if codec.needs_feedback else None
    out, state = torch.zeros_like(values), codec.new_state(_NUMEL, device)

    def now_ns() -> int:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return time.perf_counter_ns()
        return time.thread_time_ns()

    def quickest(call: Callable[[], None]) -> float:
        taken = []
        for _ in range(_TIMES):
            began = now_ns()
            call()
            taken.append(now_ns() - began)
        return min(taken) / 1e9 / values.nbytes

    encode_byte_s = quickest(lambda: codec.encode(values, wire, residual=residual, state=state))
    return CodecCost(codec.identity, encode_byte_s, quickest(lambda: codec.decode(wire, out, add=True)))
