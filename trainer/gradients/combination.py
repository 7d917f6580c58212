"""How the numbers of all ranks become one: by which operation, in which order, and how many bytes that sends."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from gradwire.collectives import Communicator, PreparedOperation, Work
from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.raw import Raw
from gradwire.trainer.gradients.arguments import Average


@dataclass(frozen=True)
class Combination:
    """Says among whom, and by which op, "sum" or "average", numbers are combined; they are divided by `predivide`
    before and multiplied by it after. in_shares: whether each rank needs its share of the result only, which the
    Communicator's shares() are. traffic: counts what is sent for that."""

    communicator: Communicator
    op: str
    predivide: float = 1.0
    in_shares: bool = False
    traffic: Traffic = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "traffic", Traffic(self.communicator))

    @property
    def inputs(self) -> int:
        """Return how many ranks' numbers the result is the mean of; 1 where it is their sum."""
        return self.communicator.size if self.op == Average else 1

    def start(
        self,
        values: Tensor,
        codec: Codec | None = None,
        feedback: Feedback | None = None,
        step: int = 0,
        seed: int = 0,
        *,
        divided: bool = False,
    ) -> Work:
        """Begin to combine values, in place. divided: whether they have been divided by `predivide` already."""
        nbytes, used = (values.nbytes, None) if codec is None else (4 * values.numel(), codec.at(step))
        self.traffic.count(sent=self.traffic.wire_bytes(nbytes, used))
        return self.communicator.allreduce(
            values,
            self.op,
            prescale=1.0 if divided else 1 / self.predivide,
            postscale=self.predivide,
            codec=codec,
            feedback=feedback,
            step=step,
            seed=seed,
            async_op=True,
        )

    def prepare(self, values: Tensor) -> PreparedOperation:
        """Prepare to combine values as they are, in place, as often as wanted."""
        prepare = self.communicator.prepare_reduce_shares if self.in_shares else self.communicator.prepare_allreduce
        return prepare(values, self.op, prescale=1 / self.predivide, postscale=self.predivide)


@dataclass(frozen=True)
class ExchangeStats:
    """Says how many bytes of gradients one rank has sent so far; with shard_states, and of parameters.

    exchanges: how often the gradients of a step were exchanged. bytes_sent: what this rank sent for that, warm-up and
    the handing over of residuals when buckets change included. bytes_uncompressed: what it would have sent, had everything
    travelled as it is.

    Both are read off the plan of the exchange between hosts, or between ranks where all share one host: 2(p-1)/p of the
    message or of its code, where p of them take part. What ranks of one host pass each other before, in memory that
    they share, does not count, nor do the few bytes that say who has a gradient.
    """

    exchanges: int = 0
    bytes_sent: int = 0
    bytes_uncompressed: int = 0

    @property
    def ratio(self) -> float:
        """Return how many times fewer bytes were sent; 1.0 where there was nothing to send."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else 1.0

    def __str__(self) -> str:
        if self.bytes_uncompressed == 0:
            return f"{self.exchanges} exchanges had nothing to send"
        sent = f"{self.exchanges} exchanges sent {self.bytes_sent / 1e6:.3f} MB"
        if self.bytes_sent == self.bytes_uncompressed:
            return f"{sent}, uncompressed"
        compared = f"{self.ratio:.2f} times fewer" if self.ratio >= 1 else f"{1 / self.ratio:.2f} times as many"
        return f"{sent} instead of {self.bytes_uncompressed / 1e6:.3f} MB, {compared} bytes"


class Traffic:
    """Counts the bytes sent on one Communicator. Several threads may do so."""

    def __init__(self, communicator: Communicator) -> None:
        self._exchanges = self._sent = self._uncompressed = 0
        self._communicator = communicator
        self._planned: dict[tuple[int, Codec | None], int] = {}
        self._lock = threading.Lock()

    def count(self, exchanges: int = 0, sent: int = 0, uncompressed: int = 0) -> None:
        """Add to the exchanges of all gradients of a step, and to the bytes."""
        with self._lock:
            self._exchanges += exchanges
            self._sent += sent
            self._uncompressed += uncompressed

    @property
    def stats(self) -> ExchangeStats:
        """Return what was counted so far."""
        with self._lock:
            return ExchangeStats(self._exchanges, self._sent, self._uncompressed)

    def wire_bytes(self, nbytes: int, codec: Codec | None = None) -> int:
        """Return how many bytes this rank sends in an allreduce of nbytes; with a codec, of nbytes of float32 as codes.

        Numbers, and codes that are summed as numbers, count as if they went by two-shot, and other codes by their own shot:
        so what a codec saves does not depend on which algorithm the numbers would have taken. Results are kept, since
        to read one off a plan takes longer than a small exchange.
        """
        key = (nbytes, codec)
        if key not in self._planned:
            if codec is not None and codec.summable:  # whose codes are summed like numbers
                self._planned[key] = self.wire_bytes(codec.wire_bytes(nbytes // 4))
            else:
                used = codec or Raw()
                sent = self._communicator.wire_bytes("allreduce", nbytes, shot_of(used), used)
                self._planned[key] = sent or 0
        return self._planned[key]

    def gathered_bytes(self, nbytes: int) -> int:
        """Return how many bytes this rank sends where all others gather nbytes of it."""
        return nbytes * (self._communicator.size - 1)


class Operations(ABC):
    """Runs operations one after the other.

    chained: whether there may be more than one. Between two of them ranks wait in wait() and complete(), so whoever has
    several chains to run must not wait for one where another rank waits for another. seconds: for how long those of the last
    exchange that is done ran.
    """

    chained = True

    def __init__(self) -> None:
        self.seconds = self._taken_s = 0.0
        self._work: Work | None = None
        self._following: Iterator[Work] = iter(())

    def start(self, step: int) -> None:
        """Begin the first operation. step: how many exchanges there were."""
        self._taken_s = 0.0
        self._following = self._operations(step)
        self._work = next(self._following, None)

    def is_done(self) -> bool:
        """Return whether wait() would return, or raise, at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Wait until what start() began is done, and begin what depends on it. Raises its error."""
        if self._work is not None:
            self._work.wait()
            self._taken_s += self._work.seconds
            self._work = next(self._following, None)
            if self._work is None:
                self.seconds = self._taken_s

    def complete(self) -> None:
        """Wait for what depends on what wait() has waited for. Raises its error."""
        while self._work is not None:
            self.wait()

    @abstractmethod
    def _operations(self, step: int) -> Iterator[Work]:
        """Begin one operation after the other: the next is asked for when the last is done."""
