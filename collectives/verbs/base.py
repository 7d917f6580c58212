"""The common base of the families of verbs: the engine that runs them, and their options.

The options are named twice: with their defaults in each verb's signature, and here for type checkers, where a verb is overloaded
because async_op=True makes it return a Work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.engine.engine import Engine

if TYPE_CHECKING:
    from typing_extensions import Required


class Async(TypedDict, total=False):
    """The options of a verb that returns a Work."""

    algorithm: str
    async_op: Required[Literal[True]]


class Options(TypedDict, total=False):
    """The options of a verb that may return a Work."""

    algorithm: str
    async_op: bool


class Scaled(TypedDict, total=False):
    """The options of an allreduce of numbers, but for async_op."""

    prescale: float
    postscale: float
    algorithm: str


class Coded(Scaled, total=False):
    """The options of an allreduce of numbers or codes, but for async_op."""

    compression: str | Codec | None
    feedback: Feedback | None
    step: int | None
    seed: int | None


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
