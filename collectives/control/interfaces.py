"""The network interfaces of hosts: what each is rated at, and whether a faster one than that in use reaches all other hosts.

Subnets decide what reaches what. No traffic is sent to find out.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

_log = logging.getLogger("gradwire")

#: The kernel's files about interfaces.
_INTERFACES = Path("/sys/class/net")

#: Asks the kernel for the IPv4 address, and for the netmask, of an interface.
_SIOCGIFADDR = 0x8915 if sys.platform == "linux" else 0xC0206921
_SIOCGIFNETMASK = 0x891B if sys.platform == "linux" else 0xC0206925


@dataclass(frozen=True)
class Interface:
    """Describes one interface of a host. addresses: of IPv4 and IPv6, each with the length of its prefix, such as 10.0.0.7/24.
    rated_mbit: megabits per second; None if unknown."""

    name: str
    addresses: tuple[str, ...]
    rated_mbit: int | None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the addresses without the lengths of their prefixes."""
        return tuple(each.partition("/")[0] for each in self.addresses)

    @property
    def rating(self) -> str:
        """Return the name with the rate, as text."""
        return f"{self.name} ({'rate unknown' if self.rated_mbit is None else f'rated {rate_text(self.rated_mbit)}'})"

    def reaches(self, address: str) -> bool:
        """Return whether another host's address is in a subnet of this interface. Bridges of containers often have the same
        address on every host: they join no hosts."""
        other = ipaddress.ip_address(address)
        return address not in self.hosts and any(other in ipaddress.ip_interface(own).network for own in self.addresses)


def rate_text(mbit: float) -> str:
    """Return a rate as networks are sold."""
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def interfaces_here(folder: Path = _INTERFACES) -> list[Interface]:
    """Return the interfaces of this host that have an address which other hosts may reach. folder: see rated_mbit()."""
    found = ((name, addresses_of(name)) for _, name in socket.if_nameindex())
    return [
        Interface(name, addresses, rated_mbit(name, folder))
        for name, addresses in found
        if addresses and not ipaddress.ip_interface(addresses[0]).is_loopback
    ]


def rated_mbit(name: str, folder: Path = _INTERFACES) -> int | None:
    """Return what an interface is rated at in megabits per second; None if its driver does not say, as for Wi-Fi. folder: the
    kernel's files about interfaces."""
    with suppress(OSError, ValueError):  # reading the speed of an interface that is down raises EINVAL
        rate = int((folder / name / "speed").read_text())
        return rate if rate > 0 else None
    return None


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the first address of an interface of IPv4, and the first of IPv6 that is valid beyond the interface's own link, each
    with the length of its prefix, as far as there are any."""
    return tuple(filter(None, (_ipv4_of(name), _ipv6_of(name))))


def _ipv4_of(name: str) -> str | None:
    asked = struct.pack("256s", os.fsencode(name)[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answers = (fcntl.ioctl(probe.fileno(), request, asked) for request in (_SIOCGIFADDR, _SIOCGIFNETMASK))
        address, mask = (socket.inet_ntoa(answer[20:24]) for answer in answers)
        return ipaddress.IPv4Interface(f"{address}/{mask}").with_prefixlen
    return None


def _ipv6_of(name: str) -> str | None:
    return next((each.with_prefixlen for each in _all_ipv6_of(name) if not each.is_link_local), None)


def link_local_of(name: str) -> str | None:
    """Return the address of IPv6 that an interface has on its own link, with the name as its scope; None without one."""
    return next((f"{each.ip}%{name}" for each in _all_ipv6_of(name) if each.is_link_local), None)


def _all_ipv6_of(name: str) -> Iterator[ipaddress.IPv6Interface]:
    with suppress(OSError):
        for digits, _, length, *_, interface in map(str.split, Path("/proc/net/if_inet6").read_text().splitlines()):
            if interface == name:
                yield ipaddress.IPv6Interface((int(digits, 16), int(length, 16)))


def interfaces_card(here: Sequence[Interface]) -> dict[str, Any]:
    """Return what other ranks get to know of this host's interfaces: nothing if it has no choice between them."""
    return {"choice": [astuple(each) for each in here]} if len(here) > 1 else {}


def interfaces_of(card: Mapping[str, Any]) -> list[Interface]:
    """Return the interfaces in a rank's card; none of a host without a choice."""
    return [Interface(name, tuple(addresses), rate) for name, addresses, rate in card.get("choice", ())]


def in_use(card: Mapping[str, Any]) -> Interface | None:
    """Return the interface of a rank's address; None if the card does not contain it."""
    return next((each for each in interfaces_of(card) if card["address"] in each.hosts), None)


def faster_interfaces(cards: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Interface, Interface]]:
    """Yield the name of each host whose ranks use an interface that is rated lower than another one which reaches all other
    hosts, with the one in use and the fastest other one. cards: of all ranks, see own_address.card_of."""
    seen = set()
    for card in cards:
        used = in_use(card)
        if used is None or used.rated_mbit is None or (card["host"], used) in seen:
            continue
        seen.add((card["host"], used))
        others = {other["host"]: _reachable_at(other) for other in cards if other["host"] != card["host"]}
        faster = [
            each
            for each in interfaces_of(card)
            if (each.rated_mbit or 0) > used.rated_mbit
            and all(any(map(each.reaches, addresses)) for addresses in others.values())
        ]
        if others and faster:
            yield card["name"], used, max(faster, key=lambda each: each.rated_mbit or 0)


def _reachable_at(card: Mapping[str, Any]) -> set[str]:
    """Return the addresses of the host of a rank, as far as its card contains them."""
    return {card["address"]}.union(*(each.hosts for each in interfaces_of(card)))


def warn_of_slow_interfaces(cards: Sequence[Mapping[str, Any]]) -> None:
    """Log which hosts have a faster interface than the one in use, and the variables to set. Called by rank 0."""
    alike: dict[tuple[Interface | str, ...], list[str]] = {}
    for host, used, faster in faster_interfaces(cards):
        alike.setdefault((used.rating, faster.rating, faster.name), []).append(host)
    for (used_text, faster_text, name), hosts in alike.items():
        there = "there" if len(hosts) > 1 else f"on {hosts[0]}"
        _warn(
            f"host{'s' * (len(hosts) > 1)} {', '.join(hosts)}: ranks use interface {used_text}, but {faster_text} also reaches "
            f"all other hosts: set COLLECTIVES_INTERFACE={name} {there}, and GLOO_SOCKET_IFNAME={name} for gloo; "
            "`gradwire check --hosts` measures both"
        )


@cache  # an elastic job meets often
def _warn(text: str) -> None:
    _log.warning("gradwire: %s", text)
