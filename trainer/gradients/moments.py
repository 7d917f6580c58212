"""When this rank's gradients were ready, and when those of all ranks were there: measured by this rank's own clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gradwire.collectives import Communicator
from gradwire.collectives.diagnostics.timeline import now_ns


@dataclass(frozen=True)
class Moment:
    """Holds what one exchange of gradients took, in nanoseconds.

    number: of the exchange, the same on all ranks. waited_ns: from this rank's having all its gradients until all were
    exchanged. exchange_ns: since its first bucket was sent. step_ns: since the end of the exchange before.
    """

    number: int
    waited_ns: int
    exchange_ns: int
    step_ns: int


class Moments:
    """Takes note of the moments of an exchange, as it passes them; in a timeline too, where the Communicator has one.

    last: the moments of the last exchanges, so many as keep() has asked for.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.last: deque[Moment] = deque(maxlen=1)
        self._communicator = communicator
        self._began_ns = self._sent_ns = self._ready_ns = self._ended_ns = now_ns()
        self._has_sent = False

    def keep(self, count: int) -> None:
        """Keep the moments of at least so many exchanges."""
        self.last = deque(self.last, maxlen=max(count, self.last.maxlen or 0))

    def gradients_begin(self) -> None:
        """Note that the first gradient of a backward() is there."""
        self._began_ns = now_ns()

    def gradients_end(self) -> None:
        """Note that the last gradient of a backward() is there."""
        self._ready_ns = now_ns()
        if (lane := self._communicator.lane("training")) is not None:
            lane.span("backward", self._began_ns)

    def bucket_ready(self, number: int, nbytes: int) -> None:
        """Note that a bucket is about to be sent."""
        if not self._has_sent:
            self._has_sent = True
            self._sent_ns = now_ns()
            timeline, training = self._communicator.timeline, self._communicator.lane("training")
            if timeline is not None and timeline.marks_cycles and training is not None:
                training.mark("exchange begins")
        if (lane := self._communicator.lane("buckets")) is not None:
            lane.mark("bucket ready", bucket=number, bytes=nbytes)

    def flush_begins(self) -> None:
        """Note that what this rank has is exchanged now, outside of backward()."""
        self._ready_ns = now_ns()

    def exchange_ends(self, number: int, wait_begin_ns: int) -> None:
        """Note that all buckets are exchanged, which has been waited for since wait_begin_ns."""
        now = now_ns()
        if (lane := self._communicator.lane("training")) is not None:
            lane.span("wait", wait_begin_ns, exchange=number)
        sent_ns = self._sent_ns if self._has_sent else now
        self.last.append(Moment(number, now - self._ready_ns, now - sent_ns, now - self._ended_ns))
        self._ended_ns, self._has_sent = now, False
