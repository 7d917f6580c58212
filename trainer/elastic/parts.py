"""Which commit ranks go on from: the newest of which some host or other still holds every part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.collectives.errors import ranks_text


class Part(NamedTuple):
    """What rank `rank` of `size` kept of the commit `number`: all that is its own, and bytes start to stop of the `total` that
    all ranks have in common. era: how often ranks had been restored before. name: of the slot that holds it."""

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
    """A commit that is held whole. held: by host, its parts by rank. whole: the hosts that hold all that ranks have in common."""

    commit: tuple[int, int, int]
    held: tuple[dict[int, Part], ...]
    whole: tuple[int, ...]


def newest(parts: Sequence[Iterable[Part]]) -> tuple[Found | None, list[str]]:
    """Return the newest commit that is held whole, of the parts by host; and for each newer one what of it is lost."""
    lacks: list[str] = []
    for commit in sorted({part.commit for theirs in parts for part in theirs}, reverse=True):
        held = tuple({part.rank: part for part in theirs if part.commit == commit} for theirs in parts)
        whole = tuple(host for host, theirs in enumerate(held) if _is_covered(theirs.values()))
        missing = set(range(commit[2])) - {rank for theirs in held for rank in theirs}
        if whole and not missing:
            return Found(commit, held, whole), lacks
        lost = f"the state of {ranks_text(missing)}" if missing else "all of the shared state"
        lacks.append(f"no host holds {lost} of commit {commit[1]}")
    return None, lacks


def takers(saved: int, size: int, now: int) -> set[int]:
    """Return which of the ranks of now go on with what rank `saved` of `size` kept: each of them with one rank's at least, and
    what every rank kept goes to one of them at least."""
    return {saved % now, *(rank for rank in range(size, now) if rank % size == saved)}


def _is_covered(parts: Iterable[Part]) -> bool:
    """Return whether parts of one commit together hold all that its ranks have in common."""
    reached, total = 0, None
    for part in sorted(parts, key=lambda part: (part.start, part.stop)):
        total = part.total
        if part.start <= reached:
            reached = max(reached, part.stop)
    return reached == total
