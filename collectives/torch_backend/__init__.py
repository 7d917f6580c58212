"""A backend of torch.distributed: `init_process_group("gradwire")`.

Its import is cheap: the modules that a group needs are imported when the first group is made.
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
    """Register the backend "gradwire" with torch.distributed, for CPU tensors, and for CUDA tensors if torch has NCCL.
    Calling it again does nothing."""
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
    """Return a group. given: the store, ranks and timeout, from torch. options: the Membership of the ranks if they have met, and
    None otherwise; raises ValueError for others."""
    from gradwire.collectives.control.membership import Membership
    from gradwire.collectives.torch_backend.group import GradwireGroup

    if options is not None and not isinstance(options, Membership):
        raise ValueError(f"rank {given.group_rank}: pg_options={options!r}: the backend {TORCH_BACKEND} takes none")
    ranks = tuple(given.global_ranks_in_group) or tuple(range(given.group_size))
    return GradwireGroup(given.store, given.group_rank, ranks, given.timeout, options)
