"""Whether large packets pass between hosts that small ones pass between.

Where hosts send larger packets than something between them forwards, and the ICMP messages that say so are lost, connections
are made, short messages arrive, and the first long one never does (RFC 2923, 2000, section 2.1). So each connection carries a
probe of more than a packet while ranks still meet, and says which pair of hosts it is.
"""

from __future__ import annotations

import errno
import fcntl
import select
import socket
import sys
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gradwire.collectives.errors import LinkError

#: More than the largest packet on Ethernet, jumbo frames of 9,216 bytes among them.
PROBE_BYTES = 16 << 10
_ARRIVED = b"\x01"

REMEDY = "give the interfaces of both hosts the MTU of what lies between them (ip link set ... mtu 1500), or let ICMP through"

#: How long a system may repeat what the other end's system does not confirm. Linux repeats it four times in that time.
_REPEATS_S = 3.0

#: How often the wait looks at what is not confirmed, and whether there is any use in waiting.
_LOOK_S = 0.03

#: Segments so small that they pass where IP does (RFC 8200, 2017: links of 1,280 bytes).
_SMALL_SEGMENT_BYTES = 1024


def send_small_segments(connection: socket.socket) -> None:
    """Have a connection, or those that a listening socket accepts, use packets that pass wherever any do, so that ranks
    can still tell each other that large ones do not."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_SEGMENT_BYTES)


class LargePacketsLost(LinkError):
    """Small packets arrive at the other end of a connection, and large ones do not."""


@dataclass
class _Path:
    """What is still to be sent to a rank and received from it. left: bytes not confirmed; since: when these last became fewer."""

    connection: socket.socket
    since: float
    unsent: bytes = bytes(PROBE_BYTES)
    unread: int = PROBE_BYTES + len(_ARRIVED)
    left: int = PROBE_BYTES + len(_ARRIVED)


def check_paths(
    rank: int, connections: Mapping[int, socket.socket], deadline: float, check: Callable[[], None]
) -> None:
    """Exchange a probe with the ranks at the other ends of new nonblocking connections, all at the same time.

    check: raises LinkError where there is no use in waiting. Raises LargePacketsLost, which names both ranks; LinkError for a
    connection that ends, and for a rank that does not answer before the deadline.
    """
    paths = {peer: _Path(connection, time.monotonic()) for peer, connection in connections.items()}
    while waiting := {peer: path for peer, path in paths.items() if path.unread or path.unsent}:
        poll = select.poll()
        for path in waiting.values():
            poll.register(path.connection, select.POLLIN | (select.POLLOUT if path.unsent else 0))
        ready = dict(poll.poll(1000 * _LOOK_S))
        now = time.monotonic()
        for peer, path in waiting.items():
            try:
                if path.connection.fileno() in ready:
                    _move(path)
                left = len(path.unsent) + unconfirmed_bytes(path.connection)
            except OSError as error:
                raise LinkError(peer, timed_out=False, detail=f"rank {peer}: {error}") from error
            if left < path.left or left == 0:
                path.left, path.since = left, now
            if now - path.since >= _REPEATS_S:
                here, there = path.connection.getsockname()[0], path.connection.getpeername()[0]
                between = f"between rank {rank} at {here} and rank {peer} at {there}"
                detail = f"large packets are lost {between}, but small ones arrive: {REMEDY}"
                raise LargePacketsLost(peer, timed_out=False, detail=detail, awaited={rank, peer})
        check()
        if now >= deadline:
            detail = "the paths between hosts were not tested in time"
            raise LinkError(min(waiting), timed_out=True, detail=detail, awaited=waiting)


def _move(path: _Path) -> None:
    """Send and receive what can be at once; confirm the probe when it is all there. Raises OSError."""
    try:
        if path.unsent:
            path.unsent = path.unsent[path.connection.send(path.unsent) :]
        while path.unread:
            # Not a byte more: what follows belongs to whoever gets the connection.
            if not (piece := path.connection.recv(path.unread)):
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            whole_before = path.unread <= len(_ARRIVED)
            path.unread -= len(piece)
            if path.unread <= len(_ARRIVED) and not whole_before:
                path.unsent += _ARRIVED
    except BlockingIOError:
        pass


def unconfirmed_bytes(connection: socket.socket) -> int:
    """Return how many bytes the system at the other end has not confirmed; 0 where this system does not say. Raises OSError."""
    try:
        return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return 0
