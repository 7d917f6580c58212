"""Texts that the processes of a job leave in torch's store, which other programs may read and write."""

from __future__ import annotations

import hashlib
import json

from torch.distributed.distributed_c10d import Store

from gradwire.collectives.control.key import Key, is_sealed
from gradwire.collectives.environment import KEY_FILE
from gradwire.collectives.errors import LinkError

#: How the key of a process that cannot read a text differs from that of the process that has written it.
NO_KEY, A_KEY, ANOTHER_KEY, UNUSABLE_KEY = "no key", "a key", "another key", "an unusable key"


class StrangeText(LinkError):
    """A text in the store is not one of a process with the same key. text: that, empty if it is none. difference: NO_KEY,
    A_KEY or ANOTHER_KEY."""

    def __init__(self, why: str, text: str, difference: str) -> None:
        self.text, self.difference = text, difference
        super().__init__(
            None,
            timed_out=False,
            detail=f"torch's store holds a text of {why}: set {KEY_FILE} to the same key everywhere",
        )


class Texts:
    """Reads and writes texts by name: with a key encrypted, so that only processes with the same key can, and only at the same
    place."""

    def __init__(self, store: Store, key: Key | None, place: str = "", rank: int = -1, size: int = 0) -> None:
        """place: what distinguishes the names of this object from equal names of other jobs, runs and meetings with the key: a
        text is not valid at another place. The same on all processes that share the texts. rank: of this process, for refuse(),
        and for processes that cannot read what this one writes; -1 if it has none. size: the number of ranks; 0 without ranks."""
        self.rank, self.size = rank, size
        self._store, self._key, self._place = store, key, place

    def read(self, name: str) -> str | None:
        """Return the text of a name; None if there is none. Raises StrangeText for one that was written without the key or for
        another place, and the errors of the store."""
        return None if (written := self.written(name)) is None else self.open(name, written)

    def written(self, name: str) -> bytes | None:
        """Return the text of a name as the store holds it; None if there is none. Raises the errors of the store."""
        return self._store.get(name) if self._store.check([name]) else None

    def open(self, name: str, written: bytes) -> str:
        """Return the text of what written() has returned. Raises StrangeText as read()."""
        try:
            found = written.decode()
        except UnicodeDecodeError as error:
            raise StrangeText("another program", "", ANOTHER_KEY) from error
        if self._key is None:
            if is_sealed(found):
                raise StrangeText("a process with a key, and this process has none", found, NO_KEY)
            return found
        if (text := self._key.open(f"{self._place}/{name}", found)) is None:
            if is_sealed(found):
                raise StrangeText("a process with another key, or of another job, run or meeting", found, ANOTHER_KEY)
            raise StrangeText("a process without a key", found, A_KEY)
        return text

    def write(self, name: str, text: str) -> bytes:
        """Write a text, in place of an earlier one. Return and raise as written()."""
        sealed = self._sealed(name, text)
        self._store.set(name, sealed)
        return sealed.encode()

    def write_first(self, name: str, text: str) -> bytes:
        """Write a text unless there is one. Return and raise as written()."""
        return self._store.compare_set(name, "", self._sealed(name, text))

    def refuse(self, name: str, written: bytes, difference: str) -> None:
        """Write that this rank cannot read a text that it has found under a name: without encryption, as the process that has
        written the text could not read it otherwise. written: that of written(); empty for a rank that could read none.
        difference: that of StrangeText, or UNUSABLE_KEY. Raises the errors of the store."""
        self._store.compare_set(self._refusal_of(name, written), "", json.dumps([self.rank, difference]))

    def refusal(self, name: str, written: bytes) -> tuple[int, str] | None:
        """Return what a rank has given to refuse() with the same name and text; None if no rank has. Anyone can write it, but
        the rank is one of the ranks. Raises the errors of the store."""
        refusal = self._refusal_of(name, written)
        if not self._store.check([refusal]):
            return None
        try:
            rank, difference = json.loads(self._store.get(refusal))
        except (ValueError, TypeError):  # another program has written it
            return None
        is_one = type(rank) is int and rank in range(self.size)
        is_one &= difference in (NO_KEY, A_KEY, ANOTHER_KEY, UNUSABLE_KEY)
        return (rank, difference) if is_one else None

    def _refusal_of(self, name: str, written: bytes) -> str:
        """Return the name of the refusals of a text: of this text only, also where others had its name before."""
        return f"refused/{hashlib.sha256(f'{self._place}/{name}/'.encode() + written).hexdigest()}"

    def _sealed(self, name: str, text: str) -> str:
        return text if self._key is None else self._key.seal(f"{self._place}/{name}", text, self.rank)
