"""Horovod's functions about its build, answered for torch and for this world."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradwire.trainer.world.world import current_world, is_initialized

NAMES = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def gloo_built() -> bool:
    """Return whether torch has gloo."""
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Return whether the process group of this world has the backend gloo; False before init()."""
    return is_initialized() and "gloo" in dist.get_backend_config()


def nccl_built() -> bool:
    """Return whether torch has NCCL."""
    return dist.is_nccl_available()


def cuda_built() -> bool:
    """Return whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built for ROCm."""
    return torch.version.hip is not None


def mpi_built() -> bool:
    """Return False: gradwire sends nothing over MPI, even if mpirun started the processes."""
    return False


def mpi_enabled() -> bool:
    """Return False: gradwire sends nothing over MPI, even if mpirun started the processes."""
    return False


def mpi_threads_supported() -> bool:
    """Return False: gradwire does not initialize MPI."""
    return False


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not used."""
    return False


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks. Raises RuntimeError before init()."""
    return len({len(host) for host in current_world().hosts}) == 1
