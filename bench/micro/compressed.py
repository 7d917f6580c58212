"""`bench allreduce --codec`: allreduces with codecs, without a codec and of torch.distributed, in the same turns.

All reduce gaussian float32 numbers, different on every rank. Results with a codec are not exact: their relative error
is printed, and an element counts as wrong if its bits differ from rank 0's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.bench.codec.checks import relative_error
from gradwire.bench.micro.cases import BenchJob, Buffers
from gradwire.bench.timing import Protocol, Timer, slowest_rank, take_turns
from gradwire.collectives import Communicator
from gradwire.collectives.compression.codec import Codec, State

Codecs = Mapping[str, tuple[Codec, bool]]
"""By its name on the command line, each codec, and whether it has error feedback."""
Call = Callable[[], object]


class Clock:
    """Adds up the seconds of encoding and of decoding since the last reading. On a GPU, it prevents overlap."""

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0]

    def add(self, part: int, work: Call, device: torch.device) -> None:
        """Do the work and add its time to that of a part: encoding 0, decoding 1."""
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._seconds[part] += time.perf_counter() - start

    def read(self) -> tuple[float, float]:
        encode_s, decode_s = self._seconds
        self._seconds = [0.0, 0.0]
        return encode_s, decode_s


class StandIn(Codec):
    """Stands in for a codec, with codes of the same length: it times the codec by a clock or, without a clock, does no work, so
    that only the wire's time is left. Two are equal only if they are the same object, as caches require."""

    name = "stand-in"

    def __init__(self, real: Codec, clock: Clock | None = None) -> None:
        self.real, self._clock = real, clock
        # Codecs have these constants in their class, but stand-ins differ.
        vars(self).update(name=real.name, summable=real.summable, wire_dtype=real.wire_dtype)

    def __repr__(self) -> str:
        return f"{'Timed' if self._clock else 'Blank'}({self.real!r})"

    @property
    def identity(self) -> str:
        return f"{'Timed' if self._clock else 'Blank'}({self.real.identity})"

    @property
    def alignment(self) -> int:
        return self.real.alignment

    def at(self, step: int) -> Codec:
        real = self.real.at(step)
        return self if real is self.real else StandIn(real, self._clock)

    def wire_bytes(self, numel: int) -> int:
        return self.real.wire_bytes(numel)

    def new_state(self, numel: int, device: torch.device) -> State | None:
        return self.real.new_state(numel, device)

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        if self._clock is not None:
            encode = self.real.encode
            self._clock.add(0, lambda: encode(values, wire, residual=residual, seed=seed, state=state), values.device)

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        if self._clock is not None:
            self._clock.add(1, lambda: self.real.decode(wire, out, add=add, scale=scale), out.device)


def contribution(rank: int, job: BenchJob) -> Tensor:
    generator = torch.Generator(job.device).manual_seed(rank)
    return torch.randn(job.count, generator=generator, device=job.device)


def prepare(job: BenchJob) -> Buffers:
    """Return the buffers of a job in place. `expected` is the sum or average of all contributions, float64."""
    total = torch.zeros(job.count, dtype=torch.float64, device=job.device)
    for rank in range(job.size):
        total += contribution(rank, job)
    mine = contribution(job.rank, job)
    return Buffers(mine, output := torch.empty_like(mine), total / job.size if job.op == "average" else total, output)


def call_of(comm: Communicator, job: BenchJob, output: Tensor, codec: Codec, with_feedback: bool) -> Call:
    """Return a function that calls allreduce with a codec, and keeps the state of error feedback from call to call."""
    feedback = comm.new_feedback(codec, job.count, job.device) if with_feedback else None
    steps = itertools.count()

    def call() -> None:
        comm.allreduce(output, job.op, compression=codec, feedback=feedback, step=next(steps))

    return call


def differing(output: Tensor) -> int:
    """Count the elements whose bits differ from rank 0's."""
    first = output.clone()
    dist.broadcast(first, 0)
    return int((first.view(torch.int32) != output.view(torch.int32)).sum())


def error_of(call: Call, buffers: Buffers) -> float:
    """Return the relative error of a first call, while error feedback is still zero."""
    buffers.reset()
    call()
    return relative_error(buffers.expected, buffers.output)


def parts(
    comm: Communicator,
    job: BenchJob,
    buffers: Buffers,
    codec: Codec,
    with_feedback: bool,
    protocol: Protocol,
    timer: Timer,
) -> dict[str, Any]:
    """Return the microseconds of encoding, decoding and the wire, measured in separate turns, by the names of the row's
    fields."""
    clock, readings = Clock(), list[tuple[float, float]]()
    whole = call_of(comm, job, buffers.output, StandIn(codec, clock), with_feedback)

    def read() -> None:
        whole()
        readings.append(clock.read())

    wire = call_of(comm, job, buffers.output, StandIn(codec), with_feedback)
    unchecked = Protocol(protocol.iters, max(1, protocol.warmup_iters), check_iters=0)
    seconds, _ = take_turns([read, wire], timer, unchecked, buffers.reset)
    of_codec = np.array(readings[-protocol.iters :]).T
    medians_s = np.median(slowest_rank(np.stack([*of_codec, seconds[1]]), job.device), axis=1)
    return dict(zip(("encode_us", "decode_us", "wire_us"), (medians_s * 1e6).tolist(), strict=True))
