"""The address at which other ranks connect to this process, and a check whether they can reach it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from gradwire.collectives.control.addresses import address_text
from gradwire.collectives.control.asking import look_up
from gradwire.collectives.control.interfaces import addresses_of, interfaces_card, interfaces_here, link_local_of
from gradwire.collectives.control.ports import PortsTaken
from gradwire.collectives.environment import INTERFACE_VARIABLES, LOCAL_SIZE, listening_ports
from gradwire.collectives.errors import LinkError
from gradwire.collectives.schedules.topology import Machine

#: Addresses that no host has (RFC 5737 and RFC 3849). The kernel returns the source address for them, and sends
#: nothing.
_NOWHERE = ("192.0.2.1", "2001:db8::1")


def own_address(environment: Mapping[str, str], deadline: float, peer: str | None = None) -> str:
    """Return the numeric address, IPv4 or IPv6, at which the other ranks reach this process.

    It is the address of the interface that COLLECTIVES_INTERFACE names, else GLOO_SOCKET_IFNAME. Without these, it is
    the address from which this host reaches `peer`, else MASTER_ADDR; else that of the interface with the default
    route, else of the first other interface, else of the loopback interface.

    deadline: time.monotonic() seconds. peer: the host that serves the ranks' store, or another host of the job; None if
    none is known. Raises ValueError if a variable names an interface without an address; LinkError if the look-up of a
    host has not returned by the deadline.
    """
    for variable, interface in _named(environment):
        return _address_of(interface, variable)
    master = environment.get("MASTER_ADDR")
    for host in filter(None, dict.fromkeys((peer, master))):
        if (found := _source_towards(host, deadline)) is None:
            continue
        # A host may resolve its own name to a loopback address (Debian: 127.0.1.1), which no other host reaches.
        is_meant = host == master and (host in ("localhost", found) or host.startswith("127."))
        if is_meant or not ipaddress.ip_address(found).is_loopback:
            return found
    sources = (_source_towards(each, deadline) for each in _NOWHERE)
    others = (_first_address(name) for _, name in socket.if_nameindex())
    reachable = (each for each in (*sources, *others) if each and not ipaddress.ip_address(each).is_loopback)
    return next(reachable, "127.0.0.1")


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address; None if no interface of this host has it as its first one."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address in (*_plain(name), link_local_of(name))), None)


def card_of(
    rank: int, host: str, machine: str, environment: Mapping[str, str], deadline: float, peer: str | None = None
) -> dict[str, Any]:
    """Return this process's address, with the data that check_addresses needs, and its Machine.

    host: the same on all ranks of a host. machine: the same on all ranks of a machine, which may be several hosts.
    deadline, peer: see own_address. Raises LinkError as own_address.
    """
    card = {"rank": rank, "host": host, "machine": machine, "name": socket.gethostname(), "interfaces": _interfaces()}
    card |= {"hardware": asdict(Machine.here()), **interfaces_card(interfaces_here())}
    try:
        ports, address = listening_ports(environment), own_address(environment, deadline, peer)
        card |= {"ports": ports and [ports[0], ports[-1]], "local_size": environment.get(LOCAL_SIZE)}
        return card | {"address": address, "loopback": _loopback(address, environment), "problem": ""}
    except ValueError as error:
        return card | {"address": "", "loopback": "", "problem": str(error)}


def ports_of(card: Mapping[str, Any]) -> range | None:
    """Return the ports on which the rank of a card may listen; None if the system chooses them."""
    return range(card["ports"][0], card["ports"][1] + 1) if card.get("ports") else None


def why_not_listening(error: OSError, card: Mapping[str, Any]) -> str:
    """Return why the rank of a card cannot listen. error: of ports.listen_in()."""
    if not isinstance(error, PortsTaken):
        return str(error)
    local = card["local_size"]
    ranks = f"each of its {local} ranks" if local else f"each of its ranks (the job has {card['size']})"
    return f"{error.strerror}, which needs one for {ranks}, beside those of other jobs and of the launcher"


def check_addresses(cards: Sequence[Mapping[str, Any]]) -> None:
    """Raise LinkError with the ranks that have no address, or an address that other machines cannot reach."""
    several = len({card["machine"] for card in cards}) > 1
    problems = {}
    for card in cards:
        problem = card["problem"]
        if several and card["loopback"]:
            problem = f"{card['loopback']}, which other hosts do not reach; interfaces here are {card['interfaces']}"
        if problem:
            problems[card["rank"]] = f"rank {card['rank']} on host {card['name']}: {problem}"
    if problems:
        raise LinkError(None, timed_out=False, detail="; ".join(problems.values()), awaited=problems)


def _loopback(address: str, environment: Mapping[str, str]) -> str:
    """Return a text if only a loopback interface reaches this process, with the reason; else an empty text. Raises
    ValueError if a variable names an interface without an address."""
    named = _named(environment)
    for variable, interface in named:
        if ipaddress.ip_address(_address_of(interface, variable)).is_loopback:
            return f"{variable}={interface} names a loopback interface"
    return "" if named or not ipaddress.ip_address(address).is_loopback else "only a loopback interface has an address"


def _named(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each variable that names an interface, with the interface."""
    return [(name, environment[name].split(",")[0]) for name in INTERFACE_VARIABLES if environment.get(name)]


def _interfaces() -> str:
    """Return the interfaces of this host, with their addresses."""
    names = [name for _, name in socket.if_nameindex()]
    return ", ".join(f"{name} ({_first_address(name) or 'no address'})" for name in names)


def _plain(interface: str) -> list[str]:
    """Return the addresses of an interface without the lengths of their prefixes."""
    return [each.partition("/")[0] for each in addresses_of(interface)]


def _first_address(interface: str) -> str | None:
    return next(iter(_plain(interface)), None)


def _source_towards(host: str, deadline: float) -> str | None:
    """Return the address from which this host would send to another host; None if it cannot reach that host. Raises as
    own_address."""
    with suppress(OSError):
        numeric = look_up(host, deadline)[0]
        family, _, _, _, target = socket.getaddrinfo(numeric, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return address_text(probe.getsockname())
    return None


def _address_of(interface: str, variable: str) -> str:
    if (address := _first_address(interface) or link_local_of(interface)) is None:
        wrong = f"{variable}={interface!r} names no interface with an address"
        raise ValueError(f"{wrong}; interfaces here are {_interfaces()}")
    return address
