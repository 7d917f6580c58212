"""What torch has no public name for. Only this file of the package uses names that torch keeps to itself."""

from __future__ import annotations

import ctypes
import os
import weakref
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, HashStore
from torch.distributed.distributed_c10d import Store, _get_default_store, _world

#: One of torch.distributed's C++ backends, whose methods torch's type stubs leave out.
Backend = Any

T = TypeVar("T")


def store_of_one() -> Store:
    """Return a store for a process that is alone."""
    return HashStore()


def default_store() -> Store:
    """Return the store of the default group."""
    return _get_default_store()


def left_to_parent(made: T) -> T:
    """Return a backend or store whose destructor is never called in a child that is forked from this process.

    It would wait there for threads that only the parent has, for ever, when the child ends.
    """
    _with_threads.add(made)
    return made


def _after_fork() -> None:
    """Keep for ever what has threads in the parent: what this package has made, and the groups of torch.distributed."""
    kept: list[Any] = list(_with_threads)
    for group, (_, store) in list(_world.pg_map.items()):
        kept += [group, store, *(group._get_backend(device) for device in group._device_types)]
    keep = ctypes.pythonapi.Py_IncRef
    keep.argtypes, keep.restype = [ctypes.py_object], None
    for each in kept:
        keep(each)


_with_threads: weakref.WeakSet[Any] = weakref.WeakSet()

os.register_at_fork(after_in_child=_after_fork)


def nccl_backend(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """Return a backend over NCCL."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return left_to_parent(dist.ProcessGroupNCCL(store, rank, size, options))


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
