"""How what a GPU computes crosses pinned memory, piece by piece, to a transport that moves CPU tensors only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from gradwire.collectives.errors import LinkError
from gradwire.collectives.schedules.program import Instruction
from gradwire.collectives.transports.loop import Payload

#: What is ready to be sent goes before the next layer.
_PRIORITY = -1

#: The shortest and the longest pause of a host that waits for an event, in seconds.
_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 5e-4


class SideStreams:
    """One stream on each device, beside those of the program."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of a device."""
        found = self._streams.get(device)
        return found or self._streams.setdefault(device, torch.cuda.Stream(device, priority=_PRIORITY))


def event_after(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    """Return an event after all that is on a stream."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


def wait_for(event: torch.cuda.Event, until: Callable[[], bool]) -> bool:
    """Let the host wait for an event. Return False once until() returns True before."""
    pause_s = _PAUSE_S
    while not event.query():
        if until():
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def await_copies(events: Iterable[torch.cuda.Event], deadline: float) -> None:
    """Let the host wait for copies. Raises LinkError if they have not ended by the deadline (time.monotonic() seconds)."""
    for event in events:
        if not wait_for(event, lambda: time.monotonic() >= deadline):
            raise LinkError(None, timed_out=True, detail="the GPU has not copied what this rank sends")


class Crossed(Payload):
    """A payload of numbers or codes on a GPU, of which every message crosses pinned memory.

    Whoever calls this object makes one stream current, on which the payload works. Messages are copied to pinned memory on the
    copy stream; the host waits for a copy when its message is posted. Received messages are copied to the GPU on the current
    stream. payload: as of a GPU; its codes have a place each in scratch memory, and keep their pinned memory until this object
    is deleted.
    """

    def __init__(self, payload: Payload, streams: SideStreams) -> None:
        self._payload = payload
        self._streams = streams
        self.wire_bytes: Callable[[int], int] = payload.wire_bytes
        self._codes: dict[int, tuple[torch.Tensor, torch.cuda.Event | None]] = {}  # by place in scratch memory
        self._landings: dict[tuple[int, int], torch.Tensor] = {}  # by offset and place
        self._posted: list[torch.cuda.Event | None] = []  # of the messages that are posted next
        self._numbers: list[torch.Tensor] = []

    def stage(
        self, offset: int, length: int, scratch: int, streams: SideStreams
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Begin to copy a message to the host, on one of these streams. Return the copy, and the event after it."""
        if scratch in self._codes:
            return self._codes[scratch]
        tensor = self._payload.outgoing(offset, length, scratch)
        stream = streams.of(tensor.device)
        pinned = _pinned(tensor)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            pinned.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        copy = pinned, event_after(stream)
        if scratch >= 0:
            self._codes[scratch] = copy
        else:
            self._numbers.append(pinned)
        return copy

    def outgoing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        pinned, copied = self.stage(offset, length, scratch, self._streams)
        self._posted.append(copied)
        return pinned

    def before_post(self, deadline: float) -> None:
        await_copies(filter(None, self._posted), deadline)
        self._posted.clear()

    def landing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        pinned = _pinned(self._payload.landing(offset, length, scratch))
        if length:
            self._landings[offset, scratch] = pinned
        return pinned

    def arrived(self, receive: Instruction) -> None:
        if not receive.length:
            return
        pinned = self._landings.pop((receive.offset, receive.scratch))
        self._payload.landing(receive.offset, receive.length, receive.scratch).copy_(pinned, non_blocking=True)
        if receive.scratch >= 0:
            self._codes[receive.scratch] = pinned, None  # if the code is forwarded
        else:
            self._numbers.append(pinned)

    def work(self, instruction: Instruction) -> None:
        self._payload.work(instruction)


def _pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
