"""The one loop that runs a Program on a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradwire.collectives.link.base import Message, Pending
from gradwire.collectives.plan.program import Kind, Program
from gradwire.collectives.run.payload import Payload


class Poster(Protocol):
    """What a transport does for a program."""

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        """See Transport."""


def execute(program: Program, payload: Payload, transport: Poster, *, tag: int, deadline: float) -> None:
    """Follow a program: messages go through the transport, and what they carry is the payload's business.

    Segment i uses the tag `tag + i`, so that its receives can be posted early. deadline: time.monotonic() seconds. Raises
    LinkError.
    """
    in_flight: dict[int, Pending] = {}
    sends: list[Message] = []
    receives: list[Message] = []
    sent_numbers: list[int] = []
    received_numbers: list[int] = []
    for instruction in program:
        kind, peer, offset, length, place, number, segment, _ = instruction
        if kind == Kind.WAIT:
            in_flight.pop(number).wait(deadline)
        elif kind == Kind.SEND:
            sends.append((peer, payload.outgoing(offset, length, place)))
            sent_numbers.append(number)
        elif kind == Kind.RECEIVE:
            receives.append((peer, payload.landing(offset, length, place)))
            received_numbers.append(number)
        elif kind == Kind.POST:
            sent, received = transport.post(sends, receives, tag + segment)
            in_flight.update(zip(sent_numbers, sent, strict=True))
            in_flight.update(zip(received_numbers, received, strict=True))
            sends, receives, sent_numbers, received_numbers = [], [], [], []
        else:
            payload.work(instruction)
