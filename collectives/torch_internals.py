"""What torch has no public name for. Only this file of the package uses names that torch keeps to itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, HashStore
from torch.distributed.distributed_c10d import Store, _get_default_store

#: One of torch.distributed's C++ backends, whose methods torch's type stubs leave out.
Backend = Any


def store_of_one() -> Store:
    """Return a store for a process that is alone."""
    return HashStore()


def default_store() -> Store:
    """Return the store of the default group."""
    return _get_default_store()


def nccl_backend(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """Return a backend over NCCL."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def begin_coalescing(backend: Backend) -> None:
    """Let NCCL gather what is sent and received from now on into one group of calls."""
    backend._start_coalescing()


def end_coalescing(backend: Backend) -> dist.Work:
    """Launch what has been gathered."""
    work: dist.Work = backend._end_coalescing()
    return work


def allgather(backend: Backend, output: torch.Tensor, source: torch.Tensor) -> dist.Work:
    """Collect every rank's source, one after the other, in one tensor."""
    work: dist.Work = backend._allgather_base(output, source, AllgatherOptions())
    return work


def reduce_scatter(
    backend: Backend, output: torch.Tensor, source: torch.Tensor, options: dist.ReduceScatterOptions
) -> dist.Work:
    """Reduce the sources and leave one part of the result on each rank."""
    work: dist.Work = backend._reduce_scatter_base(output, source, options)
    return work


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view whose elements are the negatives of what the memory holds."""
    return torch._neg_view(tensor)
