"""The handle of an operation, as torch.distributed and its C++ callers expect it, and the thread that moves the messages of a
group: a rank may send a message and never wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.futures import Future

from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.engine.point_to_point import MessageWork
from gradwire.collectives.engine.work import DONE, Work

_Result = torch.Tensor | Sequence[torch.Tensor]

#: A function that calls another function when an operation is done.
WhenDone = Callable[[Callable[[], None]], object]

#: Seconds between two passes over the messages: at first, and at most, after passes in which no message has finished.
_POLL_S, _LONGEST_POLL_S = 0.001, 0.02


class GradwireWork(dist.Work):
    """The handle of one operation. If it is deleted, the operation continues. wait() may be called several times.

    results: the tensors that the operation writes, or lists of them, which become the value of get_future(): a list as one
    tensor with a row for each rank, as with NCCL, because torch's quantization hooks index it so. parts: the handles of its
    parts, in the order in which they complete; none if the operation is done. when_done: for a message, whose handle lacks it;
    otherwise that of the last part is used. awaited: whether settle() will be called, so that the future is not completed before.
    """

    def __init__(
        self,
        results: Sequence[_Result],
        *parts: Work | MessageWork | GradwireWork,
        when_done: WhenDone | None = None,
        awaited: bool = False,
    ) -> None:
        super().__init__()
        self._results = list(results)
        self._parts = parts or (DONE,)
        self.when_done: WhenDone = when_done or self._parts[-1].when_done  # type: ignore[union-attr]  # see above
        self._awaited = awaited
        self._done: Future[list[_Result]] | None = None
        self._future: Future[list[_Result]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done, and return True. timeout: for each part; None or 0, as from C++, for none.

        Raises the operation's error; CollectiveTimeout when `timeout` passes first (the operation continues).
        """
        for part in self._parts:
            part.wait(timeout or None)
        return True

    def synchronize(self) -> None:
        """Wait, as wait() does: CPU tensors have no stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether wait() would return, or raise, at once."""
        return all(part.is_completed() for part in self._parts)

    def is_success(self) -> bool:
        """Return whether the operation is done without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a failed operation; None if the operation has succeeded or is not done."""
        try:
            if self.is_completed():
                self.wait()
        except BaseException as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation writes."""
        return [tensor for each in self._results for tensor in ([each] if isinstance(each, torch.Tensor) else each)]

    def source_rank(self) -> int:
        """Return the rank of the sender of a received message. Raises RuntimeError if the operation is no receive, or
        the sender is not known yet."""
        found: int | None = getattr(self._parts[0], "sender", None)
        if found is None:
            raise RuntimeError("source_rank() is available for a receive after its wait() has returned")
        return found

    _source_rank = source_rank

    def get_future(self) -> Future[list[_Result]]:
        """Return a future of the results. It raises what wait() raises; in C++, a RuntimeError with the same text."""
        if self._future is None:
            done: Future[list[_Result]] = Future()
            self._done = done
            self._future = done.then(lambda done: done.value())  # raises inside, which C++ counts as an error
            if not self._awaited:
                self.when_done(partial(self._settle, done))
        return self._future

    def finish(self) -> None:
        """Wait for the operation, and complete the future, which carries its error."""
        try:
            with suppress(Exception):
                self.wait()
        finally:
            self.settle()

    def settle(self) -> None:
        """Complete the future: at once if the operation is done, else in the background, where the operation may begin now."""
        self._awaited = False
        for part in self._parts:
            if isinstance(part, Work):
                part.begin()
        if self._done is not None:
            self.when_done(partial(self._settle, self._done))

    def _settle(self, done: Future[list[_Result]]) -> None:
        try:
            self.wait()
        except BaseException as error:  # an interrupt, too, if it ended the operation
            done.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))  # type: ignore[arg-type]  # as torch documents it
        else:
            done.set_result([_joined(each) for each in self._results])


def _joined(result: _Result) -> _Result:
    """Return a tensor, or the tensors of a list in one; a list of tensors of several shapes as it is."""
    if isinstance(result, torch.Tensor) or len({tensor.shape for tensor in result}) != 1:
        return result
    return torch.stack(list(result))


class Mover:
    """Moves messages on a thread until they are done. The first message starts the thread."""

    def __init__(self) -> None:
        self._under_way: dict[MessageWork, list[Callable[[], None]]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, work: MessageWork) -> WhenDone:
        """Move a message until it is done. Return a function that takes a function, and calls it when the message is done: at
        once, or later on a thread of its own, so that it may wait for other messages."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="gradwire-mover", daemon=True)
                thread.start()
                self._thread = thread
            self._under_way[work] = []
            self._changed.notify()
        return partial(self._when_done, work)

    def _when_done(self, work: MessageWork, callback: Callable[[], None]) -> None:
        with self._changed:
            if work in self._under_way:
                self._under_way[work].append(callback)
                return
        callback()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End the thread, after a last look at the messages. After the block, in which their Communicator closes, the wait for
        any of them returns or raises at once: call the functions of those that are left."""
        with self._changed:
            is_last = not self._closed
            self._closed = True
            self._changed.notify()
        self._call_back(work for work in list(self._under_way) if is_last and work.is_completed())
        try:
            yield
        finally:
            self._call_back(list(self._under_way))

    def _call_back(self, works: Iterable[MessageWork]) -> None:
        for work in works:
            for callback in self._taken(work):
                callback()

    def _taken(self, work: MessageWork) -> list[Callable[[], None]]:
        with self._changed:
            return self._under_way.pop(work, [])

    def _serve(self) -> None:
        poll_s = _POLL_S
        while not self._closed:
            time.sleep(poll_s)  # most messages are done before, because the caller waits for them
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
            for work in list(self._under_way):
                if not self._closed and work.is_completed():
                    poll_s = _POLL_S
                    for callback in self._taken(work):
                        thread = DaemonThread("gradwire-mover callback", or_callers=True)
                        thread.submit(callback)
                        thread.close()
                del work  # it keeps a tensor alive
            with self._changed:
                if not self._under_way:
                    poll_s = _POLL_S
                    self._changed.wait_for(lambda: self._under_way or self._closed)
