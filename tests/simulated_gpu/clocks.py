"""Vector clocks: which work on the streams is ordered before which, and what a thread of the host knows to be done."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: By stream, how much of its work is done before something.
Clock = dict["Timeline", int]

#: Guards everything here and in memory.py. Reentrant, since memory may be given back anywhere.
LOCK = threading.RLock()

#: All streams of this process.
TIMELINES: list[Timeline] = []

_PACKAGE = __name__.rpartition(".")[0]
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Report:
    """What is wrong. kind: 'order', 'host', 'freed' or 'wait'."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"[{self.kind}] {self.text}"


_reports: list[Report] = []


def report(kind: str, text: str) -> None:
    """Remember what is wrong. Each text is kept once."""
    if (found := Report(kind, text)) not in _reports:
        _reports.append(found)


def reports() -> list[Report]:
    """Return what was found since the last call, and forget it."""
    found, _reports[:] = list(_reports), []
    return found


def check() -> None:
    """Raise AssertionError with all reports since the last call, if there are any."""
    if found := reports():
        raise AssertionError("\n".join(map(str, found)))


class Gate:
    """Work on a stream that takes real time: the exchange of a message with another process."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.open = self._done.set
        self.is_open = self._done.is_set

    def pass_through(self) -> None:
        """Wait, in place of the device, until the work is done."""
        _raw_wait(self._done)


def _raw_wait(event: threading.Event) -> None:
    with waiting_inside():
        event.wait()


class _Inside(threading.local):
    depth = 0


_inside = _Inside()


class waiting_inside:  # noqa: N801  # a context manager
    """In the block, the stand-in itself waits: no wait of the program is recorded."""

    def __enter__(self) -> None:
        _inside.depth += 1

    def __exit__(self, *_: object) -> None:
        _inside.depth -= 1


def is_inside() -> bool:
    """Return whether the stand-in itself waits in this thread."""
    return _inside.depth > 0


class Timeline:
    """What happens on one stream, in order. clock: what is ordered before its next work, its own work included."""

    def __init__(self, device: torch.device, name: str = "") -> None:
        self.device = device
        self.number = next(_numbers)
        self.name = name or f"stream {self.number}"
        self.clock: Clock = {self: 0}
        self._gates: list[tuple[int, Gate]] = []
        with LOCK:
            TIMELINES.append(self)

    @property
    def count(self) -> int:
        """How much work has been launched."""
        return self.clock[self]

    def launch(self, gate: Gate | None = None) -> Clock:
        """Launch work, after what the thread knows to be done. Return what is ordered before it, itself included."""
        with LOCK:
            self.clock = merged(self.clock, known())
            self.clock[self] += 1
            if gate is not None:
                self._gates = [(count, each) for count, each in self._gates if not each.is_open()]
                self._gates.append((self.count, gate))
            return self.clock

    def wait_for(self, clock: Mapping[Timeline, int]) -> None:
        """Let later work wait for what a clock says."""
        with LOCK:
            self.clock = merged(self.clock, clock)

    def closed_gates(self, upto: int) -> list[Gate]:
        """Return the gates of work that is not done yet, among the first `upto`."""
        return [gate for count, gate in self._gates if count <= upto and not gate.is_open()]

    def __repr__(self) -> str:
        return f"the {self.name} of {self.device}"


def merged(one: Mapping[Timeline, int], other: Mapping[Timeline, int]) -> Clock:
    """Return the later of each stream's times."""
    result = dict(one)
    for stream, count in other.items():
        if result.get(stream, -1) < count:
            result[stream] = count
    return result


def closed_gates(clock: Mapping[Timeline, int]) -> list[Gate]:
    """Return the gates of all work before a time that is not done yet."""
    with LOCK:
        return [gate for stream, count in clock.items() for gate in stream.closed_gates(count)]


def pass_gates(clock: Mapping[Timeline, int]) -> None:
    """Wait, in place of the device, until all work before a time is done."""
    for gate in closed_gates(clock):
        gate.pass_through()


def launched() -> Clock:
    """Return all work that has been launched on any stream."""
    with LOCK:
        return {each: each.count for each in TIMELINES}


# What a thread of the host knows


class _Host(threading.local):
    def __init__(self) -> None:
        self.known: Clock = {}


_host = _Host()


def known() -> Clock:
    """Return what this thread knows to be done, since it has waited for it."""
    return _host.known


def learn(clock: Mapping[Timeline, int]) -> None:
    """Let this thread know that all work before a time is done."""
    with LOCK:
        _host.known = merged(_host.known, clock)


def where(lines: int = 1) -> str:
    """Return the line of the program that is running, and its callers: the innermost ones of gradwire, or else the innermost one
    outside of torch."""
    frame: Any = sys._getframe(1)
    found: list[str] = []
    outside = ""
    while frame is not None and len(found) < lines:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("gradwire."):
            found.append(_line(frame))
        elif not outside and not module.startswith(("torch", _PACKAGE, "threading", "contextlib", "concurrent")):
            outside = _line(frame)
        frame = frame.f_back
    return " < ".join(found) or outside


def calls(modules: Sequence[str]) -> bool:
    """Return whether a function of one of the modules has called this one."""
    frame: Any = sys._getframe(1) if modules else None
    while frame is not None:
        if frame.f_globals.get("__name__", "") in modules:
            return True
        frame = frame.f_back
    return False


def _line(frame: Any) -> str:
    name = "/".join(frame.f_code.co_filename.split("/")[-3:])
    return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
