"""Texts that the processes of a job leave in torch's store, which other programs may read and write."""

from __future__ import annotations

from torch.distributed.distributed_c10d import Store

from gradwire.collectives.control.key import Key, is_sealed
from gradwire.collectives.environment import KEY_FILE
from gradwire.collectives.errors import LinkError


class StrangeText(LinkError):
    """A text in the store is not one of a process with the same key."""

    def __init__(self, why: str) -> None:
        super().__init__(
            None,
            timed_out=False,
            detail=f"torch's store holds a text of {why}: set {KEY_FILE} to the same key everywhere",
        )


class Texts:
    """Reads and writes texts by name: with a key encrypted, so that only processes with the same key can, and only at the same
    place."""

    def __init__(self, store: Store, key: Key | None, place: str = "") -> None:
        """place: what distinguishes the names of this object from equal names of other jobs, runs and meetings with the key: a
        text is not valid at another place. The same on all processes that share the texts."""
        self._store, self._key, self._place = store, key, place

    def read(self, name: str) -> str | None:
        """Return the text of a name; None if there is none. Raises StrangeText for one that was written without the key or for
        another place, and the errors of the store."""
        return self._opened(name, self._store.get(name)) if self._store.check([name]) else None

    def write(self, name: str, text: str) -> None:
        """Write a text, in place of an earlier one. Raises the errors of the store."""
        self._store.set(name, self._sealed(name, text))

    def write_first(self, name: str, text: str) -> str:
        """Write a text unless there is one, and return that of the store. Raises as read()."""
        return self._opened(name, self._store.compare_set(name, "", self._sealed(name, text)))

    def _sealed(self, name: str, text: str) -> str:
        return text if self._key is None else self._key.seal(f"{self._place}/{name}", text)

    def _opened(self, name: str, written: bytes) -> str:
        try:
            found = written.decode()
        except UnicodeDecodeError as error:
            raise StrangeText("another program") from error
        if self._key is None:
            if is_sealed(found):
                raise StrangeText("a process with a key, and this process has none")
            return found
        if (text := self._key.open(f"{self._place}/{name}", found)) is None:
            sealed = "a process with another key, or of another job, run or meeting"
            raise StrangeText(sealed if is_sealed(found) else "a process without a key")
        return text
