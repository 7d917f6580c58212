"""What this rank did, and when: events in memory, for a timeline of all ranks."""

from __future__ import annotations

import socket
import time
from collections import deque
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

#: How many events are kept, the last ones: a few hundred bytes each.
MOST_EVENTS = 100_000

#: The clock of events, in nanoseconds. Only differences mean anything.
now_ns = time.perf_counter_ns


@dataclass(frozen=True)
class Recording:
    """Holds what one rank has recorded: (number of the lane, name, begin, duration or None where it is a moment, details), times
    in nanoseconds of its own clock.

    lanes: their names. dropped: how many events were forgotten, the oldest ones. host: the name of this rank's.
    """

    lanes: list[str]
    events: list[tuple[int, str, int, int | None, dict[str, Any] | None]]
    dropped: int = 0
    host: str = ""

    def to_record(self) -> dict[str, Any]:
        """Return it as numbers, strings and lists; from_record() is the way back."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Recording:
        """Return what to_record() was made of."""
        events = [(lane, name, begin, duration, details) for lane, name, begin, duration, details in record["events"]]
        return cls(record["lanes"], events, record["dropped"], record["host"])


class Timeline:
    """Records events of this process. marks_cycles: whether whoever trains marks where each exchange of gradients begins."""

    def __init__(self, *, marks_cycles: bool = False, most_events: int = MOST_EVENTS) -> None:
        self.marks_cycles = marks_cycles
        self._events: deque[tuple[int, str, int, int | None, dict[str, Any] | None]] = deque(maxlen=most_events)
        self._lanes: dict[str, Lane] = {}

    def lane(self, name: str) -> Lane:
        """Return the lane of this name, made when first asked for."""
        if name not in self._lanes:
            self._lanes[name] = Lane(self._events, len(self._lanes))
        return self._lanes[name]

    def recording(self) -> Recording:
        """Return what is recorded."""
        events = list(self._events)
        seen = sum(lane.events for lane in self._lanes.values())
        return Recording(list(self._lanes), events, max(0, seen - len(events)), socket.gethostname())


class Lane:
    """One row of a timeline, for what happens one after the other. events: how many it has had."""

    __slots__ = ("_kept", "_notes", "_number", "events")

    def __init__(self, kept: deque[tuple[int, str, int, int | None, dict[str, Any] | None]], number: int) -> None:
        self.events = 0
        self._kept = kept
        self._number = number
        self._notes: dict[str, Any] = {}

    def span(self, name: str, begin_ns: int, **details: Any) -> None:
        """Add what began then and ends now."""
        self.events += 1
        self._kept.append((self._number, name, begin_ns, now_ns() - begin_ns, details or None))

    def mark(self, name: str, **details: Any) -> None:
        """Add a moment."""
        self.events += 1
        self._kept.append((self._number, name, now_ns(), None, details or None))

    def during(self, name: str, **details: Any) -> Span:
        """Return what adds a span from `with` to its end."""
        return Span(self, name, details)

    def note(self, algorithm: str, nbytes: int) -> None:
        """Keep what the operation that runs does, for take_notes()."""
        self._notes["bytes"] = self._notes.get("bytes", 0) + nbytes
        known = self._notes.get("algorithm")
        self._notes["algorithm"] = algorithm if known in (None, algorithm) else f"{known}, {algorithm}"

    def take_notes(self) -> dict[str, Any]:
        """Return what was noted since the last time."""
        notes, self._notes = self._notes, {}
        return notes


class Span:
    """Adds to a lane what happens inside of `with`."""

    __slots__ = ("_begin_ns", "_details", "_lane", "_name")

    def __init__(self, lane: Lane, name: str, details: dict[str, Any]) -> None:
        self._lane = lane
        self._name = name
        self._details = details
        self._begin_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = now_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lane.span(self._name, self._begin_ns, **self._details)
