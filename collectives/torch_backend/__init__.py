"""A backend of torch.distributed: `init_process_group("gradwire")`.

It imports nothing but torch.distributed, and the rest when a group is made.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gradwire.collectives.environment import TORCH_BACKEND, TORCHCOMMS

if TYPE_CHECKING:
    from gradwire.collectives.torch_backend.group import GradwireGroup

_log = logging.getLogger("gradwire")


def register() -> None:
    """Make torch.distributed know the backend "gradwire", for tensors on the CPU, and on CUDA devices where torch has NCCL. Again
    does nothing."""
    if TORCH_BACKEND in dist.Backend.backend_list:
        return
    devices = ["cpu", "cuda"] if dist.is_nccl_available() else ["cpu"]
    dist.Backend.register_backend(TORCH_BACKEND, _make, extended_api=True, devices=devices)
    if os.environ.get(TORCHCOMMS) == "1" and find_spec("torchcomms") is not None:
        _log.warning(
            "gradwire: with %s=1 torch.distributed looks for every backend in the package torchcomms, which does not know "
            '"gradwire": init_process_group("gradwire") needs it unset',
            TORCHCOMMS,
        )


def _make(given: Any, options: object) -> GradwireGroup:
    """Return a group with what torch gives its backends: store, rank, size, timeout, global ranks."""
    from gradwire.collectives.torch_backend.group import GradwireGroup

    if options is not None:
        raise ValueError(f"rank {given.group_rank}: pg_options={options!r}: the backend {TORCH_BACKEND} takes none")
    ranks = tuple(given.global_ranks_in_group) or tuple(range(given.group_size))
    return GradwireGroup(given.store, given.group_rank, ranks, given.timeout)
