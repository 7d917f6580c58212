"""Which address of this host the other ranks can reach."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from collectives.environment import INTERFACE_VARIABLES

#: Asks the kernel for the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915 if sys.platform == "linux" else 0xC0206921

#: Addresses that no host has (RFC 5737 and RFC 3849): the kernel says from where it would send to them, and nothing is sent.
_NOWHERE = ("192.0.2.1", "2001:db8::1")


def own_address(environment: Mapping[str, str]) -> str:
    """Return the numeric address, IPv4 or IPv6, at which the other ranks reach this process.

    It is that of the interface that COLLECTIVES_INTERFACE names, else GLOO_SOCKET_IFNAME, else of the one that reaches
    MASTER_ADDR, else of the one that has the default route, else the loopback's. Raises ValueError for an interface
    that has no address.
    """
    for variable in INTERFACE_VARIABLES:
        if name := environment.get(variable):
            return _address_of(name.split(",")[0], variable)
    master = environment.get("MASTER_ADDR")
    if master is not None:
        found = _source_towards(master)
        if found is not None and not ipaddress.ip_address(found).is_loopback:
            return found
        if found is not None and (master == "localhost" or master == found or master.startswith("127.")):
            return found
    # A host may resolve its own name to the loopback (Debian's 127.0.1.1), where no other host finds it.
    return next(filter(None, map(_source_towards, _NOWHERE)), "127.0.0.1")


def _source_towards(host: str) -> str | None:
    """Return the address from which this host would send to another one; None where it cannot."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return None


def _address_of(interface: str, variable: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass
    if (address := _ipv6_of(interface)) is not None:
        return address
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise ValueError(f"{variable}={interface!r} names no interface with an address; interfaces here are {known}")


def _ipv6_of(interface: str) -> str | None:
    """Return the first address of an interface that is valid beyond its own link."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    for digits, _, _, _, _, name in map(str.split, lines):
        address = ipaddress.IPv6Address(int(digits, 16))
        if name == interface and not address.is_link_local:
            return str(address)
    return None
