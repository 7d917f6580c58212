"""The connections of a rank to other ranks of a Communicator: it dials those with higher numbers, and accepts the others."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing

from gradwire.collectives.control.handshake import MOST_UNVERIFIED, Door, dial, listen, wait_ready
from gradwire.collectives.errors import LinkError, ranks_text


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks 1, 2, 4, ... places before and after one: any two ranks are at most log2(size) connections apart."""
    steps = [sign << k for k in range((size - 1).bit_length()) for sign in (1, -1)]
    return sorted({(rank + step) % size for step in steps} - {rank})


class Listener:
    """A socket to which ranks with lower numbers connect. card: its address and port. small_segments: see listen."""

    def __init__(self, address: str, *, small_segments: bool = False) -> None:
        """Listen on a free port of an address. Raises OSError if this process cannot."""
        self._small_segments = small_segments
        self._socket = listen(address, socket.SOMAXCONN, small_segments=small_segments)
        self.card = f"{address} {self._socket.getsockname()[1]}"

    def join(
        self,
        rank: int,
        peers: Collection[int],
        cards: Sequence[str],
        secret: bytes,
        deadline: float,
        check: Callable[[], None],
    ) -> dict[int, socket.socket]:
        """Connect this rank to its peers, which call join() too, and stop listening. Return the connections by rank.

        cards: each rank's Listener.card. check: see wait_ready. Raises LinkError with the ranks that did not connect.
        """
        made: dict[int, socket.socket] = {}
        expected = {peer for peer in peers if peer < rank}
        with closing(Door(self._socket, rank, secret, max(MOST_UNVERIFIED, len(expected)))) as door:
            try:
                # The last rank accepts at once, the others when they have dialled: so each waits for one handshake, not for all.
                for peer in sorted((peer for peer in peers if peer > rank), reverse=True):
                    address, port = cards[peer].split()
                    place, small = (address, int(port)), self._small_segments
                    made[peer] = dial(rank, peer, place, secret, deadline, check, small_segments=small)
                _accept(door, made, expected, deadline, check)
            except BaseException:
                for connection in made.values():
                    connection.close()
                raise
        return made

    def close(self) -> None:
        """Stop listening. Calling it again does nothing."""
        self._socket.close()


def _accept(
    door: Door, made: dict[int, socket.socket], expected: set[int], deadline: float, check: Callable[[], None]
) -> None:
    """Accept the connections of the expected ranks, and add them to `made`."""
    while missing := expected - made.keys():
        try:
            if time.monotonic() >= deadline:  # unauthenticated connections may have kept the door busy
                raise TimeoutError
            ready = wait_ready(dict.fromkeys(door.descriptors, select.POLLIN), deadline, check)
        except TimeoutError:
            detail = f"{ranks_text(missing)} did not connect"
            raise LinkError(min(missing), timed_out=True, detail=detail, awaited=missing) from None
        for arrived in door.look(ready):
            if arrived.error is not None:
                arrived.connection.close()
                raise arrived.error
            if arrived.rank in made or arrived.rank not in missing:
                arrived.connection.close()
            else:
                made[arrived.rank] = arrived.connection
        if door.socket.fileno() in ready:
            door.accept()
