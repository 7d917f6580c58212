"""What a Communicator talks through: shared memory with the ranks of its host, the process group with all others."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from collectives.environment import SHARED_MEMORY
from collectives.errors import CollectiveError, LinkError, ranks_text
from collectives.kernels import cpu_kernels
from collectives.link.process_group import ProcessGroupTransport
from collectives.link.routing import RoutingTransport
from collectives.link.shared_memory.group import LocalGroup
from collectives.link.shared_memory.messages import SharedMemoryTransport
from collectives.link.shared_memory.reductions import SharedMemory
from collectives.link.shared_memory.rendezvous import join_host
from collectives.link.watch import Watch
from collectives.plan.topology import Topology

#: What all processes of a machine may take to compile the kernels or load them, one after the other.
_ALL_COMPILE_S = 120.0
_LOOK_AGAIN_S = 0.005
_log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Neighbours:
    """transport: for all ranks. local: those of this host, where they share memory. shared: where all ranks do, what reduces
    directly in it."""

    transport: ProcessGroupTransport | RoutingTransport
    local: LocalGroup | None = None
    shared: SharedMemory | None = None

    def close(self) -> None:
        """Give up what was connected, unused."""
        if self.shared is not None:
            self.shared.close()
        self.transport.close()


def connect_neighbours(
    transport: ProcessGroupTransport,
    store: Store,
    watch: Watch,
    topology: Topology,
    timeout_s: float,
    *,
    wanted: Sequence[int],
) -> Neighbours:
    """Add shared memory to a transport, where there are CPU tensors to carry and ranks that share a host. A collective call.

    wanted: whether each rank is willing; all must be, or nothing is done. Raises CollectiveError when the ranks do not come
    together within timeout_s seconds, compiling not counted.
    """
    if not all(wanted):
        if any(wanted) and transport.rank == 0:
            refusing = ranks_text(rank for rank, asked in enumerate(wanted) if not asked)
            _log.warning("gradwire: no shared memory: %s=0 on %s", SHARED_MEMORY, refusing)
        return Neighbours(transport)
    if "cpu" not in transport.backends or all(len(host) == 1 for host in topology.hosts):
        return Neighbours(transport)
    try:
        kernels = cpu_kernels()
        _meet(watch, store, time.monotonic() + timeout_s + _ALL_COMPILE_S)
        group = join_host(transport, topology, kernels, time.monotonic() + timeout_s)
    except LinkError as error:
        message = f"the ranks did not come together within {timeout_s:g} s: {error}"
        raise CollectiveError(message, rank=transport.rank, operation="making a Communicator") from error
    if group is None:
        return Neighbours(transport)
    local = SharedMemoryTransport(group, transport.rank, transport.size)
    everyone = group.size == transport.size and "cuda" not in transport.backends
    return Neighbours(
        RoutingTransport(local, transport, group.members), group, SharedMemory(group) if everyone else None
    )


def _meet(watch: Watch, store: Store, deadline: float) -> None:
    """Until every rank has compiled: the backend's own collectives would not wait that long."""
    store.set(f"compiled/{watch.rank}", "")
    keys = [f"compiled/{rank}" for rank in range(watch.size)]
    while not store.check(keys):
        time.sleep(_LOOK_AGAIN_S)
        if lost := list(watch.lost):
            raise LinkError(min(lost), timed_out=False, detail=f"lost {ranks_text(lost)}")
        if time.monotonic() >= deadline:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise LinkError(None, timed_out=True, detail=f"{ranks_text(missing)} did not come", awaited=missing)
