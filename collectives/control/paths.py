"""Checks that paths between hosts forward large packets, and not only small ones.

If hosts send larger packets than a router between them forwards, and the router's ICMP messages are lost, then connections
succeed and short messages arrive, but the first long one never does (RFC 2923, 2000, section 2.1). So ranks send a probe longer
than a packet over each new connection, and the error names the pair of hosts. A path may also begin to lose large packets later:
after a deadline has passed, ranks look for connections on which the other host no longer acknowledges what they send.
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
from contextlib import suppress
from dataclasses import dataclass

from gradwire.collectives.control.addresses import address_text
from gradwire.collectives.control.asking import POLL_S
from gradwire.collectives.control.records import Connection
from gradwire.collectives.errors import LinkError

#: More than the largest packet on Ethernet, including jumbo frames of 9,216 bytes.
PROBE_BYTES = 16 << 10
_ARRIVED = b"\x01"

REMEDY = "give the interfaces of both hosts the MTU of what lies between them (ip link set ... mtu 1500), or let ICMP through"

#: How long sent bytes may stay unacknowledged. Linux retransmits them four times in that time.
_REPEATS_S = 3.0
_REPEATS = 4

#: The place of the number of retransmissions without an acknowledgement in Linux's struct tcp_info.
_RETRANSMITS_AT = 2

#: Segments small enough for every path of IPv6, whose links carry at least 1,280 bytes (RFC 8200, 2017, section 5).
_SMALL_SEGMENT_BYTES = 1024


def send_small_segments(connection: socket.socket) -> None:
    """Limit the packets of a connection, or of all connections that a listening socket accepts, to a size that every
    path forwards, so that ranks can report the loss of large packets."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_SEGMENT_BYTES)


class LargePacketsLost(LinkError):
    """Small packets arrive at the other end of a connection, and large ones do not."""


@dataclass
class _Path:
    """The probe of one connection. left: unsent and unacknowledged bytes. since: when their number last decreased."""

    connection: Connection
    since: float
    unsent: bytes = bytes(PROBE_BYTES)
    unread: int = PROBE_BYTES + len(_ARRIVED)
    left: int = PROBE_BYTES + len(_ARRIVED)


def check_paths(rank: int, connections: Mapping[int, Connection], deadline: float, check: Callable[[], None]) -> None:
    """Exchange a probe with the ranks at the other ends of new nonblocking connections, all at the same time.

    check: called repeatedly; raises LinkError to end a useless wait. Raises LargePacketsLost with both ranks; LinkError
    if a connection ends, or a rank does not answer before the deadline.
    """
    paths = {peer: _Path(connection, time.monotonic()) for peer, connection in connections.items()}
    while waiting := {peer: path for peer, path in paths.items() if path.unread or path.unsent}:
        poll = select.poll()
        for path in waiting.values():
            poll.register(path.connection, select.POLLIN | (select.POLLOUT if path.unsent else 0))
        ready = dict(poll.poll(1000 * POLL_S))
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
                detail = _lost_text(rank, peer, path.connection)
                raise LargePacketsLost(peer, timed_out=False, detail=detail, awaited={rank, peer})
        check()
        if now >= deadline:
            detail = "the paths between hosts were not tested in time"
            raise LinkError(min(waiting), timed_out=True, detail=detail, awaited=waiting)


def _move(path: _Path) -> None:
    """Send and receive without waiting; answer the probe once all of it has arrived. Raises OSError."""
    try:
        if path.unsent:
            path.unsent = path.unsent[path.connection.send(path.unsent) :]
        while path.unread:
            # Not a byte more: later bytes belong to the next user of the connection.
            if not (piece := path.connection.recv(path.unread)):
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            whole_before = path.unread <= len(_ARRIVED)
            path.unread -= len(piece)
            if path.unread <= len(_ARRIVED) and not whole_before:
                path.unsent += _ARRIVED
    except BlockingIOError:
        pass


def lossy_paths(rank: int, connections: Mapping[int, Connection]) -> dict[int, str]:
    """Return, by peer, the error text for each connection on which the other host has acknowledged none of several
    retransmissions. This is the loss of large packets if small ones arrive over another connection. Empty on systems that do not
    report it."""
    lossy = {}
    for peer, connection in connections.items():
        with suppress(OSError, AttributeError):  # the connection has ended, or this is not Linux
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITS_AT + 1)
            if info[_RETRANSMITS_AT] >= _REPEATS:
                lossy[peer] = _lost_text(rank, peer, connection)
    return lossy


def _lost_text(rank: int, peer: int, connection: Connection) -> str:
    here, there = address_text(connection.getsockname()), address_text(connection.getpeername())
    between = f"between rank {rank} at {here} and rank {peer} at {there}"
    return f"large packets are lost {between}, but small ones arrive: {REMEDY}"


def unconfirmed_bytes(connection: Connection) -> int:
    """Return how many sent bytes the other host has not acknowledged; 0 if this system does not report it. Raises OSError."""
    try:
        return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return 0
