"""The links, by name, and the connection of a Communicator's members: a Transport and a Channel."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.control.membership import Membership
from gradwire.collectives.environment import checksum_wanted, shared_memory_wanted
from gradwire.collectives.errors import by_value, ranks_text
from gradwire.collectives.parsing import check_name
from gradwire.collectives.schedules.topology import Topology
from gradwire.collectives.transports.base import Transport
from gradwire.collectives.transports.process_group import process_group
from gradwire.collectives.transports.routing import COMPILE_S, auto, offered
from gradwire.collectives.transports.shared_memory.group import Unshared
from gradwire.collectives.transports.tcp import tcp

#: Connects the members within timeout_s seconds. A collective call. Raises LinkError, OSError or RuntimeError if they do not
#: connect.
Link = Callable[[Membership, float], Transport]

#: The name of the default link.
AUTO = "auto"

LINKS: dict[str, Link] = {AUTO: auto, "process_group": process_group, "tcp": tcp}


def register_link(name: str, link: Link) -> None:
    """Add a link that later Communicators can use by name: Communicator(link=name) or COLLECTIVES_LINK.

    link: a function from a Membership and timeout_s to a Transport, which moves tensors between the ranks of the Membership.
    Every rank must register the same function, because ranks compare only the names.

    Raises ValueError for a name that is malformed or in use, TypeError for a link that cannot be called.
    """
    check_name("link", name, LINKS)
    if not callable(link):
        raise TypeError(
            f"link {name!r}: a function from a Membership and timeout_s to a Transport is needed, not {link!r}"
        )
    LINKS[name] = link


def check_link(name: object, environment: Mapping[str, str]) -> None:
    """Raise ValueError for an unknown link, and for an invalid environment variable of the link."""
    if not isinstance(name, str) or name not in LINKS:
        raise ValueError(f"no link is called {name!r}; known are {', '.join(LINKS)}")
    checksum_wanted(environment)
    if name == AUTO:
        shared_memory_wanted(environment)


@dataclass(frozen=True)
class Connection:
    """The Transport and the Channel between the members, and the hosts on which they are now."""

    transport: Transport
    channel: Channel
    topology: Topology

    def close(self) -> None:
        """Close the transport and the channel."""
        try:
            self.transport.close()
        finally:
            self.channel.close()


def connect(membership: Membership, link: str, settings: str, timeout_s: float) -> Connection:
    """Connect the members by the link of a name, in one exchange of cards and one commit. A collective call.

    membership: opened. settings: text that must be the same on all ranks. Raises ValueError on all ranks if it differs;
    LinkError, OSError or RuntimeError if the ranks do not connect within timeout_s seconds; TypeError for a link that returns no
    Transport; ValueError if its Transport is that of another rank, or prefers an algorithm that it does not offer.
    """
    while True:
        made = _connect(membership, link, settings, timeout_s)
        if isinstance(made, Connection):
            return made
        membership = made


def _connect(membership: Membership, link: str, settings: str, timeout_s: float) -> Connection | Membership:
    """Connect the members. Return what they try next if the cards show that they are on other hosts than when they met, or the
    commit that ranks cannot share memory with the other ranks of their host."""
    rank, size, channel = membership.rank, membership.size, membership.channel
    settings = settings if link == AUTO else f"link={link!r}, {settings}"
    card: dict[str, Any] = {"settings": settings, "host": membership.host}
    with ExitStack() as made, ExitStack() as offers:
        if link == AUTO:
            card |= offers.enter_context(offered(membership))
        cards = channel.exchange("cards", card, time.monotonic() + timeout_s, COMPILE_S)
        given = [each["settings"] for each in cards]
        if len(set(given)) > 1:
            raise ValueError(_difference(rank, given))
        topology = Topology(rank, membership.hosts)
        if membership.host:
            topology = Topology.from_host_ids(rank, [each["host"] for each in cards])
            if topology.hosts != membership.hosts:
                return replace(membership, hosts=topology.hosts, host="")
        problem = ""
        try:
            transport = LINKS[link](replace(membership, cards=tuple(cards)) if link == AUTO else membership, timeout_s)
            if not isinstance(transport, Transport):
                raise TypeError(f"rank {rank}: link {link!r} returned {transport!r}; a Transport is needed")
            made.callback(transport.close)
        except Unshared as error:
            problem = str(error)
        # No rank raises an error and leaves while others still connect.
        answers = channel.exchange("connected", problem, time.monotonic() + timeout_s)
        if problems := {member: why for member, why in enumerate(answers) if why}:
            return replace(membership, unshared={**membership.unshared, **problems})
        _check(transport, rank, size, link)
        made.pop_all()
    return Connection(transport, channel, topology)


def _check(transport: Transport, rank: int, size: int, link: str) -> None:
    """Raise ValueError for a Transport that is not that of this rank, or prefers an algorithm that it does not offer."""
    if (transport.rank, transport.size) != (rank, size):
        given = f"a Transport of rank {transport.rank} of {transport.size}"
        raise ValueError(f"rank {rank}: link {link!r} returned {given}; one of rank {rank} of {size} is needed")
    can = transport.capabilities
    for verb, name in (*can.preferred.items(), *can.preferred_on_gpu.items()):
        if name not in (known := can.algorithms.get(verb, ())):
            prefers = f"link {link!r} prefers {verb}'s {name!r}"
            raise ValueError(f"rank {rank}: {prefers}; it offers {', '.join(known)}")


def _difference(rank: int, settings: Sequence[str]) -> str:
    """Return the error text for settings, by rank, that differ."""
    by_text = by_value(dict(enumerate(settings)))
    given = "; ".join(f"{text} on {ranks_text(givers)}" for text, givers in by_text.items())
    return f"rank {rank}: a Communicator needs the same settings on all ranks; given are {given}"
