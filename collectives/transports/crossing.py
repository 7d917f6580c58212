"""How what a GPU computes crosses pinned memory, piece by piece, to a transport that moves CPU tensors only."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradwire.collectives.schedules.program import Instruction
from gradwire.collectives.transports.loop import Payload

#: Of copy streams: what is ready to be sent goes before the next layer.
PRIORITY = -1


class CopyStreams:
    """One stream on each device, on which tensors are copied to pinned memory beside everything else."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of a device."""
        found = self._streams.get(device)
        return found or self._streams.setdefault(device, torch.cuda.Stream(device, priority=PRIORITY))


def event_after(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    """Return an event after all that is on a stream. A host that waits for it sleeps."""
    event = torch.cuda.Event(enable_timing=timed, blocking=True)
    event.record(stream)
    return event


class Crossed(Payload):
    """A payload of numbers or codes on a GPU, of which every message crosses pinned memory.

    Whoever calls this object makes one stream current, on which the payload works. Messages are copied to pinned memory on the
    copy stream; the host waits for a copy when the message is posted. Received messages are copied to the GPU on the current
    stream. All pinned memory is kept until this object is deleted. payload: as of a GPU; its messages in scratch memory have
    places of their own.
    """

    def __init__(self, payload: Payload, streams: CopyStreams) -> None:
        self._payload = payload
        self._streams = streams
        self.wire_bytes: Callable[[int], int] = payload.wire_bytes
        self._codes: dict[int, torch.Tensor] = {}  # by place in scratch memory
        self._landings: dict[tuple[int, int], torch.Tensor] = {}  # by offset and place
        self._copied: list[torch.cuda.Event] = []
        self._others: list[torch.Tensor] = []

    def outgoing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        if scratch in self._codes:
            return self._codes[scratch]
        tensor = self._payload.outgoing(offset, length, scratch)
        stream = self._streams.of(tensor.device)
        pinned = _pinned(tensor)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            pinned.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        self._copied.append(event_after(stream))
        if scratch >= 0:
            self._codes[scratch] = pinned
        else:
            self._others.append(pinned)
        return pinned

    def before_post(self) -> None:
        for event in self._copied:
            event.synchronize()
        self._copied.clear()

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
            self._codes[receive.scratch] = pinned  # if the code is forwarded
        else:
            self._others.append(pinned)

    def work(self, instruction: Instruction) -> None:
        self._payload.work(instruction)


def _pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
