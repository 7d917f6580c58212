"""Handles of asynchronous verbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from gradwire.collectives import Work
from gradwire.trainer.horovod.calls import Call
from gradwire.trainer.world.world import here

T = TypeVar("T")


class Handle(Generic[T]):
    """Stands for an operation under way: what the *_async verbs return, for poll() and synchronize()."""

    def __init__(self, call: Call, works: Sequence[Work], finish: Callable[[], T]) -> None:
        """Take what a Communicator's verbs returned with async_op=True. finish: is called once, when these are done, and
        returns the result."""
        call.goes_on = True
        self._call = call
        self._works = works
        self._finish: Callable[[], T] | None = finish
        self._result: T

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        self._call.release_name()
        return True

    def wait(self) -> T:
        self._call.goes_on = False
        with self._call:
            for work in self._works:
                work.wait()
            if self._finish is not None:
                self._result = self._finish()
                self._finish = None
        return self._result


def poll(handle: Handle[T]) -> bool:
    """Return whether synchronize(handle) would return, or raise, at once."""
    return _checked(handle).is_completed()


def synchronize(handle: Handle[T]) -> T:
    """Wait for an asynchronous operation; return its result, or raise its error. Again, it does the same."""
    return _checked(handle).wait()


def _checked(handle: Handle[T]) -> Handle[T]:
    if not isinstance(handle, Handle):
        raise TypeError(f"{here()}a Handle is needed, as the *_async verbs return, not {type(handle).__name__}")
    return handle
