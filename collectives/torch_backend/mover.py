"""A thread that moves the messages of a group, because a rank may send a message and never wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.engine.point_to_point import MessageWork
from gradwire.collectives.torch_backend.work import WhenDone

#: Seconds between two passes over the messages: at first, and at most, after passes in which no message has finished.
_POLL_S, _LONGEST_POLL_S = 0.001, 0.02


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
