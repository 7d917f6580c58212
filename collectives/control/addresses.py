"""Numeric addresses as text, IPv4 and IPv6.

A link-local address of IPv6 has a *scope*: the interface to the link on which the address is valid, as in fe80::1%eth0. Each host
has its own names for its interfaces."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any


def socket_address(address: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Return the family of a numeric address, and what sockets take for it. Raises OSError if its scope is unknown here."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, _, _, _, place = found[0]
    return family, place


def address_text(place: tuple[Any, ...]) -> str:
    """Return the numeric address in what sockets return for an address with a port. Raises OSError if its interface is gone."""
    host, scope = str(place[0]), place[3] if len(place) > 3 else 0
    return f"{host}%{socket.if_indextoname(scope)}" if scope and "%" not in host else host


def without_scope(address: str) -> str:
    """Return an address without its scope."""
    return address.partition("%")[0]


def is_link_local(address: str) -> bool:
    """Return whether an address is one of IPv6 that needs a scope."""
    return ":" in address and ipaddress.ip_address(address).is_link_local


def seen_from(own: str, address: str) -> str:
    """Return another host's address as this host writes it: the scope of a link-local address is that of this host's own one."""
    scope = own.partition("%")[2]
    return f"{without_scope(address)}%{scope}" if scope and is_link_local(address) else address
