"""What torch's programs wait for: the handle of an operation, in the form that torch.distributed and its C++ callers know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

#: Calls a function once an operation is done.
WhenDone = Callable[[Callable[[], None]], object]


class Part(Protocol):
    """A handle of a Communicator."""

    def wait(self, timeout: timedelta | None = None) -> object: ...

    def is_completed(self) -> bool: ...


def at_once(callback: Callable[[], None]) -> None:
    """Be the WhenDone of what is done."""
    callback()


class GradwireWork(dist.Work):
    """The handle of one operation. It may be dropped: the operation goes on. It may be waited for as often as wanted.

    parts: the handles of what it is made of, in the order in which they complete; none where it is done. results: what it
    writes, which becomes the value of get_future(). when_done: of the last part. source: returns the rank that sent what was
    received.
    """

    def __init__(
        self,
        results: Sequence[torch.Tensor],
        parts: Sequence[Part] = (),
        when_done: WhenDone = at_once,
        source: Callable[[], int | None] | None = None,
    ) -> None:
        super().__init__()
        self._results = list(results)
        self._parts = parts
        self.when_done = when_done
        self._source = source
        self._future: Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when it is done. timeout: of torch's C++ callers, for whom 0 stands for none.

        Raises the operation's error; CollectiveTimeout when `timeout` passes first (the operation goes on).
        """
        for part in self._parts:
            part.wait(timeout or None)
        return True

    def synchronize(self) -> None:
        """Wait, as wait() does: CPU tensors have no stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True once wait() would return, or raise, at once."""
        return all(part.is_completed() for part in self._parts)

    def is_success(self) -> bool:
        """Return whether it is done, and well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of what is done; None where there is none, or not yet."""
        try:
            if self.is_completed():
                self.wait()
        except BaseException as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """Return what it writes."""
        return self._results

    def source_rank(self) -> int:
        """Return the rank that a received message came from. Raises RuntimeError where nothing was received, or not yet."""
        found = None if self._source is None else self._source()
        if found is None:
            raise RuntimeError("source_rank() is available for a receive after its wait() has returned")
        return found

    _source_rank = source_rank

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return a future of the results. It raises what wait() raises; in C++, a RuntimeError with the same text."""
        if self._future is None:
            done: Future[list[torch.Tensor]] = Future()
            self._future = done.then(lambda done: done.value())  # raises inside, which C++ takes for an error
            self.when_done(lambda: self._settle(done))
        return self._future

    def _settle(self, done: Future[list[torch.Tensor]]) -> None:
        try:
            self.wait()
        except Exception as error:
            done.set_exception(error)  # type: ignore[arg-type]  # as torch documents it
        else:
            done.set_result(self._results)
