"""`bench allreduce --codec`: compressed allreduces beside an uncompressed one and torch.distributed's, in the same turns.

All reduce gaussian float32, unlike on every rank. What is compressed is not exact: instead, its relative error is stated,
and what counts as wrong is an element that differs from rank 0's by a bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import CASES, Buffers, Job
from bench.codec_checks import relative_error
from bench.compare import format_comparison
from bench.table import Row, format_heading, format_row, format_trailer
from bench.timing import Protocol, Times, distributed_machine, median_and_p99, over_ranks, slowest_rank, take_turns
from collectives import Communicator
from collectives.compressed import effective
from collectives.compression.codec import Codec
from collectives.compression.sharing import Sharing

Codecs = Mapping[str, tuple[Codec, bool]]
Measured = tuple[Job, Row, Times]
NONE = "none"
ALLREDUCE = CASES["allreduce"]


def contribution(rank: int, job: Job) -> Tensor:
    generator = torch.Generator(job.device).manual_seed(rank)
    return torch.randn(job.count, generator=generator, device=job.device)


def exact(job: Job) -> Tensor:
    """float64, (count,)."""
    total = torch.zeros(job.count, dtype=torch.float64, device=job.device)
    for rank in range(job.size):
        total += contribution(rank, job)
    return total / job.size if job.op == "average" else total


def two_shot_bytes(codec: Codec, sharing: Sharing) -> int:
    """What a rank sends of codes. Not what goes uncompressed inside a host, where several hosts have several ranks."""
    used, total = effective(codec, sharing), 0
    for chunk in sharing.chunks:
        for member, span in zip(sharing.group, chunk, strict=True):
            if span.length:
                total += used.wire_bytes(span.length) * (len(chunk) - 1 if member == sharing.rank else 1)
    return total


def compressed(comm: Communicator, job: Job, output: Tensor, codec: Codec, with_feedback: bool) -> Callable[[], None]:
    """A call of allreduce; with error feedback, which then goes on from call to call."""
    feedback = comm.new_feedback(codec, job.count, job.device) if with_feedback else None
    steps = itertools.count()

    def call() -> None:
        comm.allreduce(output, job.op, codec=codec, feedback=feedback, step=next(steps))

    return call


def wire_bytes(comm: Communicator, job: Job, codec: Codec) -> int | None:
    """What this rank sends."""
    if codec.summable:
        return comm.wire_bytes("allreduce", codec.wire_bytes(job.count))
    return two_shot_bytes(codec, comm.new_feedback(codec, job.count).sharing)


def differing(output: Tensor) -> int:
    """From rank 0's, to the bit."""
    first = output.clone()
    dist.broadcast(first, 0)
    return int((first.view(torch.int32) != output.view(torch.int32)).sum())


def measure(
    jobs: Sequence[Job], comm: Communicator, codecs: Codecs, protocol: Protocol, device: torch.device
) -> list[Measured]:
    """All that was measured, job by job, the same on every rank: torch's, ours, then by codec."""
    machine = distributed_machine(device, comm.barrier)
    measured: list[Measured] = []
    for job in jobs:
        initial = contribution(comm.rank, job)
        buffers = Buffers(initial, torch.empty_like(initial), initial, initial)
        makers: dict[tuple[str, str], Callable[[], Callable[[], None]]] = {
            ("torch", NONE): lambda: partial(ALLREDUCE.run_torch, buffers, job),
            ("auto", NONE): lambda: partial(ALLREDUCE.run, comm, buffers, job, "auto"),
        }
        for label, (codec, with_feedback) in codecs.items():
            makers["auto", label] = partial(compressed, comm, job, buffers.output, codec, with_feedback)
        expected, errors = exact(job), []
        for maker in makers.values():
            buffers.reset()
            maker()()  # a first call, before error feedback has anything to add
            errors.append(relative_error(expected, buffers.output))
        sent = [
            comm.wire_bytes("allreduce", 4 * job.count) if label == NONE else wire_bytes(comm, job, codecs[label][0])
            for _, label in makers
        ]
        most_sent = slowest_rank(np.array([-1.0 if one is None else one for one in sent]), device)
        seconds, wrong = take_turns(
            [maker() for maker in makers.values()], buffers.reset, partial(differing, buffers.output), machine, protocol
        )
        slowest, wrong_anywhere = slowest_rank(seconds, device), over_ranks(np.array(wrong), device)
        for index, (algorithm, label) in enumerate(makers):
            known = algorithm != "torch" and most_sent[index] >= 0
            row = _row(job, algorithm, label, slowest[index], int(most_sent[index]) if known else None, errors[index])
            row = row if protocol.check_iters == 0 else row._replace_wrong(int(wrong_anywhere[index]))
            measured.append((job, row, slowest[index]))
    return measured
