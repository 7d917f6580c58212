"""The end of backward(), at which DDP waits for the exchanges of its buckets."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType

from gradwire.collectives.torch_internals import (
    OUTSIDE_BACKWARD,
    called_by_accumulation,
    graph_task,
    when_backward_ends,
)


def is_delayable(called: FrameType) -> bool:
    """Return whether the exchange of a bucket of DDP may begin at the end of backward(): only if DDP's reducer has called, when a
    gradient was accumulated. called: the frame of the function that torch has called.

    Python code inside backward(), such as a hook, may wait for a future before backward() ends. In the first step with
    static_graph=True, DDP calls at the end, and waits at once. Other threads than the main one do not run what they wait for.
    """
    return called_by_accumulation(called) and threading.current_thread() is threading.main_thread()


class EndOfBackward:
    """Runs the exchanges of DDP's buckets at the end of backward(), in the thread that called it.

    DDP waits in a function that the engine calls at the end, which DDP registers after its last call of an exchange. The function
    of this object, which is registered in the calls, comes before.
    """

    def __init__(self) -> None:
        self._latest: weakref.ref[_Delayed] | None = None  # the engine keeps it until backward() ends or fails

    def add(self, run: Callable[[], None], begin: Callable[[], None]) -> None:
        """Delay an exchange in a call that is_delayable(). run: exchanges, at the end of the running backward(), which raises its
        errors. begin: lets the exchange begin in the background instead; it is called if backward() fails."""
        task = graph_task()
        delayed = self._delayed()
        if delayed is None or delayed.task != task:
            self.begin()
            delayed = _Delayed(task)
            when_backward_ends(delayed)
            self._latest = weakref.ref(delayed)
        delayed.exchanges.append((run, begin))

    def begin(self) -> None:
        """Let all delayed exchanges begin in the background. Call it before any other one begins: DDP may wait for them in a
        backward() inside of the one in which it called them, as reentrant checkpoints do."""
        if (delayed := self._delayed()) is not None:
            delayed.begin()

    def _delayed(self) -> _Delayed | None:
        return None if self._latest is None else self._latest()


class _Delayed:
    """Runs the delayed exchanges of one backward(), when the engine calls this object. If backward() fails, the engine only drops
    it."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.exchanges: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()

    def __call__(self) -> None:
        self.task = OUTSIDE_BACKWARD  # what is called from now on needs another object
        for run, _ in self._taken():
            run()

    def begin(self) -> None:
        """Let the exchanges begin in the background."""
        for _, begin in self._taken():
            begin()

    def _taken(self) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
        """Yield the exchanges that are left, each to one of the threads that call this."""
        with suppress(IndexError):
            while exchange := self.exchanges.popleft():
                yield exchange

    def __del__(self) -> None:
        self.begin()
