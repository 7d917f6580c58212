"""The link that is used unless told otherwise: for CPU tensors shared memory inside hosts and TCP between them, for all else the
process group."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from gradwire.collectives.environment import SHARED_MEMORY, shared_memory_wanted
from gradwire.collectives.errors import ranks_text
from gradwire.collectives.kernels import cpu_kernels, cpu_sockets
from gradwire.collectives.kernels.first_use import FIRST_USE
from gradwire.collectives.link.base import Transport
from gradwire.collectives.link.membership import Membership
from gradwire.collectives.link.process_group import process_group
from gradwire.collectives.link.routing import RoutingTransport
from gradwire.collectives.link.shared_memory.group import LocalGroup
from gradwire.collectives.link.shared_memory.messages import SharedMemoryTransport
from gradwire.collectives.link.shared_memory.reductions import SharedMemory
from gradwire.collectives.link.shared_memory.rendezvous import join_host
from gradwire.collectives.link.tcp import tcp

#: What all processes of a machine may take to compile the kernels or load them, one after the other.
_ALL_COMPILE_S = 120.0
_log = logging.getLogger("gradwire")


def auto(membership: Membership, timeout_s: float) -> Transport:
    """Connect the members: by the process group, and for CPU tensors by shared memory between ranks that share a host, unless one
    of them refuses, and by TCP between all others. timeout_s: compiling not counted."""
    with ExitStack() as made:
        group = made.enter_context(closing(process_group(membership, timeout_s)))
        transport: Transport = group
        if "cpu" in membership.device_types and membership.size > 1:
            offers = _offers(membership, timeout_s)
            local = _memory(membership, offers, timeout_s)
            near = made.enter_context(closing(_transport(membership, local))) if local is not None else None
            far: Transport = group
            neighbours = local.members if local is not None else ()
            if len(neighbours) < membership.size and _connects(membership, offers):
                far = made.enter_context(closing(tcp(membership, timeout_s, but=neighbours)))
            if near is not None or far is not group:
                shared = _shares(membership, offers)
                transport = RoutingTransport(group, far, near, neighbours, some_share=shared)
        made.pop_all()
    return transport


def _offers(membership: Membership, timeout_s: float) -> list[dict[str, Any]]:
    """Return by rank whether it is to share memory, and why it cannot drive connections of its own, if so.

    Every rank has compiled when all have answered: the backend's own collectives would not wait that long.
    """
    memory = shared_memory_wanted(os.environ)
    with FIRST_USE.together("about 20 s"):
        if memory and any(len(host) > 1 for host in membership.hosts):
            cpu_kernels()
        sockets = cpu_sockets()
    offer = {"memory": memory, "sockets": sockets if isinstance(sockets, str) else None}
    answers = membership.everyones("offers", json.dumps(offer).encode(), time.monotonic() + timeout_s + _ALL_COMPILE_S)
    return [json.loads(answer) for answer in answers]


def _shares(membership: Membership, offers: Sequence[dict[str, Any]]) -> bool:
    """Return whether any ranks may share memory, which all ranks know alike."""
    return any(len(host) > 1 for host in membership.hosts) and all(offer["memory"] for offer in offers)


def _memory(membership: Membership, offers: Sequence[dict[str, Any]], timeout_s: float) -> LocalGroup | None:
    """Return this rank's group of those that share memory, if there is one."""
    if all(len(host) == 1 for host in membership.hosts):
        return None
    refusing = [rank for rank, offer in enumerate(offers) if not offer["memory"]]
    if refusing:
        if len(refusing) < membership.size and membership.rank == 0:
            _log.warning("gradwire: no shared memory: %s=0 on %s", SHARED_MEMORY, ranks_text(refusing))
        return None
    return join_host(membership, cpu_kernels(), time.monotonic() + timeout_s)


def _transport(membership: Membership, local: LocalGroup) -> SharedMemoryTransport:
    everyone = local.size == membership.size and "cuda" not in membership.device_types
    reductions = SharedMemory(local) if everyone else None
    return SharedMemoryTransport(local, membership.rank, membership.size, reductions=reductions)


def _connects(membership: Membership, offers: Sequence[dict[str, Any]]) -> bool:
    """Return whether all ranks can drive connections of their own; gloo's are used where one cannot."""
    refusing = {rank: offer["sockets"] for rank, offer in enumerate(offers) if offer["sockets"]}
    if refusing and membership.rank == 0:
        rank, why = next(iter(refusing.items()))
        _log.warning("gradwire: ranks talk through gloo, not through connections of their own: rank %d: %s", rank, why)
    return not refusing
