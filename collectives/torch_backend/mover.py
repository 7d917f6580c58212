"""A thread that moves the messages of a group, because a rank may send a message and never wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.engine.point_to_point import MessageWork

#: Seconds between two passes over the messages: at first, and at most, after passes in which no message has finished.
_POLL_S, _LONGEST_POLL_S = 0.001, 0.02


class Mover:
    """Moves messages on a thread until they are done. The first message starts the thread."""

    def __init__(self) -> None:
        self._under_way: dict[MessageWork, list[Callable[[], None]]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, work: MessageWork) -> None:
        """Move a message until it is done."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="gradwire-mover", daemon=True)
                thread.start()
                self._thread = thread
            self._under_way[work] = []
            self._changed.notify()

    def when_done(self, work: MessageWork, callback: Callable[[], None]) -> None:
        """Call a function when a message is done: at once, or later on a thread of its own, so that it may wait for other
        messages."""
        with self._changed:
            if work in self._under_way:
                self._under_way[work].append(callback)
                return
        callback()

    def stop(self) -> None:
        """End the thread, after a last look: messages that are not done by then are left to settle()."""
        with self._changed:
            works = [] if self._closed else list(self._under_way)
            self._closed = True
            self._changed.notify()
        self._call_back(work for work in works if work.is_completed())

    def settle(self) -> None:
        """Call the functions of the messages that are left, after stop() and after the end of their Communicator, so that the
        wait for each message returns or raises at once."""
        self._call_back(list(self._under_way))

    def _call_back(self, works: Iterable[MessageWork]) -> None:
        for work in works:
            with self._changed:
                callbacks = self._under_way.pop(work, [])
            for callback in callbacks:
                callback()

    def _serve(self) -> None:
        poll_s = _POLL_S
        while True:
            with self._changed:
                if not self._under_way:
                    poll_s = _POLL_S
                self._changed.wait_for(lambda: self._under_way or self._closed)
                if self._closed:
                    return
                works = list(self._under_way)
            time.sleep(poll_s)  # most messages are done before, because the caller waits for them
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
            for work in works:
                if work.is_completed():
                    poll_s = _POLL_S
                    for callback in self._finished(work):
                        thread = DaemonThread("gradwire-mover callback", or_callers=True)
                        thread.submit(callback)
                        thread.close()
            del works

    def _finished(self, work: MessageWork) -> list[Callable[[], None]]:
        """Return the functions to call for a message that is done; none after stop(), which leaves them to settle()."""
        with self._changed:
            return [] if self._closed else self._under_way.pop(work)
