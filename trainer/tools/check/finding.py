"""The result of one test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Holds the result of one test, as text, and the remedy for a problem.

    state: "note" if training works, but slower or not in every situation.
    """

    state: Literal["ok", "note", "failed"]
    what: str
    do: str | None = None

    def __str__(self) -> str:
        return f"{self.state:<7} {self.what}" + (f"\n        -> {self.do}" if self.do else "")
