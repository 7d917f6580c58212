"""A timeline of all ranks: their events, the offsets of their clocks, and the file for Perfetto and Chrome."""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradwire.collectives.schedules.program import Kind

#: The maximum number of events that are kept, of a few hundred bytes each. The oldest are dropped.
MOST_EVENTS = 100_000

#: The number of rounds in which the offsets of the clocks are measured.
ROUNDS = 16

#: The clock of events, in nanoseconds. Only differences of its times have a meaning.
now_ns = time.perf_counter_ns

#: The names of a program's instructions that move no message.
_NAMES = {
    Kind.REDUCE: "reduce",
    Kind.ENCODE: "encode",
    Kind.DECODE: "decode",
    Kind.ADD: "decode",
    Kind.COMPLETE: "divide",
}

#: (number of the lane, name, begin, duration, details), in nanoseconds of the rank's own clock. The duration is None
#: for an event without one.
Event = tuple[int, str, int, int | None, dict[str, Any] | None]


@dataclass(frozen=True)
class Recording:
    """Holds the events that one rank has recorded. lanes: the names of the lanes, by number. dropped: how many of the
    oldest events were dropped. host: the name of the rank's host."""

    lanes: list[str]
    events: list[Event]
    dropped: int = 0
    host: str = ""

    def to_record(self) -> dict[str, Any]:
        """Return the recording as numbers, strings and lists, for from_record()."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Recording:
        """Return the recording from which to_record() made a record."""
        return cls(**record | {"events": [tuple(event) for event in record["events"]]})


class Timeline:
    """Records events of this process. marks_cycles: whether the trainer marks the start of each exchange."""

    def __init__(self, *, marks_cycles: bool = False, most_events: int = MOST_EVENTS) -> None:
        self.marks_cycles = marks_cycles
        self._events: deque[Event] = deque(maxlen=most_events)
        self._lanes: dict[str, Lane] = {}

    def lane(self, name: str) -> Lane:
        """Return the lane with this name. The first call makes it."""
        if name not in self._lanes:
            self._lanes[name] = Lane(self._events, len(self._lanes))
        return self._lanes[name]

    def recording(self) -> Recording:
        """Return the events so far."""
        events = list(self._events)
        seen = sum(lane.events for lane in self._lanes.values())
        return Recording(list(self._lanes), events, max(0, seen - len(events)), socket.gethostname())


class Lane:
    """One row of a timeline, whose spans are nested or do not overlap. events: how many were recorded."""

    def __init__(self, kept: deque[Event], number: int) -> None:
        self.events = 0
        self._kept = kept
        self._number = number

    def span(self, name: str, begin_ns: int, **details: Any) -> None:
        """Add a span that began at begin_ns and ends now."""
        self._add(name, begin_ns, now_ns() - begin_ns, details)

    def _add(self, name: str, begin_ns: int, duration_ns: int | None, details: dict[str, Any]) -> None:
        self.events += 1
        self._kept.append((self._number, name, begin_ns, duration_ns, details or None))

    def program(
        self,
        instructions: Iterable[Sequence[int]],
        wire_bytes: Callable[[int], int],
        begin_ns: int,
        ends_ns: Iterable[int],
    ) -> None:
        """Add a span for each instruction of a program that has run, except that messages which begin together have one. See
        Trace for the arguments."""
        messages: dict[int, dict[str, Any]] = {}
        to: list[int] = []
        nbytes = 0
        for (kind, peer, _, length, _, number, *_), end_ns in zip(instructions, ends_ns, strict=True):
            duration_ns = end_ns - begin_ns
            if kind == Kind.RECEIVE:
                messages[number] = {"of": peer}
            elif kind == Kind.SEND:
                messages[number] = {"to": peer}
                to.append(peer)
                nbytes += wire_bytes(length)
            elif kind == Kind.POST:
                if to:
                    self._add("send", begin_ns, duration_ns, {"bytes": nbytes, "to": to})
                to, nbytes = [], 0
            elif kind == Kind.WAIT:
                self._add("wait", begin_ns, duration_ns, messages.pop(number))
            else:
                self._add(_NAMES[Kind(kind)], begin_ns, duration_ns, {"elements": length})
            begin_ns = end_ns

    def mark(self, name: str, **details: Any) -> None:
        """Add an event without a duration."""
        self._add(name, now_ns(), None, details)

    @contextmanager
    def during(self, name: str, **details: Any) -> Iterator[None]:
        """Record a `with` block as a span."""
        begin_ns = now_ns()
        try:
            yield
        finally:
            self.span(name, begin_ns, **details)


@dataclass(frozen=True)
class Offset:
    """The offset of a rank's clock. offset_ns: the nanoseconds to add to its time to get that of rank 0's clock.
    error_ns: the maximum error of offset_ns."""

    offset_ns: int
    error_ns: int


def measure(now_ns: Callable[[], int], gather: Callable[[Sequence[int]], list[list[int]]]) -> list[Offset]:
    """Return the offset of every rank. gather: returns the rows of integers of all ranks, in rank order. Collective."""
    begins, ends = [], []
    for _ in range(ROUNDS):
        begins.append(now_ns())
        gather([begins[-1]])
        ends.append(now_ns())
    rows = gather([*begins, *ends])
    return offsets([row[:ROUNDS] for row in rows], [row[ROUNDS:] for row in rows])


def offsets(begins: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> list[Offset]:
    """Return the offset of every rank. begins, ends: by rank and round, when the rank entered and left an allgather, in
    nanoseconds of its own clock.

    A rank leaves an allgather after every rank has entered it. Let o be the offset of rank r. Then rank 0's begin is at
    most rank r's end plus o, and rank r's begin plus o is at most rank 0's end. So each round gives an interval that
    contains o, about as wide as the time of two messages. The result is the middle of the intersection of all
    intervals, so a late rank spoils only its own rounds. (After Cristian, Probabilistic clock synchronization, 1989.)
    """
    found = [Offset(0, 0)]
    for begin, end in zip(begins[1:], ends[1:], strict=True):
        least = max(first - last for first, last in zip(begins[0], end, strict=True))
        most = min(last - first for first, last in zip(begin, ends[0], strict=True))
        found.append(Offset((least + most) // 2, (abs(most - least) + 1) // 2))
    return found


def trace_of(recordings: Mapping[int, Recording], offsets: Sequence[Offset]) -> dict[str, Any]:
    """Return the trace of recordings in Chrome's trace event format: one process for each rank, with times on the clock
    of rank 0, in microseconds since the first event. recordings: by rank. offsets: those of all ranks."""
    begins = [event[2] + offsets[rank].offset_ns for rank, each in recordings.items() for event in each.events]
    zero = min(begins, default=0)
    events: list[dict[str, Any]] = []
    other: dict[str, Any] = {}
    for rank, recording in sorted(recordings.items()):
        names = [("process", 0, f"rank {rank} on {recording.host}", rank)]
        names += [("thread", lane, name, lane) for lane, name in enumerate(recording.lanes)]
        for kind, lane, name, index in names:
            event = {"ph": "M", "pid": rank, "tid": lane}
            events.append(event | {"name": f"{kind}_name", "args": {"name": name}})
            events.append(event | {"name": f"{kind}_sort_index", "args": {"sort_index": index}})
        shift = offsets[rank].offset_ns - zero
        for lane, name, begin_ns, duration_ns, details in sorted(recording.events, key=lambda event: event[2]):
            event = {"name": name, "pid": rank, "tid": lane, "ts": (begin_ns + shift) / 1e3}
            event |= {"ph": "i", "s": "t"} if duration_ns is None else {"ph": "X", "dur": duration_ns / 1e3}
            events.append(event | ({"args": details} if details else {}))
        dropped, error_ns = recording.dropped, offsets[rank].error_ns
        other[f"rank {rank}"] = {"clock_error_us": error_ns / 1e3, "events_dropped": dropped}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace, all of it or nothing. Raises OSError."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(trace))
    beside.replace(path)
