"""The link that is used unless told otherwise: shared memory between the ranks of a host, the process group for all else."""

from __future__ import annotations

import logging
import os
import time

from collectives.environment import SHARED_MEMORY, shared_memory_wanted
from collectives.errors import ranks_text
from collectives.kernels import cpu_kernels
from collectives.link.base import Transport
from collectives.link.membership import Membership
from collectives.link.process_group import ProcessGroupTransport, process_group
from collectives.link.routing import RoutingTransport
from collectives.link.shared_memory.messages import SharedMemoryTransport
from collectives.link.shared_memory.reductions import SharedMemory
from collectives.link.shared_memory.rendezvous import join_host

#: What all processes of a machine may take to compile the kernels or load them, one after the other.
_ALL_COMPILE_S = 120.0
_log = logging.getLogger("gradwire")


def auto(membership: Membership, timeout_s: float) -> Transport:
    """Connect the members: by the process group, and by shared memory too where there are CPU tensors to carry and ranks that
    share a host, unless one of them refuses. timeout_s: compiling not counted."""
    remote = process_group(membership, timeout_s)
    try:
        return _beside_memory(membership, remote, timeout_s)
    except BaseException:
        remote.close()
        raise


def _beside_memory(membership: Membership, remote: ProcessGroupTransport, timeout_s: float) -> Transport:
    """Return `remote` with shared memory beside it, or as it is."""
    if "cpu" not in membership.device_types or all(len(host) == 1 for host in membership.hosts):
        return remote
    wanted = shared_memory_wanted(os.environ)
    kernels = cpu_kernels() if wanted else ""
    # Every rank has compiled when all have answered: the backend's own collectives would not wait that long.
    answers = membership.everyones("shares", b"1" if wanted else b"0", time.monotonic() + timeout_s + _ALL_COMPILE_S)
    refusing = [rank for rank, answer in enumerate(answers) if answer == b"0"]
    if refusing:
        if len(refusing) < membership.size and membership.rank == 0:
            _log.warning("gradwire: no shared memory: %s=0 on %s", SHARED_MEMORY, ranks_text(refusing))
        return remote
    group = join_host(membership, kernels, time.monotonic() + timeout_s)
    if group is None:
        return remote
    try:
        everyone = group.size == membership.size and "cuda" not in membership.device_types
        local = SharedMemoryTransport(
            group, membership.rank, membership.size, reductions=SharedMemory(group) if everyone else None
        )
        return RoutingTransport(local, remote, group.members)
    except BaseException:
        group.close()
        raise
