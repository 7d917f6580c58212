"""One call of a verb: the name that it has while it is under way, and the handle that an asynchronous one returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, TypeVar

from gradwire.collectives import CollectiveError, Communicator, Mismatch, Work
from gradwire.trainer.world.world import here, names_in_flight

T = TypeVar("T")

#: The topic under which a rank posts the verb and the name that it refused last.
_REFUSED = "refused names"


class Call:
    """Has a name to itself from its making until its result is there, and puts the name into errors.

    A name counts for one verb of one Communicator. It is given back at the end of the `with` block, unless a Handle goes
    on with the call: then when its user knows that it is done, by synchronize() or poll(). So it depends on what a
    script does, and not on how fast messages are, whether a name is in flight.

    Raises ValueError where the name is in flight. Nothing is sent then, and since operations are matched by their order, ranks
    stay in step where all refuse the call, or where no other rank makes it. A rank that does make it is one call ahead of those
    that refused it: a Mismatch that follows names them.
    """

    def __init__(self, verb: str, name: str | None, communicator: Communicator) -> None:
        self.goes_on = False
        self._key = verb, name
        self._communicator = weakref.ref(communicator)  # the dict of its names has this call, and must not keep it
        self._names = names_in_flight(communicator)
        if name is None:
            return
        if self._key in self._names:
            communicator.post(_REFUSED, self._key)
            raise ValueError(
                f"{here()}{verb}: the name {name!r} is in flight already; synchronize() the operation that has it first, or "
                f"give another name"
            )
        self._names[self._key] = self

    def __enter__(self) -> None:
        """Leave the name with the call, which has it since its making."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Mismatch):
            self._add_refusals(error)
        if error is not None:
            self._add_name(error)
        if error is not None or not self.goes_on:
            self.release_name()

    def release_name(self) -> None:
        """Let the next operation have the name."""
        if self._names.get(self._key) is self:
            del self._names[self._key]

    def _add_refusals(self, error: Mismatch) -> None:
        """Say which ranks have refused a call that others may have made: then these are not at the same call any more."""
        communicator = self._communicator()
        posted = {} if communicator is None else communicator.posted(_REFUSED)
        said = "".join(
            f"; before that, rank {rank} refused a {verb} with name={name!r}, because the name was in flight there"
            for rank, (verb, name) in sorted(posted.items())
        )
        if said and said not in str(error):
            error.args = (str(error) + said, *error.args[1:])

    def _add_name(self, error: BaseException) -> None:
        verb, name = self._key
        said = f" ({verb}, name={name!r})"
        if name is not None and isinstance(error, (ValueError, TypeError, CollectiveError)):
            message = str(error)
            error.args = (message if message.endswith(said) else message + said, *error.args[1:])


class Handle(Generic[T]):
    """Stands for a running operation: the *_async verbs return it, and poll() and synchronize() take it."""

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
    """Wait for an asynchronous operation; return its result, or raise its error. Further calls do the same."""
    return _checked(handle).wait()


def _checked(handle: Handle[T]) -> Handle[T]:
    if not isinstance(handle, Handle):
        raise TypeError(f"{here()}a Handle is needed, as the *_async verbs return, not {type(handle).__name__}")
    return handle
