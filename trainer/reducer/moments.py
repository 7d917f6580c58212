"""The times when this rank's gradients were ready and when those of all ranks had arrived, by this rank's own clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gradwire.collectives import Communicator
from gradwire.collectives.diagnostics.timeline import now_ns


@dataclass(frozen=True)
class Moment:
    """The durations of one exchange of gradients, in nanoseconds.

    number: the number of earlier exchanges since the optimizer was made, the same on all ranks. Each duration ends when all
    gradients are exchanged. waited_ns begins when this rank has all its gradients. exchange_ns begins when this rank sends its
    first bucket. step_ns begins at the end of the previous exchange.
    """

    number: int
    waited_ns: int
    exchange_ns: int
    step_ns: int


class Moments:
    """Records the moments of an exchange, also in the Communicator's timeline if it has one.

    last: the moments of the last exchanges; keep() sets how many.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.last: deque[Moment] = deque(maxlen=1)
        self._communicator = communicator
        self._began_ns = self._sent_ns = self._ready_ns = self._ended_ns = now_ns()
        self._has_sent = False
        self._count = 0

    def keep(self, count: int) -> None:
        """Keep the moments of at least `count` exchanges."""
        self.last = deque(self.last, maxlen=max(count, self.last.maxlen or 0))

    def gradients_begin(self) -> None:
        """Record that the first gradient of a backward() is ready."""
        self._began_ns = now_ns()

    def gradients_end(self) -> None:
        """Record that the last gradient of a backward() is ready."""
        self._ready_ns = now_ns()
        if (lane := self._communicator.lane("training")) is not None:
            lane.span("backward", self._began_ns)

    def bucket_ready(self, number: int, nbytes: int) -> None:
        """Record that a bucket is about to be sent."""
        if not self._has_sent:
            self._has_sent = True
            self._sent_ns = now_ns()
            timeline, training = self._communicator.timeline, self._communicator.lane("training")
            if timeline is not None and timeline.marks_cycles and training is not None:
                training.mark("exchange begins")
        if (lane := self._communicator.lane("buckets")) is not None:
            lane.mark("bucket ready", bucket=number, bytes=nbytes)

    def flush_begins(self) -> None:
        """Record that an exchange of this rank's gradients begins outside of backward()."""
        self._ready_ns = now_ns()

    def exchange_ends(self, wait_begin_ns: int) -> None:
        """Record that all buckets are exchanged, after a wait that began at wait_begin_ns."""
        now, number = now_ns(), self._count
        self._count += 1
        if (lane := self._communicator.lane("training")) is not None:
            lane.span("wait", wait_begin_ns, exchange=number)
        sent_ns = self._sent_ns if self._has_sent else now
        self.last.append(Moment(number, now - self._ready_ns, now - sent_ns, now - self._ended_ns))
        self._ended_ns, self._has_sent = now, False
