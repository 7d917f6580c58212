"""The one loop that runs a Program on a transport."""

from __future__ import annotations

import torch

from collectives.link.base import Message, Pending, Transport
from collectives.plan.program import Kind, Program
from collectives.reduction import Combine


class Scratch:
    """Memory for what arrives before it is reduced: a growing tensor per device, kept between calls."""

    def __init__(self) -> None:
        self._tensors: dict[torch.device, torch.Tensor] = {}

    def take(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return a 1-D tensor of `numel` elements of like's dtype on its device; valid until the next call."""
        nbytes = numel * like.element_size()
        held = self._tensors.get(like.device)
        if held is None or held.numel() < nbytes:
            held = self._tensors[like.device] = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return held[:nbytes].view(like.dtype)


def execute(
    program: Program,
    source: torch.Tensor,
    destination: torch.Tensor,
    combine: Combine,
    transport: Transport,
    *,
    tag: int,
    deadline: float,
    scratch: Scratch,
) -> None:
    """Follow a program: sends read `source`, receipts and reductions write `destination` (mostly the same 1-D tensor).

    Segment i uses the tag `tag + i`, so that its receives can be posted early. deadline: time.monotonic() seconds. Raises
    LinkError.
    """
    memory = scratch.take(program.scratch, destination)
    in_flight: dict[int, Pending] = {}
    sends: list[Message] = []
    receives: list[Message] = []
    sent_numbers: list[int] = []
    received_numbers: list[int] = []
    for kind, peer, offset, length, place, number, segment in program:
        if kind == Kind.WAIT:
            in_flight.pop(number).wait(deadline)
        elif kind == Kind.SEND:
            sends.append((peer, source[offset : offset + length]))
            sent_numbers.append(number)
        elif kind == Kind.RECEIVE:
            landing = destination[offset : offset + length] if place < 0 else memory[place : place + length]
            receives.append((peer, landing))
            received_numbers.append(number)
        elif kind == Kind.POST:
            sent, received = transport.post(sends, receives, tag + segment)
            in_flight.update(zip(sent_numbers, sent, strict=True))
            in_flight.update(zip(received_numbers, received, strict=True))
            sends, receives, sent_numbers, received_numbers = [], [], [], []
        else:
            mine, theirs = destination[offset : offset + length], memory[place : place + length]
            first, second = (mine, theirs) if transport.rank < peer else (theirs, mine)
            combine(first, second, out=mine)
