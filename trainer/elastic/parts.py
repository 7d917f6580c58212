"""Find the commit that ranks restore: the newest one of which every part is still held by some host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.collectives.errors import ranks_text


class Part(NamedTuple):
    """The part of commit `number` from rank `rank` of `size`: all of the rank's own state, and bytes start to stop of the
    `total` bytes of the shared state. era: greater than in all parts that the last restore() found. name: that of the slot."""

    era: int
    number: int
    size: int
    rank: int
    start: int
    stop: int
    total: int
    name: str

    @property
    def commit(self) -> tuple[int, int, int]:
        return self.era, self.number, self.size


@dataclass(frozen=True)
class Found:
    """A commit without missing parts. held: by host, its parts by rank. whole: the hosts that hold all of the shared state."""

    commit: tuple[int, int, int]
    held: tuple[dict[int, Part], ...]
    whole: tuple[int, ...]


def newest(parts: Sequence[Iterable[Part]]) -> tuple[Found | None, list[str]]:
    """Return the newest commit without missing parts, or None, and a message on what is missing of each newer commit. parts:
    those that each host holds."""
    lacks: list[str] = []
    for commit in sorted({part.commit for theirs in parts for part in theirs}, reverse=True):
        held = tuple({part.rank: part for part in theirs if part.commit == commit} for theirs in parts)
        whole = tuple(host for host, theirs in enumerate(held) if _is_covered(theirs.values()))
        missing = set(range(commit[2])) - {rank for theirs in held for rank in theirs}
        if whole and not missing:
            return Found(commit, held, whole), lacks
        lost = f"the state of {ranks_text(missing)}" if missing else "all of the shared state"
        lacks.append(f"commit {commit[1]} is incomplete, so it is not used: no host has {lost}")
    return None, lacks


def takers(saved: int, size: int, now: int) -> set[int]:
    """Return which of `now` ranks restore the own state of rank `saved` of `size`. Each of the `now` ranks restores at least
    one state, and at least one rank restores each state."""
    return {saved % now, *(rank for rank in range(size, now) if rank % size == saved)}


def _is_covered(parts: Iterable[Part]) -> bool:
    """Return whether parts of one commit together hold all of the shared state."""
    reached, total = 0, None
    for part in sorted(parts, key=lambda part: (part.start, part.stop)):
        total = part.total
        if part.start <= reached:
            reached = max(reached, part.stop)
    return reached == total
