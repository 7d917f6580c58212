"""MPI as a competitor: mpirun starts the ranks, and MPI's collectives run on the same buffers (extra `peers`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire.bench.micro.cases import IN_PLACE, BenchJob, Buffers, divide
from gradwire.bench.micro.point_to_point import bandwidth, latency

MPI = "mpi"
_DTYPES = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def under_mpirun() -> bool:
    """Return whether an mpirun started this process, that of Open MPI, MPICH or Intel MPI, and not torchrun."""
    return "RANK" not in os.environ and not {"OMPI_COMM_WORLD_RANK", "PMI_RANK"}.isdisjoint(os.environ)


def join_world(timeout_s: float) -> None:
    """Initialize torch.distributed over gloo among the ranks of mpirun, all on this host."""
    from mpi4py import MPI as library  # noqa: N811

    world = library.COMM_WORLD
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if world.rank == 0 else None
    port = world.bcast(store.port if store is not None else None)
    store = store or TCPStore("localhost", port)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def takes(job: BenchJob) -> bool:
    """Return whether MPI supports the dtype and the device of the job."""
    return job.dtype in _DTYPES and job.device.type == "cpu"


def call(name: str, buffers: Buffers, job: BenchJob) -> Callable[[], None]:
    """Return a function that calls MPI's collective `name`."""
    from mpi4py import MPI as library  # noqa: N811

    world = library.COMM_WORLD
    operations = {
        "sum": library.SUM,
        "average": library.SUM,
        "min": library.MIN,
        "max": library.MAX,
        "product": library.PROD,
    }
    output, source, in_place = buffers.output.numpy(), buffers.input.numpy(), job.place == IN_PLACE
    op = operations.get(job.op, library.OP_NULL)

    def send(tensor: torch.Tensor, rank: int) -> None:
        world.Send(tensor.numpy(), rank)

    def recv(tensor: torch.Tensor, rank: int) -> None:
        world.Recv(tensor.numpy(), rank)

    def start(tensor: torch.Tensor, rank: int) -> Any:
        return world.Isend(tensor.numpy(), rank)

    calls: dict[str, Callable[[], None]] = {
        "allreduce": lambda: world.Allreduce(library.IN_PLACE if in_place else source, output, op),
        "reduce_scatter": lambda: world.Reduce_scatter_block(source, output, op),
        "allgather": lambda: world.Allgather(library.IN_PLACE if in_place else source, output),
        "broadcast": lambda: world.Bcast(buffers.filled().numpy(), job.root),
        "alltoall": lambda: world.Alltoall(source, output),
        "barrier": world.Barrier,
        "latency": lambda: latency(send, recv, buffers, job.rank),
        "bandwidth": lambda: bandwidth(start, send, recv, buffers, job.rank),
    }
    started = calls[name]

    def run() -> None:
        started()
        divide(buffers.output, job)

    return run
