"""One call of a verb, and the name that it has."""

from __future__ import annotations

from types import TracebackType

from collectives import CollectiveError, Communicator
from trainer.world import here, names_in_flight


class Call:
    """Has a name to itself from its making until its result is there, and puts the name into errors.

    A name counts for one verb of one Communicator. It is given back at the end of the `with` block, unless a Handle goes
    on with the call: then when its user knows that it is done, by synchronize() or poll(). So it depends on what a
    script does, and not on how fast messages are, whether a name is in flight.

    Raises ValueError where the name is in flight.
    """

    def __init__(self, verb: str, name: str | None, communicator: Communicator) -> None:
        self.goes_on = False
        self._key = verb, name
        self._names = names_in_flight(communicator)
        if name is None:
            return
        if self._key in self._names:
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
        if error is not None:
            self._tell_name(error)
        if error is not None or not self.goes_on:
            self.release_name()

    def release_name(self) -> None:
        """Let the next operation have the name."""
        if self._names.get(self._key) is self:
            del self._names[self._key]

    def _tell_name(self, error: BaseException) -> None:
        verb, name = self._key
        said = f" ({verb}, name={name!r})"
        if name is not None and isinstance(error, (ValueError, TypeError, CollectiveError)):
            message = str(error)
            error.args = (message if message.endswith(said) else message + said, *error.args[1:])
