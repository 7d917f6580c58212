"""A call of a verb: its name while it is in flight, and the handle that an asynchronous call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, TypeVar

from gradwire.collectives import CollectiveError, Mismatch, Work
from gradwire.collectives.errors import add_rank
from gradwire.trainer.world.process_sets import ProcessSetLike
from gradwire.trainer.world.world import communicator_of, names_in_flight, names_rank

T = TypeVar("T")

#: The topic under which a rank posts the verb and the name of the call that it refused last.
_REFUSED = "refused names"


class NamedCall:
    """A call of a verb. It adds this rank and its name to errors, and reserves the name until its result is returned.

    communicator: that of the process set. A name is reserved for one verb of one Communicator. It is released at the end of the
    `with` block, or if a Handle continues the call, when synchronize() returns or poll() returns True. So a script decides
    whether a name is in flight, and not the speed of messages.

    Raises ValueError if the name is in flight, before anything is sent. Operations are matched by their order: ranks remain in
    step if all of them refuse the call, or no other rank makes it. A rank that makes it is one call ahead of those that refused
    it, which the following Mismatch then names.
    """

    def __init__(self, verb: str, name: str | None, process_set: ProcessSetLike) -> None:
        self.communicator = communicator_of(process_set)
        self.verb = verb
        self.goes_on = False
        self._key = verb, name
        self._token: object = None  # what the name is reserved with
        if name is None:
            return
        self._names = names_in_flight(self.communicator)
        if self._key in self._names:
            self.communicator.post(_REFUSED, self._key)
            raise ValueError(
                f"rank {self.communicator.rank}: {verb}: the name {name!r} is in flight already; synchronize() the operation "
                "that has it first, or give another name"
            )
        self._token = self._names[self._key] = object()

    def __enter__(self) -> NamedCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            add_rank(error, self.communicator.rank)
        if isinstance(error, Mismatch):
            self._add_refusals(error)
        if isinstance(error, (ValueError, TypeError, CollectiveError)) and self._key[1] is not None:
            _append(error, " ({}, name={!r})".format(*self._key))
        if error is not None or not self.goes_on:
            self.release_name()

    def release_name(self) -> None:
        """Release the name for the next call."""
        if self._token is not None and self._names.get(self._key) is self._token:
            del self._names[self._key]

    def _add_refusals(self, error: Mismatch) -> None:
        """Add the ranks that have refused a call which others may have made, so that their calls no longer correspond."""
        refusals = (
            f"; before that, rank {rank} refused a {verb} with name={name!r}, because the name was in flight there"
            for rank, (verb, name) in sorted(self.communicator.posted(_REFUSED).items())
        )
        _append(error, "".join(refusals))


def _append(error: Exception, text: str) -> None:
    """Append a text to the message of an error that lacks it: synchronize() raises the same error again."""
    if text not in (message := str(error)):
        error.args = (message + text, *error.args[1:])


class Handle(Generic[T]):
    """The handle of a running operation: the *_async verbs return it, and poll() and synchronize() take it."""

    def __init__(self, call: NamedCall, works: Sequence[Work], finish: Callable[[], T]) -> None:
        """Make a handle of what a Communicator's verbs returned with async_op=True. finish: a function that is called once all
        Works are complete, and returns the result."""
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
    """Wait for an asynchronous operation; return its result, or raise its error. Further calls do the same."""
    return _checked(handle).wait()


def _checked(handle: Handle[T]) -> Handle[T]:
    with names_rank:
        if not isinstance(handle, Handle):
            raise TypeError(f"a Handle is needed, as the *_async verbs return, not {type(handle).__name__}")
        return handle
