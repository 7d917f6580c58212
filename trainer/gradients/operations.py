"""What takes one operation between ranks or several, of which each depends on the one before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from collectives import Work


class Operations(ABC):
    """Runs operations one after the other.

    chained: whether there may be more than one. Between two of them ranks wait in wait() and complete(), so whoever has
    several chains to run must not wait for one where another rank waits for another.
    """

    chained = True

    def __init__(self) -> None:
        self._work: Work | None = None
        self._following: Iterator[Work] = iter(())

    def start(self, step: int) -> None:
        """Begin the first operation. step: how many exchanges there were."""
        self._following = self._operations(step)
        self._work = next(self._following, None)

    def wait(self) -> None:
        """Wait until what start() began is done, and begin what depends on it. Raises its error."""
        if self._work is not None:
            self._work.wait()
            self._work = next(self._following, None)

    def complete(self) -> None:
        """Wait for what depends on what wait() has waited for. Raises its error."""
        while self._work is not None:
            self.wait()

    @abstractmethod
    def _operations(self, step: int) -> Iterator[Work]:
        """Begin one operation after the other: the next is asked for when the last is done."""
