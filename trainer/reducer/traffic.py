"""The count of the bytes that a rank sends in training."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from gradwire.collectives import Communicator
from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.compression.codec import Codec, Raw


@dataclass(frozen=True)
class ExchangeStats:
    """The bytes that one rank has sent so far: of gradients, with rules.Sharded also of parameters, with rules.LocalUpdates also
    of the changes of parameters, and with Adasum of these changes alone.

    exchanges: the number of exchanges of gradients, or of changes. bytes_sent: the bytes that this
    rank has sent, including the warm-up and the residuals that move when buckets change. bytes_uncompressed: the bytes that it
    would have sent without codecs and casts.

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

    def count(self, sent: int = 0, uncompressed: int = 0, exchanges: int = 0) -> None:
        """Add to the counts of bytes and of exchanges."""
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
