"""Run codecs on little data, so that their kernels compile before any deadline starts, and measure their speed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.collectives.schedules.cost import CodecCost

#: The shape of a matrix that a matrix codec compresses.
_SHAPE = (256, 256)

#: How many numbers are encoded to measure a codec, more than a core's cache holds, and how often.
_NUMEL, _TIMES = 1 << 20, 5


def rehearse(codec: Codec | MatrixCodec, device: torch.device, *, with_feedback: bool) -> None:
    """Call every kernel that a codec has for tensors on `device`. Nothing is sent."""
    if isinstance(codec, MatrixCodec):
        matrix = torch.zeros(_SHAPE, device=device, dtype=torch.float32)
        for _ in codec.new_state([_SHAPE], device).exchange([matrix]):
            pass
        return
    numbers = torch.zeros(1, dtype=torch.float32, device=device)
    wire = torch.zeros(codec.wire_bytes(1), dtype=torch.uint8, device=device)
    residual = numbers.clone() if with_feedback else None
    codec.encode(numbers, wire, residual=residual, state=codec.new_state(1, device) if with_feedback else None)
    codec.encode(numbers, wire, residual=residual)
    codec.decode(wire, numbers)
    codec.decode(wire, numbers, add=True)


def speed_of(codec: Codec, device: torch.device) -> CodecCost:
    """Return the processor's seconds to encode and decode a byte on this machine; on a GPU, the elapsed seconds."""
    values = torch.randn(
        _NUMEL, generator=torch.Generator(device="cpu").manual_seed(0), dtype=torch.float32, device="cpu"
    ).to(device)
    wire = torch.empty(codec.wire_bytes(_NUMEL), dtype=torch.uint8, device=device)
    residual = torch.zeros_like(values) if codec.needs_feedback else None
    out, state = torch.zeros_like(values), codec.new_state(_NUMEL, device)
    clock = time.perf_counter_ns if device.type == "cuda" else time.thread_time_ns

    def now() -> int:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock()

    def quickest(call: Callable[[], None]) -> float:
        taken = []
        for _ in range(_TIMES):
            began = now()
            call()
            taken.append(now() - began)
        return min(taken) / 1e9 / values.nbytes

    encode_byte_s = quickest(lambda: codec.encode(values, wire, residual=residual, state=state))
    return CodecCost(codec.identity, encode_byte_s, quickest(lambda: codec.decode(wire, out, add=True)))
