"""How the numbers of all ranks are combined: the operations, their order, and the bytes that they send."""

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
from gradwire.trainer.reducer.arguments import Average


@dataclass(frozen=True)
class Combination:
    """The Communicator and the op, "sum" or "average", that combine numbers. The numbers are divided by `predivide` before the
    operation, and multiplied by it afterwards. in_shares: whether each rank needs only its share of the result, see
    Communicator.shares(). traffic: counts the bytes sent; replace() keeps it."""

    communicator: Communicator
    op: str
    predivide: float = 1.0
    in_shares: bool = False
    traffic: Traffic = field(kw_only=True, compare=False)

    @property
    def inputs(self) -> int:
        """Return the number of ranks over which the result is a mean; 1 if the result is a sum."""
        return self.communicator.size if self.op == Average else 1

    @property
    def share(self) -> float:
        """Return the factor by which each rank must multiply equal numbers so that the result is these numbers."""
        return self.inputs / self.communicator.size

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
        nbytes = values.nbytes if codec is None else 4 * values.numel()
        self.traffic.count(sent=self.traffic.wire_bytes(nbytes, codec, step))
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
        """Return a prepared operation that combines values in place, uncompressed, any number of times."""
        prepare = self.communicator.prepare_reduce_shares if self.in_shares else self.communicator.prepare_allreduce
        return prepare(values, self.op, prescale=1 / self.predivide, postscale=self.predivide)


@dataclass(frozen=True)
class ExchangeStats:
    """The bytes that one rank has sent so far: of gradients, with rules.Sharded also of parameters, and with LocalUpdates also
    of the changes of parameters.

    exchanges: the number of exchanges of gradients, and with LocalUpdates also of changes. bytes_sent: the bytes that this rank
    has sent, including the warm-up and the residuals that move when buckets change. bytes_uncompressed: the bytes that it would
    have sent without codecs and casts.

    Both byte counts are calculated, not measured. On a single host with p ranks, each rank sends 2(p-1)/p times the bytes of
    the message, or of its code. With p hosts, the ranks of each host together send this number of bytes to other hosts;
    messages inside a host do not count. Exceptions: chunktopk sends p - 1 times its code; sparse gradients, and codes of
    parameter_compression, are sent to every other rank.
    """

    exchanges: int = 0
    bytes_sent: int = 0
    bytes_uncompressed: int = 0

    @property
    def ratio(self) -> float:
        """Return bytes_uncompressed / bytes_sent; 1.0 if nothing was sent."""
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
    """Counts the bytes sent on one Communicator. Several threads may call its methods."""

    def __init__(self, communicator: Communicator) -> None:
        self._exchanges = self._sent = self._uncompressed = 0
        self._communicator = communicator
        self._planned: dict[tuple[int, Codec | None, int], int] = {}
        self._lock = threading.Lock()

    def count(self, exchanges: int = 0, sent: int = 0, uncompressed: int = 0) -> None:
        """Add to the counts of exchanges and of bytes."""
        with self._lock:
            self._exchanges += exchanges
            self._sent += sent
            self._uncompressed += uncompressed

    @property
    def stats(self) -> ExchangeStats:
        """Return the counts so far."""
        with self._lock:
            return ExchangeStats(self._exchanges, self._sent, self._uncompressed)

    def wire_bytes(self, nbytes: int, codec: Codec | None = None, step: int = 0) -> int:
        """Return how many bytes this rank sends in an allreduce of nbytes; with a codec, of nbytes of float32 as the codes of a
        step.

        Plain numbers, and codes that are summed as numbers, count as if sent by two_shot. Other codes count as sent by their
        shot_of(). So a codec's savings do not depend on the algorithm that the plain numbers would use. Results are cached by
        the length of the code, since planning takes longer than a small exchange, and a codec may be another at every step.
        """
        used = None if codec is None else codec.at(step)
        code_bytes = 0 if used is None or used is codec else used.wire_bytes(nbytes // 4)
        key = (nbytes, codec, code_bytes)
        if key not in self._planned:
            used = Raw() if used is None else used
            code_bytes = used.wire_bytes(nbytes // 4)
            if codec is not None and used.summable:  # its codes are summed as numbers
                self._planned[key] = self.wire_bytes(code_bytes)
            else:
                self._planned[key] = self._communicator.wire_bytes("allreduce", nbytes, shot_of(used), used) or 0
        return self._planned[key]

    def gathered_bytes(self, nbytes: int) -> int:
        """Return how many bytes this rank sends when all other ranks gather nbytes from it."""
        return nbytes * (self._communicator.size - 1)


class OperationChain(ABC):
    """Runs operations one after the other.

    chained: whether there may be more than one operation. wait() and complete() wait for one operation before they begin the
    next, so all ranks must wait for several chains in the same order. seconds: how long the operations of the last finished
    exchange ran. ended_s: the end of its last operation, by time.perf_counter().
    """

    chained = True

    def __init__(self) -> None:
        self.seconds = self.ended_s = self._taken_s = 0.0
        self._work: Work | None = None
        self._following: Iterator[Work] = iter(())

    def start(self, step: int) -> None:
        """Begin the first operation. step: the number of earlier exchanges."""
        self._taken_s = 0.0
        self._following = self._operations(step)
        self._work = next(self._following, None)

    def wait(self) -> None:
        """Wait for the first operation, and begin those that depend on it. Raises its error."""
        if self._work is not None:
            self._work.wait()
            self._taken_s += self._work.seconds
            self.ended_s = self._work.ended_s
            self._work = next(self._following, None)
            if self._work is None:
                self.seconds = self._taken_s

    def complete(self) -> None:
        """Wait for the remaining operations. Raises their error."""
        while self._work is not None:
            self.wait()

    @abstractmethod
    def _operations(self, step: int) -> Iterator[Work]:
        """Begin and yield the operations. The caller takes the next one when the last one is done."""
