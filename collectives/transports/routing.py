"""The default link: shared memory for CPU tensors inside a host, TCP or the process group for CPU tensors between
hosts, and the process group for CUDA tensors and the algorithm 'native'."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradwire.collectives.control.membership import Membership
from gradwire.collectives.environment import SHARED_MEMORY, shared_memory_wanted
from gradwire.collectives.errors import LinkError, ranks_text
from gradwire.collectives.kernels import compiles_links, cpu_kernels, cpu_sockets
from gradwire.collectives.transports.base import GroupRun, Message, Operation, Pending, Posted, Run, Transport
from gradwire.collectives.transports.compiled import CompiledLoop
from gradwire.collectives.transports.process_group import ProcessGroupTransport
from gradwire.collectives.transports.requests import FromAny, Table, Unfinished
from gradwire.collectives.transports.shared_memory.group import join_host, offer_host, sharing
from gradwire.collectives.transports.shared_memory.transport import SharedMemory, SharedMemoryTransport
from gradwire.collectives.transports.tcp import TcpTransport, tcp

#: How long all processes of a machine may take to compile the kernels or load them, one after the other.
COMPILE_S = 120.0

#: Seconds between two checks whether a message through one part is done, while sends through the other part are moved.
_POLL_S = 0.0001

#: How long receives through one part may make no progress while this rank waits for the other part.
_SLICE_S = 0.05

#: How long next_sender() polls the link between hosts before it polls shared memory again.
_FAR_SLICE_S = 0.001

_log = logging.getLogger("gradwire")


def auto(membership: Membership, timeout_s: float) -> Transport:
    """Connect the members, whose cards are those of offered(). CPU tensors go through shared memory inside a host, unless any
    rank refuses it, and over TCP between all other ranks, unless any rank lacks the kernels for TCP. All other messages go
    through the process group. timeout_s: without the time to compile kernels. Raises LinkError, OSError or RuntimeError if this
    fails; Unshared if this rank alone cannot share memory."""
    rank, size, cards = membership.rank, membership.size, membership.cards
    with ExitStack() as made:
        group = ProcessGroupTransport(membership, timeout_s)
        made.callback(group.close)
        transport: Transport = group
        if "cpu" in membership.device_types and size > 1:
            hosts_are_shared = any(len(host) > 1 for host in membership.hosts)
            refusing = [each for each, card in enumerate(cards) if not card["memory"]]
            if hosts_are_shared and rank == 0 and 0 < len(refusing) < size:
                _log.warning("gradwire: no shared memory: %s=0 on %s", SHARED_MEMORY, ranks_text(refusing))
            neighbours = () if refusing else sharing(membership)
            far: Transport = group
            without = {each: card["sockets"] for each, card in enumerate(cards) if card["sockets"]}
            if len(neighbours) < size:
                if not without:
                    far = made.enter_context(closing(tcp(membership, timeout_s, but=neighbours)))
                else:
                    group.connect(time.monotonic() + timeout_s)
                if without and rank == 0:
                    message = "gradwire: ranks use gloo instead of gradwire's TCP connections: rank %d: %s"
                    _log.warning(message, *min(without.items()))
            near: SharedMemoryTransport | None = None
            kernels = cpu_kernels() if neighbours else ""
            if not isinstance(kernels, str):
                # Last: a rank that cannot share memory has connected.
                local = join_host(membership, neighbours, kernels)
                reduces = local.size == size and "cuda" not in membership.device_types
                near = SharedMemoryTransport(local, rank, size, SharedMemory(local) if reduces else None)
                made.enter_context(closing(near))
            compiled: CompiledLoop | None = None
            if not without:
                connections = far if isinstance(far, Table) else TcpTransport(rank, size, {}, len(neighbours))
                compiled = CompiledLoop(connections, near, neighbours)
            if near is not None or far is not group:
                transport = RoutingTransport(group, far, near, neighbours, compiled)
        made.pop_all()
    return transport


@contextmanager
def offered(membership: Membership) -> Iterator[dict[str, Any]]:
    """Yield this rank's card for auto(), which all ranks call inside: whether it accepts shared memory, why it has no kernels
    for TCP (None if it has them), and what offer_host() yields.

    Once the cards are exchanged, every rank has compiled its kernels. (During a collective of the backend, compiling would
    exceed the timeout.) A rank that neither arrives nor compiles is awaited for timeout_s only.
    """
    if "cpu" not in membership.device_types or membership.size == 1:
        yield {}
        return
    memory = shared_memory_wanted(os.environ)
    hosts_are_shared = any(len(host) > 1 for host in membership.hosts)
    if compiles_links():
        membership.channel.compiles()
    kernels = cpu_kernels() if memory and hosts_are_shared else "shared memory is not used"
    sockets = cpu_sockets()
    card = {"memory": memory, "sockets": sockets if isinstance(sockets, str) else None}
    with offer_host(membership, kernels) as host:
        yield card | host


@dataclass(eq=False, slots=True)
class _SharedPending:
    """A message through one part of a RoutingTransport. Waiting for it also moves the messages of the other part.

    Only calls by this rank move them, and the peer may need one of them before it answers. It is usually a send, so
    sends are moved all the time, and receives once in _SLICE_S seconds.
    """

    pending: Pending
    part: Transport
    other: Table

    def wait(self, deadline: float) -> None:
        while (unfinished := self.other.progress()) and time.monotonic() < deadline:
            if unfinished is Unfinished.SENDS:
                if self.pending.is_done():
                    break
                time.sleep(_POLL_S)
            elif self.part.capabilities.waits_again:
                try:
                    self.pending.wait(min(deadline, time.monotonic() + _SLICE_S))
                    return
                except LinkError as error:
                    if not error.timed_out:
                        raise
            else:
                break
        self.pending.wait(deadline)

    def is_done(self) -> bool:
        self.other.progress()
        return self.pending.is_done()


class RoutingTransport(Transport):
    """Routes each message to one of several Transports. group: for CUDA tensors if it carries them, and for algorithm
    'native'. near: for CPU tensors between `neighbours`, this rank and those that share memory with it; None if no rank
    does. far: for all other messages; it may be `group`. compiled: runs programs with messages through `near`, if it can."""

    def __init__(
        self,
        group: ProcessGroupTransport,
        far: Transport,
        near: SharedMemoryTransport | None,
        neighbours: Sequence[int],
        compiled: CompiledLoop | None = None,
    ) -> None:
        self.rank, self.size = group.rank, group.size
        is_one_host = len(neighbours) == group.size
        own, between = group.capabilities, far.capabilities
        self.capabilities = replace(
            own,
            quick=between.quick,
            eager=between.eager,
            interruptible=between.interruptible or is_one_host,
            receives_from_any=between.receives_from_any or is_one_host,
        )
        if near is not None:
            inside = near.capabilities
            verbs = {**inside.algorithms, **own.algorithms}
            self.capabilities = replace(
                self.capabilities,
                shares_memory=True,
                preferred=inside.preferred,
                share_alignment_bytes=inside.share_alignment_bytes,
                algorithms={verb: (*inside.algorithms.get(verb, ()), *own.algorithms.get(verb, ())) for verb in verbs},
            )
        self.routes = _routes(group, far, set(neighbours) - {group.rank})
        self._group = group
        self._far = far
        self._near = near
        parts = (near, far, group, *(compiled.links if compiled is not None else ()))
        self._parts: list[Transport] = [part for part in dict.fromkeys(parts) if part is not None]
        self._neighbours = frozenset(neighbours)
        self._compiled = compiled
        self._last_sender_is_near = False

    def prepare(self, operation: Operation) -> Run:
        near = self._near
        if operation.program is not None:
            run = None if self._compiled is None else self._compiled.prepare(operation, self)
            return run or super().prepare(operation)
        if near is not None:
            inside = near.capabilities  # the halves of an allreduce are not among its verbs
            if operation.algorithm in inside.algorithms.get(operation.verb, inside.share_alignment_bytes):
                return near.prepare(operation)
        return self._group.native(operation, meets_over=self)

    def prepare_group(self, operation: Operation) -> GroupRun | None:
        return self._group.prepare_group(operation)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        """See Transport. All messages of a call are on the same kind of device."""
        if not sends and not receives:
            return [], []
        if (receives or sends)[0][1].is_cuda:
            return self._group.post(sends, receives, tag)
        near, far = self._near, self._far
        if near is None:
            return far.post(sends, receives, tag)
        if any(peer is None for peer, _ in receives):
            return [], [FromAny(self, tensor, tag) for _, tensor in receives]
        sent: dict[bool, Iterator[Pending]] = {}
        received: dict[bool, Iterator[Pending]] = {}
        for part, is_near in ((far, False), (near, True)):
            outgoing, incoming = (
                [message for message in messages if (message[0] in self._neighbours) is is_near]
                for messages in (sends, receives)
            )
            for made, pendings in zip((sent, received), part.post(outgoing, incoming, tag), strict=True):
                other = far if is_near else near
                shared = (
                    pendings if not isinstance(other, Table) else [_SharedPending(p, part, other) for p in pendings]
                )
                made[is_near] = iter(shared)
        return (
            [next(sent[peer in self._neighbours]) for peer, _ in sends],
            [next(received[peer in self._neighbours]) for peer, _ in receives],
        )

    def next_sender(self, tag: int, deadline: float) -> int | None:
        """See requests.Listening."""
        near, far = self._near, self._far
        assert near is not None
        if len(self._neighbours) == self.size:
            return near.next_sender(tag, deadline)
        assert isinstance(far, Table)
        while True:
            now = time.monotonic()
            looks: list[tuple[Table, float]] = [(near, now), (far, min(deadline, now + _FAR_SLICE_S))]
            for part, until in reversed(looks) if self._last_sender_is_near else looks:
                if (sender := part.next_sender(tag, until)) is not None:
                    self._last_sender_is_near = part is near
                    return sender
            if now >= deadline:
                return None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return (self._near or self._far).empty(shape, dtype)

    def lossy_paths(self) -> Mapping[int, str]:
        return self._far.lossy_paths()

    def trouble(self) -> str | None:
        return self._group.trouble()

    def abort(self) -> None:
        _call_all([part.abort for part in self._parts])

    def close(self) -> None:
        _call_all([part.close for part in self._parts])


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    """Call all functions in order, also if some raise an error; then raise the last error."""
    with ExitStack() as stack:
        for call in reversed(calls):
            stack.callback(call)


def _routes(group: Transport, far: Transport, neighbours: set[int]) -> tuple[str, ...]:
    """Return the lines of Transport.routes."""
    others = set(range(group.size)) - neighbours - {group.rank}
    lines = [f"{ranks_text(neighbours)}: shared memory, on the same host"] if neighbours else []
    if others:
        (how,) = {line.partition(": ")[2] for line in far.routes if "CUDA" not in line}
        lines.append(f"{ranks_text(others)}: {how}")
    return (*lines, *(line for line in group.routes if "CUDA" in line))
