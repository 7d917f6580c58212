"""Timelines as a file that Perfetto and Chrome show: the trace event format, one process for each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.collectives.diagnostics.clocks import Offset
from gradwire.collectives.diagnostics.timeline import Recording


def trace_of(recordings: Mapping[int, Recording], offsets: Sequence[Offset]) -> dict[str, Any]:
    """Return the trace of recordings, by rank, on the clock of rank 0, from the first event on, in microseconds.

    offsets: of all ranks.
    """
    begins = [
        event[2] + offsets[rank].offset_ns for rank, recording in recordings.items() for event in recording.events
    ]
    zero = min(begins, default=0)
    events: list[dict[str, Any]] = []
    for rank, recording in sorted(recordings.items()):
        events.append(_named("process_name", rank, 0, name=f"rank {rank} on {recording.host}"))
        events.append(_named("process_sort_index", rank, 0, sort_index=rank))
        for lane, name in enumerate(recording.lanes):
            events.append(_named("thread_name", rank, lane, name=name))
            events.append(_named("thread_sort_index", rank, lane, sort_index=lane))
        shift = offsets[rank].offset_ns - zero
        for lane, name, begin_ns, duration_ns, details in sorted(recording.events, key=lambda event: event[2]):
            event: dict[str, Any] = {"name": name, "pid": rank, "tid": lane, "ts": (begin_ns + shift) / 1e3}
            event |= {"ph": "i", "s": "t"} if duration_ns is None else {"ph": "X", "dur": duration_ns / 1e3}
            if details:
                event["args"] = details
            events.append(event)
    told = {
        f"rank {rank}": {"clock_error_us": offsets[rank].error_ns / 1e3, "events_dropped": recording.dropped}
        for rank, recording in sorted(recordings.items())
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace, all of it or nothing."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(trace))
    beside.replace(path)


def _named(kind: str, rank: int, lane: int, **details: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": details}
