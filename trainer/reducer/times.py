"""The times when this rank's gradients were ready and when those of all ranks had arrived, by this rank's own clock."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

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

    The exchange sets began_ns to now_ns() at the first gradient of a backward(), and ready_ns where an exchange begins outside of
    backward(). last: the times of the last exchanges; keep() sets how many.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.last: deque[ExchangeTime] = deque(maxlen=1)
        self.began_ns = self.ready_ns = self._ended_ns = now_ns()
        self._communicator = communicator
        self._sent_ns = 0  # 0 until a bucket is sent
        self._count = 0

    def keep(self, count: int) -> None:
        """Keep the times of at least `count` exchanges."""
        self.last = deque(self.last, maxlen=max(count, self.last.maxlen or 0))

    def gradients_end(self) -> None:
        """Record that the last gradient of a backward() is ready."""
        self.ready_ns = now_ns()
        if self._communicator.timeline is not None and (lane := self._communicator.lane("training")) is not None:
            lane.span("backward", self.began_ns)

    def bucket_ready(self, number: int, nbytes: int) -> None:
        """Record that a bucket is about to be sent."""
        is_first = not self._sent_ns
        if is_first:
            self._sent_ns = now_ns()
        if (timeline := self._communicator.timeline) is not None:
            training, buckets = self._communicator.lane("training"), self._communicator.lane("buckets")
            if is_first and timeline.marks_cycles and training is not None:
                training.mark("exchange begins")
            if buckets is not None:
                buckets.mark("bucket ready", bucket=number, bytes=nbytes)

    def exchange_ends(self, wait_begin_ns: int) -> None:
        """Record that all buckets are exchanged, after a wait that began at wait_begin_ns."""
        now, number = now_ns(), self._count
        self._count += 1
        if self._communicator.timeline is not None and (lane := self._communicator.lane("training")) is not None:
            lane.span("wait", wait_begin_ns, exchange=number)
        self.last.append(ExchangeTime(number, now - self.ready_ns, now - (self._sent_ns or now), now - self._ended_ns))
        self._ended_ns, self._sent_ns = now, 0
