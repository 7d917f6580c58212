"""What a part of the benchmark of GPUs has found, and the goals that its figures are printed beside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Goal:
    """A figure, and what it is to be: at most `limit`, or at least, if it is a share that should be large."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def is_reached(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        word = "least" if self.at_least else "most"
        reached = "reached" if self.is_reached else "not reached"
        return f"# {self.what}: {self.value:.2f} (goal: at {word} {self.limit:g}; {reached})"


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
