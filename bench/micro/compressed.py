"""`bench allreduce --codec`: allreduces with codecs, without a codec and of torch.distributed, in the same turns.

All reduce gaussian float32 numbers, different on every rank. Results with a codec are not exact: their relative error
is printed, and an element counts as wrong if its bits differ from rank 0's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.bench.codec.checks import relative_error
from gradwire.bench.micro.cases import CASES, IN_PLACE, BenchJob, Buffers
from gradwire.bench.micro.table import (
    MeasuredRow,
    Row,
    Speedup,
    compare,
    format_comparison,
    format_heading,
    format_row,
    format_trailer,
    measured_row,
)
from gradwire.bench.timing import (
    Protocol,
    distributed_waits,
    every_rank,
    most_bytes,
    over_ranks,
    slowest_rank,
    take_turns,
)
from gradwire.collectives import Communicator
from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.compression.codec import Codec, State

Codecs = Mapping[str, tuple[Codec, bool]]
Call = Callable[[], object]
NONE, TORCH, AUTO = "none", "torch", "auto"
ALLREDUCE = CASES["allreduce"]


class Clock:
    """Adds up the seconds of encoding and of decoding since the last reading."""

    def __init__(self) -> None:
        self.encode_s = self.decode_s = 0.0

    def read(self) -> tuple[float, float]:
        seen = self.encode_s, self.decode_s
        self.encode_s = self.decode_s = 0.0
        return seen


def timed(codec: Codec, clock: Clock) -> Codec:
    """Return the codec with its encodings and decodings timed by `clock`. On a GPU, this prevents overlap."""

    def elapsed(start: float, device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    class Timed(_Stand):
        def at(self, step: int) -> Codec:
            return Timed(self.real.at(step))

        def _encode(
            self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None
        ) -> None:
            start = time.perf_counter()
            self.real.encode(values, wire, residual=residual, seed=seed, state=state)
            clock.encode_s += elapsed(start, values.device)

        def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
            start = time.perf_counter()
            self.real.decode(wire, out, add=add, scale=scale)
            clock.decode_s += elapsed(start, out.device)

    return Timed(codec)


def blank(codec: Codec) -> Codec:
    """Return a codec that does no work and has codes of the same length, so that only the wire's time is left."""

    class Blank(_Stand):
        def at(self, step: int) -> Codec:
            return Blank(self.real.at(step))

        def _encode(self, *tensors_and_settings: object) -> None:
            pass

        def _decode(self, *tensors_and_settings: object) -> None:
            pass

    return Blank(codec)


class _Stand(Codec):
    """A stand-in for a codec. Two stand-ins are equal only if they are the same object, as caches require."""

    name = "stand"

    def __init__(self, real: Codec) -> None:
        self.real = real
        # Codecs have these constants in their class, but stand-ins differ.
        vars(self).update(name=real.name, summable=real.summable, wire_dtype=real.wire_dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.real!r})"

    @property
    def identity(self) -> str:
        return f"{type(self).__name__}({self.real.identity})"

    @property
    def alignment(self) -> int:
        return self.real.alignment

    def wire_bytes(self, numel: int) -> int:
        return self.real.wire_bytes(numel)

    def new_state(self, numel: int, device: torch.device) -> State | None:
        return self.real.new_state(numel, device)


def contribution(rank: int, job: BenchJob) -> Tensor:
    generator = torch.Generator(job.device).manual_seed(rank)
    return torch.randn(job.count, generator=generator, device=job.device)


def exact(job: BenchJob) -> Tensor:
    """Return the sum or average of all contributions, float64, (count,)."""
    total = torch.zeros(job.count, dtype=torch.float64, device=job.device)
    for rank in range(job.size):
        total += contribution(rank, job)
    return total / job.size if job.op == "average" else total


def compressed(comm: Communicator, job: BenchJob, output: Tensor, codec: Codec, with_feedback: bool) -> Call:
    """Return a function that calls allreduce with a codec, and keeps the state of error feedback from call to call."""
    feedback = comm.new_feedback(codec, job.count, job.device) if with_feedback else None
    steps = itertools.count()

    def call() -> None:
        comm.allreduce(output, job.op, codec=codec, feedback=feedback, step=next(steps))

    return call


def differing(output: Tensor) -> int:
    """Count the elements whose bits differ from rank 0's."""
    first = output.clone()
    dist.broadcast(first, 0)
    return int((first.view(torch.int32) != output.view(torch.int32)).sum())


def measure(
    jobs: Sequence[BenchJob], comm: Communicator, codecs: Codecs, protocol: Protocol, device: torch.device
) -> list[MeasuredRow]:
    """Return the rows of all jobs, the same on every rank. For each job: torch's, ours, ours with each codec."""
    in_place = [job for job in jobs if job.place == IN_PLACE]
    return [one for job in in_place for one in _measure(job, comm, codecs, protocol, device)]


def _measure(
    job: BenchJob, comm: Communicator, codecs: Codecs, protocol: Protocol, device: torch.device
) -> list[MeasuredRow]:
    waits, initial = distributed_waits(device, comm.barrier), contribution(comm.rank, job)
    buffers = Buffers(initial, torch.empty_like(initial), initial, initial)
    makers: list[Callable[[], Call]] = [
        lambda: partial(ALLREDUCE.run_torch, buffers, job),
        lambda: partial(ALLREDUCE.run, comm, buffers, job, AUTO),
        *(partial(compressed, comm, job, buffers.output, *codec) for codec in codecs.values()),
    ]
    expected, errors = exact(job), []
    for maker in makers:
        buffers.reset()
        maker()()  # a first call, while error feedback is still zero
        errors.append(relative_error(expected, buffers.output))
    seconds, wrong = take_turns(
        [maker() for maker in makers], buffers.reset, partial(differing, buffers.output), waits, protocol
    )
    everyones, wrong_anywhere = every_rank(seconds, device), over_ranks(np.array(wrong), device)

    names = [(TORCH, NONE), (AUTO, NONE), *((AUTO, label) for label in codecs)]
    measured: list[MeasuredRow] = []
    for index, (algorithm, label) in enumerate(names):
        codec, with_feedback = codecs.get(label, (None, False))
        parts = _parts(comm, job, buffers, codec, with_feedback, protocol, device) if codec is not None else {}
        sent = comm.wire_bytes("allreduce", 4 * job.count, codec=codec) if algorithm != TORCH else None
        most = most_bytes(sent, device)
        known = {
            "codec": label,
            "wire_bytes": most,
            "wrong": int(wrong_anywhere[index]) if protocol.check_iters > 0 else None,
            "ratio": ALLREDUCE.busbw_factor(job.size) * 4 * job.count / most if most else None,
            "relative_error": errors[index],
            **parts,
        }
        measured.append(measured_row(ALLREDUCE, job, algorithm, everyones[:, index], **known))
    return measured


def _parts(
    comm: Communicator,
    job: BenchJob,
    buffers: Buffers,
    codec: Codec,
    with_feedback: bool,
    protocol: Protocol,
    device: torch.device,
) -> dict[str, float]:
    """Return the microseconds of encoding, decoding and the wire, measured in separate turns, by the names of the row's
    fields."""
    clock, readings = Clock(), list[tuple[float, float]]()
    whole = compressed(comm, job, buffers.output, timed(codec, clock), with_feedback)

    def read() -> None:
        whole()
        readings.append(clock.read())

    wire = compressed(comm, job, buffers.output, blank(codec), with_feedback)
    unchecked = Protocol(protocol.iters, max(1, protocol.warmup_iters), check_iters=0)
    seconds, _ = take_turns([read, wire], buffers.reset, lambda: 0, distributed_waits(device, comm.barrier), unchecked)
    of_codec = np.array(readings[-protocol.iters :]).T
    medians_s = np.median(slowest_rank(np.stack([*of_codec, seconds[1]]), device), axis=1)
    return dict(zip(("encode_us", "decode_us", "wire_us"), (medians_s * 1e6).tolist(), strict=True))


def report(comm: Communicator, measured: Sequence[MeasuredRow], codecs: Codecs) -> tuple[list[Row], list[Speedup]]:
    """Print a block for each codec, and its speed over torch.distributed's. Return rows and speedups in this order."""
    rows: list[Row] = []
    for label in (NONE, *codecs):
        block = [one for one in measured if one[1].codec == label]
        print(f"# Codec {label}{f': {codecs[label][0]!r}' if label in codecs else ''}")
        print("\n".join(format_heading([IN_PLACE], codecs=True)))
        print("\n".join(format_row([row], job.count, job.root) + f"  {row.algorithm}" for job, row, _ in block))
        print("\n".join(format_trailer([row for _, row, _ in block])))
        rows += [row for _, row, _ in block]
    torchs = [one for one in measured if one[1].algorithm == TORCH]
    device = measured[0][0].device.type
    speedups = []
    for label in (NONE, *codecs):
        ours = [one for one in measured if one[1].algorithm == AUTO and one[1].codec == label]
        compared = compare([*ours, *torchs], AUTO, TORCH, partial(_ridden, comm, label, codecs, device))
        print("\n".join(format_comparison(compared)))
        speedups += compared
    return rows, speedups


def _ridden(comm: Communicator, label: str, codecs: Codecs, device: str, nbytes: int) -> str:
    """Return the codec and algorithm that a line of a comparison names."""
    if label == NONE:
        return comm.chosen("allreduce", nbytes, device=device)
    codec = codecs[label][0]
    summed = comm.chosen("allreduce", codec.wire_bytes(nbytes // 4), device=device)
    return f"{label}, {summed if codec.summable else shot_of(codec)}"
