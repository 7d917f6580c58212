"""What an executor needs of a Transport, between threads of one process, as hostile as the contract allows.

`eager` delivers a message the moment both ends have posted it, long before the receiver waits: a receive posted while its
memory is still in use shows. Otherwise it delivers when the receiver waits, as late as possible: a buffer that is changed
before its send is over shows.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch

from gradwire.collectives.errors import LinkError
from gradwire.collectives.transports.base import Message, Pending, Transport


def hosts_of(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of hosts that have two each, but for the last one."""
    return tuple(tuple(range(first, min(first + 2, size))) for first in range(0, size, 2))


class _Transfer:
    """One end of a message; complete once both ends have met and the data has been copied."""

    def __init__(self, hub: Hub, tensor: torch.Tensor, peer: int, *, sending: bool) -> None:
        self.hub, self.tensor, self.peer, self.sending = hub, tensor, peer, sending
        self.other: _Transfer | None = None
        self.done = False

    def wait(self, deadline: float) -> None:
        with self.hub.changed:
            while not self.done:
                if self.other is not None and not self.sending:
                    self.hub.deliver(self)
                elif not self.hub.changed.wait(deadline - time.monotonic()):
                    raise LinkError(self.peer, timed_out=True, detail="nothing came")


class Hub:
    """Connects `size` threads."""

    def __init__(self, size: int, *, eager: bool) -> None:
        self.size, self.eager = size, eager
        self.changed = threading.Condition()
        self._sends: dict[tuple[int, int, int], deque[_Transfer]] = defaultdict(deque)
        self._receives: dict[tuple[int, int, int], deque[_Transfer]] = defaultdict(deque)

    def deliver(self, transfer: _Transfer) -> None:
        other = transfer.other
        assert other is not None
        if not transfer.done:
            receiver, sender = (other, transfer) if transfer.sending else (transfer, other)
            assert receiver.tensor.numel() == sender.tensor.numel(), "the two ends disagree about a message's length"
            receiver.tensor.copy_(sender.tensor)
            transfer.done = other.done = True
            self.changed.notify_all()

    def post(self, key: tuple[int, int, int], tensor: torch.Tensor, *, sending: bool) -> _Transfer:
        transfer = _Transfer(self, tensor, key[1] if sending else key[0], sending=sending)
        mine, theirs = (self._sends, self._receives) if sending else (self._receives, self._sends)
        with self.changed:
            if theirs[key]:
                transfer.other = theirs[key].popleft()
                transfer.other.other = transfer
                if self.eager:
                    self.deliver(transfer)
                self.changed.notify_all()
            else:
                mine[key].append(transfer)
        return transfer


class InProcessTransport(Transport):
    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self.rank, self.size = hub, rank, hub.size

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        received: list[Pending] = [
            self._hub.post((peer, self.rank, tag), tensor, sending=False) for peer, tensor in receives
        ]
        sent: list[Pending] = [self._hub.post((self.rank, peer, tag), tensor, sending=True) for peer, tensor in sends]
        return sent, received

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def run_ranks(size: int, body: Callable[[int], object]) -> None:
    """body(rank) on a thread per rank; the first error of any of them is raised."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
