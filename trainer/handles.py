"""Handles of asynchronous verbs."""

from __future__ import annotations

from typing import Generic, TypeVar

from collectives import Work

T = TypeVar("T")


class Handle(Generic[T]):
    """An operation under way: what the *_async verbs return, for poll() and synchronize()."""

    def __init__(self, work: Work, result: T) -> None:
        self.work = work
        self.result = result


def poll(handle: Handle[T]) -> bool:
    """True once synchronize(handle) would return, or raise, at once."""
    return handle.work.is_completed()


def synchronize(handle: Handle[T]) -> T:
    """Wait for an asynchronous operation; return its result, or raise its error."""
    handle.work.wait()
    return handle.result
