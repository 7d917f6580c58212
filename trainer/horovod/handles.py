"""Handles of asynchronous verbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from collectives import Work
from trainer.world import here

T = TypeVar("T")


class Handle(Generic[T]):
    """Stands for an operation under way: what the *_async verbs return, for poll() and synchronize()."""

    def __init__(self, work: Work, result: T, finish: Callable[[T], T] | None = None) -> None:
        """Take what a Communicator's verb returned with async_op=True. finish: is called once, on the result."""
        self._work = work
        self._result = result
        self._finish = finish

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> T:
        self._work.wait()
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result


def poll(handle: Handle[T]) -> bool:
    """Return whether synchronize(handle) would return, or raise, at once."""
    return _checked(handle).is_completed()


def synchronize(handle: Handle[T]) -> T:
    """Wait for an asynchronous operation; return its result, or raise its error."""
    return _checked(handle).wait()


def _checked(handle: Handle[T]) -> Handle[T]:
    if not isinstance(handle, Handle):
        raise TypeError(f"{here()}a Handle is needed, as the *_async verbs return, not {type(handle).__name__}")
    return handle
