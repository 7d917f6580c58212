"""The description of messages from rank 0 to rank 1: their latency and bandwidth, as in the OSU micro-benchmarks.

latency: rank 1 returns each message, and the time is half of a round trip (osu_latency). bandwidth: rank 0 sends WINDOW
messages without waiting for one, which rank 1 acknowledges together; the time is that of a window, divided by its messages
(osu_bw). All other ranks are idle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradwire.bench.micro.cases import OUT_OF_PLACE, BenchJob, Buffers, Case
from gradwire.bench.micro.verification import own_tile

WINDOW = 16

Message = Callable[[torch.Tensor, int], object]
"""Sends a tensor to a rank, or receives one from it."""


def latency(send: Message, recv: Message, buffers: Buffers, rank: int) -> None:
    """Send a message and get it back."""
    if rank == 0:
        send(buffers.input, 1)
        recv(buffers.output, 1)
    elif rank == 1:
        recv(buffers.output, 0)
        send(buffers.output, 0)


def bandwidth(
    start: Callable[[torch.Tensor, int], Any], send: Message, recv: Message, buffers: Buffers, rank: int
) -> None:
    """Send a window of messages and get one number back. start: begins to send, and returns a handle with wait()."""
    if rank == 0:
        for work in [start(buffers.input, 1) for _ in range(WINDOW)]:
            work.wait()
        recv(buffers.output[:1], 1)
    elif rank == 1:
        for _ in range(WINDOW):
            recv(buffers.output, 0)
        send(buffers.output[:1], 0)


def _prepare(job: BenchJob, *, returned: bool) -> Buffers:
    """Return the buffers of a rank. Messages take rank 0's numbers to rank 1. returned: whether they all come back."""
    sent = job.expand(own_tile(0, job.dtype), 0, job.count)
    is_written = job.rank == 1 or (job.rank == 0 and returned)
    return Buffers(job.unwritten(job.count) if is_written else sent, torch.empty_like(sent), sent, sent)


def _case(name: str, *, returned: bool, messages: int, run: Callable[..., Any], run_torch: Callable[..., Any]) -> Case:
    return Case(
        name,
        partial(_prepare, returned=returned),
        run,
        run_torch,
        shared_out=False,
        places=(OUT_OF_PLACE,),
        busbw_factor=lambda size: 1.0,
        messages=messages,
        ranks=2,
        has_algorithms=False,
    )


POINT_TO_POINT = {
    case.name: case
    for case in (
        _case(
            "latency",
            returned=True,
            messages=2,
            run=lambda comm, buffers, job, name: latency(comm.send, comm.recv, buffers, job.rank),
            run_torch=lambda buffers, job: latency(dist.send, dist.recv, buffers, job.rank),
        ),
        _case(
            "bandwidth",
            returned=False,
            messages=WINDOW,
            run=lambda comm, buffers, job, name: bandwidth(comm.isend, comm.send, comm.recv, buffers, job.rank),
            run_torch=lambda buffers, job: bandwidth(dist.isend, dist.send, dist.recv, buffers, job.rank),
        ),
    )
}
