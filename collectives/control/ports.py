"""The ports on which a process listens: any that is free, or only those that COLLECTIVES_PORTS names, as a firewall may open."""

from __future__ import annotations

import errno
import secrets
import socket
import time

from gradwire.collectives.control.addresses import socket_address
from gradwire.collectives.environment import PORTS

#: How long listen_in() waits for a port that is about to be released, such as that of an earlier Monitor of this process.
_RELEASED_S, _POLL_S = 3.0, 0.05


class PortsTaken(OSError):
    """No port of COLLECTIVES_PORTS is free."""

    @staticmethod
    def of(ports: range) -> PortsTaken:
        """Return the error for a range of ports."""
        count = f"all {len(ports)} ports are" if len(ports) > 1 else "this port is"
        return PortsTaken(errno.EADDRINUSE, f"{PORTS}={ports[0]}-{ports[-1]}: {count} taken on this host")


def listen_in(address: str, ports: range | None, backlog: int = socket.SOMAXCONN) -> socket.socket:
    """Return a socket that listens on a free port. All listening sockets of gradwire are made here.

    address: numeric, IPv4 or IPv6; empty for all addresses of this host. ports: those to choose from; None for any. The search
    begins at a random one, so a new socket rarely gets a port to which a process of an earlier job still connects. Raises
    PortsTaken if no port is free within three seconds, and OSError if this process cannot listen.
    """
    if ports is None:
        return _bound(address, 0, backlog)
    until = time.monotonic() + _RELEASED_S
    while True:
        start = secrets.randbelow(len(ports))
        for port in (*ports[start:], *ports[:start]):
            try:
                return _bound(address, port, backlog)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        if time.monotonic() >= until:
            raise PortsTaken.of(ports)
        time.sleep(_POLL_S)


def listen_on(address: str, port: int) -> socket.socket:
    """Return a socket that listens on a port that the user has named. address: see listen_in(). Raises OSError if it cannot."""
    return _bound(address, port, socket.SOMAXCONN)


def _bound(address: str, port: int, backlog: int) -> socket.socket:
    if address:
        family, place = socket_address(address, port)
        return socket.create_server(place, family=family, backlog=backlog)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)
