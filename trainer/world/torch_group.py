"""The default process group of torch.distributed, as a world makes and destroys it."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gradwire.collectives.torch_internals import forget_failed_groups
from gradwire.trainer.world.epochs import WORKER


def init_group(backend: str, timeout_s: float, store: Store, rank: int, size: int) -> None:
    """Initialize torch.distributed. In an elastic job, errors get no prefix by torch's hook, which would add one for each world:
    the launcher names the worker in each line."""
    hook = sys.excepthook
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), store=store, rank=rank, world_size=size)
    if WORKER in os.environ:
        sys.excepthook = hook


def destroy_group() -> None:
    """Destroy the default group. If init_group() has failed to make it, remove what that left in torch. Afterwards, all ranks can
    make another one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        forget_failed_groups()
