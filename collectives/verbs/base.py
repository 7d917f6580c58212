"""The common base of the families of verbs: the engine that runs them."""

from __future__ import annotations

from gradwire.collectives.engine.engine import Engine


class Ranks:
    """One rank's view of a group of ranks."""

    _engine: Engine

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._engine.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self._engine.size
