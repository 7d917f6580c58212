"""The default process group of torch.distributed, as a world makes and destroys it."""

from __future__ import annotations

import ipaddress
import os
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gradwire.collectives.environment import GLOO_INTERFACE
from gradwire.collectives.link.own_address import interface_of
from gradwire.collectives.torch_internals import forget_failed_groups
from gradwire.trainer.world.generations import WORKER


def init_group(backend: str, timeout_s: float, store: Store, rank: int, size: int) -> None:
    """Initialize torch.distributed. In an elastic job, errors get no prefix by torch's hook, which would add one for each
    world: the launcher names the worker in each line."""
    hook = sys.excepthook
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), store=store, rank=rank, world_size=size)
    if WORKER in os.environ:
        sys.excepthook = hook


def name_interface(address: str) -> str | None:
    """Let gloo use the interface of an address of this host, in the default group and in a gloo group that the script makes
    itself. Without this, gloo would use the address to which the name of this host resolves, which may be a loopback address.

    Return the name of the interface, for destroy_group(); None if GLOO_SOCKET_IFNAME names one already, if no interface has the
    address as its first one, or if the address is a loopback address: with one host, gloo needs no name, and child processes
    inherit the variable. torch passes nothing to gloo except this variable, and gloo takes an interface's first address.
    """
    if os.environ.get(GLOO_INTERFACE) or ipaddress.ip_address(address).is_loopback:
        return None
    if (interface := interface_of(address)) is None:
        return None
    os.environ[GLOO_INTERFACE] = interface
    return interface


def destroy_group(interface: str | None = None) -> None:
    """Destroy the default group. If init_group() has failed to make it, remove what that left in torch. Afterwards, all ranks
    can make another one. interface: what name_interface() returned."""
    if interface is not None and os.environ.get(GLOO_INTERFACE) == interface:
        del os.environ[GLOO_INTERFACE]
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        forget_failed_groups()
