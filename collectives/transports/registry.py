"""The links, by name, and the connection of a Communicator's members: a Transport and a Watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradwire.collectives.control.handshake import give_up_on_silence
from gradwire.collectives.control.listener import Listener, neighbours
from gradwire.collectives.control.membership import Membership, coming_together
from gradwire.collectives.control.watch import Watch
from gradwire.collectives.environment import shared_memory_wanted
from gradwire.collectives.errors import CollectiveError, by_value, ranks_text
from gradwire.collectives.parsing import check_name
from gradwire.collectives.schedules.topology import Machine
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
    if name == AUTO:
        shared_memory_wanted(environment)


@dataclass(frozen=True)
class Connection:
    """The Transport and the Watch between the members. machines: the Machine of each member, by rank."""

    transport: Transport
    watch: Watch
    machines: tuple[Machine, ...]

    def close(self) -> None:
        """Close the transport and the watch."""
        try:
            self.transport.close()
        finally:
            self.watch.close()


def connect(membership: Membership, link: str, settings: str, timeout_s: float) -> Connection:
    """Connect the members by the link of a name, in one exchange of cards and one commit. A collective call.

    settings: text that must be the same on all ranks. Raises ValueError on all ranks if it differs; CollectiveError if
    the ranks do not connect within timeout_s seconds, or a rank cannot listen; TypeError for a link that returns no
    Transport; ValueError if its Transport is that of another rank, or prefers an algorithm that it does not offer.
    """
    with coming_together(membership.rank, timeout_s, membership):
        unshared: dict[int, str] = {}
        while True:
            connection, problems = _connect(replace(membership, unshared=unshared), link, settings, timeout_s)
            if connection is not None:
                return connection
            unshared |= problems  # these ranks share no memory; all ranks connect again


def _connect(
    membership: Membership, link: str, settings: str, timeout_s: float
) -> tuple[Connection | None, dict[int, str]]:
    """Connect the members. Return None if ranks cannot share memory with the other ranks of their host, and why, by rank."""
    rank, size, tries = membership.rank, membership.size, f"{len(membership.unshared)}"
    cards_of, connected = f"cards {tries}", f"connected {tries}"
    settings = settings if link == AUTO else f"link={link!r}, {settings}"
    card: dict[str, Any] = {"settings": settings, "refusal": "", "machine": asdict(Machine.here())}
    with ExitStack() as made, ExitStack() as offers:
        try:
            news, data = Listener(membership.address, small_segments=True), Listener(membership.address)
            offers.callback(news.close)
            offers.callback(data.close)
            card |= {"news": news.card, "data": data.card}
        except OSError as error:  # reported, because the others would otherwise wait for this rank
            card["refusal"] = str(error)
        if link == AUTO:
            card |= offers.enter_context(offered(membership, cards_of, timeout_s))
        deadline = time.monotonic() + timeout_s
        cards = membership.exchange(cards_of, card, deadline, COMPILE_S)
        given = [each["settings"] for each in cards]
        if len(set(given)) > 1:
            raise ValueError(_difference(rank, given))
        if refusals := {r: f"rank {r}: {each['refusal']}" for r, each in enumerate(cards) if each["refusal"]}:
            message = f"cannot listen for the other ranks: {'; '.join(refusals.values())}"
            raise CollectiveError(message, rank=rank, operation="making a Communicator", ranks=refusals)
        addresses = [each["news"] for each in cards]
        connections = news.join(rank, neighbours(rank, size), addresses, membership.secret, deadline, membership.check)
        for connection in connections.values():
            give_up_on_silence(connection)
        watch = Watch(rank, size, connections)
        made.callback(watch.close)
        if membership.noted is not None:
            watch.look_at(membership.noted)
        # Ranks that leave because another rank is lost are not lost themselves.
        watched = replace(membership, lost=lambda: watch.lost or membership.lost())
        ready: dict[str, str] = {}
        try:
            try:
                has_cards = link in (AUTO, "tcp")
                offering = replace(watched, cards=tuple(cards), listener=data) if has_cards else watched
                transport = LINKS[link](offering, timeout_s)
                if not isinstance(transport, Transport):
                    raise TypeError(f"rank {rank}: link {link!r} returned {transport!r}; a Transport is needed")
                made.callback(transport.close)
            except Unshared as error:
                ready["why"] = str(error)
            # No rank raises an error and leaves while others still connect.
            answers = watched.exchange(connected, ready, time.monotonic() + timeout_s)
            if problems := {r: answer["why"] for r, answer in enumerate(answers) if answer}:
                watch.report_leaving(0)
                return None, problems
            _check(transport, rank, size, link)
        except BaseException:
            watch.report_leaving(0)  # otherwise connected ranks would count this rank as lost
            raise
        made.pop_all()
    return Connection(transport, watch, tuple(Machine(**each["machine"]) for each in cards)), {}


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
