"""The time that the host spends in a call of an asynchronous allreduce, ours and that of torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from gradwire.bench.gpu.outcome import Goal, Outcome
from gradwire.bench.gpu.scale import Scale
from gradwire.collectives import Communicator
from gradwire.collectives.engine.work import Work
from gradwire.collectives.parsing import format_size

HOST_GOAL_US = 60.0
"""What the host may take for one operation over NCCL."""
WARMUP_CALLS = 5
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CallRow:
    """The median times in microseconds from the call of an asynchronous allreduce to its return, ours and torch's."""

    backend: str
    world_size: int
    bytes: int
    host_us: float
    torch_us: float
    part: str = "call"


def measure_calls(scale: Scale, device: torch.device) -> Outcome:
    """Time calls of asynchronous allreduces, ours and torch's in turns. Collective."""
    outcome, backend = Outcome(), backend_of(device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    outcome.lines.append(f"# from the call of an asynchronous allreduce to its return, over {backend}, median (us)")
    outcome.lines.append(f"# {'size':>8} {'gradwire':>10} {'torch':>10}")
    with Communicator(timeout_s=TIMEOUT_S) as comm:
        for nbytes in scale.call_bytes:
            ours, theirs = torch.ones(nbytes // 4, device=device), torch.zeros(nbytes // 4, device=device)
            calls: list[Callable[[], Work | dist.Work | None]] = [
                lambda tensor=ours: comm.allreduce(tensor, "average", async_op=True),  # type: ignore[misc]
                lambda tensor=theirs: dist.all_reduce(tensor, async_op=True),  # type: ignore[misc]
            ]
            taken = np.zeros((len(calls), scale.calls))
            for number in range(-WARMUP_CALLS, scale.calls):
                for index, call in enumerate(calls):
                    synchronize()
                    comm.barrier()
                    began = time.perf_counter()
                    work = call()
                    elapsed = time.perf_counter() - began
                    assert work is not None
                    work.wait()
                    synchronize()
                    if number >= 0:
                        taken[index, number] = elapsed
            host_us, torch_us = (1e6 * float(each) for each in np.median(taken, axis=1))
            outcome.rows.append(CallRow(backend, comm.size, nbytes, host_us, torch_us))
            outcome.lines.append(f"  {format_size(nbytes):>8} {host_us:10.1f} {torch_us:10.1f}")
            if not torch.equal(ours, torch.ones_like(ours)):
                outcome.wrong.append(
                    f"allreduce of {format_size(nbytes)} over {backend}: the average of ones is not one"
                )
    if backend == "nccl":
        outcome.goals.append(
            Goal("host time of a small allreduce over NCCL (us)", outcome.rows[0].host_us, HOST_GOAL_US)
        )
    return outcome


def backend_of(device: torch.device) -> str:
    """Return the backend of torch.distributed for tensors of a device."""
    backends = dict(each.split(":") for each in dist.get_backend_config().split(","))
    return backends[device.type]
