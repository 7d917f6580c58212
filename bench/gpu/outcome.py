"""What a part of the benchmark of GPUs has found, and the goals that its figures are printed beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Goal:
    """A figure, and what it is to be: at most `limit`, or at least, if it should be large. value: None if it was not measured;
    then `missing` says why."""

    what: str
    value: float | None
    limit: float
    at_least: bool = False
    missing: str = ""

    @property
    def is_reached(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        goal = f"goal: at {'least' if self.at_least else 'most'} {self.limit:g}"
        if self.value is None:
            return f"# {self.what}: not measured: {self.missing} ({goal})"
        return f"# {self.what}: {self.value:.2f} ({goal}; {'reached' if self.is_reached else 'not reached'})"


def summary(goals: Sequence[Goal]) -> list[str]:
    """Return the line that counts goals; none without goals."""
    if not goals:
        return []
    reached, missing = sum(goal.is_reached for goal in goals), sum(goal.value is None for goal in goals)
    return [f"# {reached} of {len(goals)} goals reached" + (f", {missing} not measured" if missing else "")]


@dataclass
class Outcome:
    """The results of a part. lines: what to print. rows: dataclasses, or dicts of such. wrong: a line for each failed
    check."""

    lines: list[str] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Append the results of another part, without its lines."""
        self.rows += other.rows
        self.goals += other.goals
        self.wrong += other.wrong
