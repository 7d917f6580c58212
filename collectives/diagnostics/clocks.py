"""What clocks of different hosts are apart, by what a clock shows before and after all ranks have heard of each other.

Whoever returns from an allgather has what every other rank gave when it entered. So for rank r, whose clock is o behind that
of rank 0: what rank 0 showed on entering is no later than what rank r showed on returning, plus o; and the other way round.
That leaves an interval for o, whose width is what two messages took, and every round narrows it: how long a rank let the
others wait does not matter in rounds where it did not. (After Cristian, Probabilistic clock synchronization, 1989.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: How many rounds narrow the interval.
ROUNDS = 16


@dataclass(frozen=True)
class Offset:
    """Says what to add to a rank's clock to have rank 0's, in nanoseconds. error_ns: by how much that may be wrong."""

    offset_ns: int
    error_ns: int


def measure(now_ns: Callable[[], int], gather: Callable[[Sequence[int]], list[list[int]]]) -> list[Offset]:
    """Return the offset of every rank. gather: returns every rank's row of numbers, in rank order. Collective."""
    begins, ends = [], []
    for _ in range(ROUNDS):
        begins.append(now_ns())
        gather([begins[-1]])
        ends.append(now_ns())
    rows = gather([*begins, *ends])
    return offsets([row[:ROUNDS] for row in rows], [row[ROUNDS:] for row in rows])


def offsets(begins: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> list[Offset]:
    """Return the offset of every rank, of what each one's clock showed when it entered and left each round."""
    found = [Offset(0, 0)]
    for begin, end in zip(begins[1:], ends[1:], strict=True):
        least = max(first - last for first, last in zip(begins[0], end, strict=True))
        most = min(last - first for first, last in zip(begin, ends[0], strict=True))
        found.append(Offset((least + most) // 2, (abs(most - least) + 1) // 2))
    return found
