"""A port for a program that must be given one."""

from __future__ import annotations

import random
import socket

#: Below those that Linux gives to connections (net.ipv4.ip_local_port_range), one of which could take a port before the program
#: listens on it; and not those that gradwire derives (trainer/world/launch.py).
PORTS = range(5000, 15000)


def unused_port() -> int:
    """Return a port on which nothing of this host listens. Raises OSError if it finds none."""
    for _ in range(100):
        with socket.socket() as program:
            try:
                program.bind(("", port := random.SystemRandom().choice(PORTS)))
            except OSError:
                continue
            return port
    raise OSError(f"100 ports of {PORTS} are all in use")
