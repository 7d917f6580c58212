"""The times when this rank's gradients were ready and when those of all ranks had arrived, by this rank's or its GPU's clock."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from gradwire.collectives import Communicator
from gradwire.collectives.diagnostics.timeline import now_ns


class ExchangeTime(NamedTuple):
    """The durations of one exchange of gradients, in nanoseconds.

    number: the number of earlier exchanges since the optimizer was made, the same on all ranks. Each duration ends when all
    gradients are exchanged. waited_ns begins when this rank has all its gradients. exchange_ns begins when this rank sends its
    first bucket. step_ns begins at the end of the previous exchange.
    """

    number: int
    waited_ns: int
    exchange_ns: int
    step_ns: int


class ExchangeTimes:
    """Records when the gradients of exchanges were ready and exchanged, also in the Communicator's timeline if it has one.

    The exchange sets began_ns to now_ns() at the first gradient of a backward(). last: the times of the last exchanges; keep()
    sets how many. count: how many exchanges have ended. on: the GPU of the gradients, which then measures the durations; they are
    known one exchange later, since the host waits for nothing. None on the CPU. The timeline shows what the host does.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.last: deque[ExchangeTime] = deque(maxlen=1)
        self.began_ns = self._ready_ns = self._ended_ns = now_ns()
        self.on: torch.device | None = None
        self._on_gpu = _EventTimes()
        self._communicator = communicator
        self._sent_ns = 0  # 0 until a bucket is sent
        self.count = 0

    def keep(self, count: int) -> None:
        """Keep the times of at least `count` exchanges."""
        self.last = deque(self.last, maxlen=max(count, self.last.maxlen or 0))

    def gradients_end(self) -> None:
        """Record that the last gradient of a backward() is ready."""
        self._ready_ns = now_ns()
        if self.on is not None:
            self.exchange_begins()
        if self._communicator.timeline is not None and (lane := self._communicator.lane("training")) is not None:
            lane.span("backward", self.began_ns)

    def exchange_begins(self) -> None:
        """Record that the gradients of this rank are ready, also outside of backward()."""
        self._ready_ns = now_ns()
        if self.on is not None:
            self._on_gpu.ready = _event(self.on)

    def bucket_ready(self, number: int, nbytes: int) -> None:
        """Record that a bucket is about to be sent."""
        is_first = not self._sent_ns
        if is_first:
            self._sent_ns = now_ns()
            if self.on is not None:
                self._on_gpu.sent = _event(self.on)
        if (timeline := self._communicator.timeline) is not None:
            training, buckets = self._communicator.lane("training"), self._communicator.lane("buckets")
            if is_first and timeline.marks_cycles and training is not None:
                training.mark("exchange begins")
            if buckets is not None:
                buckets.mark("bucket ready", bucket=number, bytes=nbytes)

    def exchange_ends(self, wait_begin_ns: int) -> None:
        """Record that all buckets are exchanged, after a wait that began at wait_begin_ns."""
        now, number = now_ns(), self.count
        self.count += 1
        if self._communicator.timeline is not None and (lane := self._communicator.lane("training")) is not None:
            lane.span("wait", wait_begin_ns, exchange=number)
        if self.on is None:
            self.last.append(
                ExchangeTime(number, now - self._ready_ns, now - (self._sent_ns or now), now - self._ended_ns)
            )
        else:
            self.last += self._on_gpu.finished(number, _event(self.on))
        self._ended_ns, self._sent_ns = now, 0


class _EventTimes:
    """The times of exchanges by the events of a GPU. ready, sent: see ExchangeTime."""

    def __init__(self) -> None:
        self.ready: torch.cuda.Event | None = None
        self.sent: torch.cuda.Event | None = None
        self._before: torch.cuda.Event | None = None  # the end of the previous exchange
        self._running: deque[tuple[int, list[torch.cuda.Event]]] = deque()

    def finished(self, number: int, ended: torch.cuda.Event) -> list[ExchangeTime]:
        """Record the end of an exchange, and return the times of those that the GPU has finished since the last call."""
        begins = [each or ended for each in (self.ready, self.sent, self._before)]
        self._running.append((number, [*begins, ended]))
        self.ready, self.sent, self._before = None, None, ended
        found = []
        while self._running and self._running[0][1][-1].query():
            number, (*begun, end) = self._running.popleft()
            found.append(ExchangeTime(number, *(int(1e6 * each.elapsed_time(end)) for each in begun)))
        return found


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
