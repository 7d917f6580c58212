"""Record operations and their parts in a lane of a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwire.collectives.diagnostics.timeline import Lane, now_ns
from gradwire.collectives.engine.executor import Payload
from gradwire.collectives.engine.operations import Turn
from gradwire.collectives.schedules.program import Instruction, Kind
from gradwire.collectives.transports.base import Message, Pending, Posted, Transport

#: The names of an operation's parts that move no message.
_NAMES = {
    Kind.REDUCE: "reduce",
    Kind.ENCODE: "encode",
    Kind.DECODE: "decode",
    Kind.ADD: "decode",
    Kind.COMPLETE: "divide",
}


def recorded(lane: Lane, call: str, body: Callable[[Turn], None]) -> Callable[[Turn], None]:
    """Return a function that runs `body`, and records its span and how long it was queued."""
    issued_ns = now_ns()

    def run(turn: Turn) -> None:
        begin_ns = now_ns()
        try:
            body(turn)
        finally:
            queued_us = (begin_ns - issued_ns) / 1e3
            lane.span(call.partition("(")[0], begin_ns, call=call, queued_us=queued_us, **lane.take_notes())

    return run


def not_now(*arguments: Any) -> bool:
    """Return False in place of Operations.run_now, which would run an operation without recording it."""
    return False


class TracedPayload:
    """Records the instructions that a payload executes."""

    def __init__(self, payload: Payload, lane: Lane) -> None:
        self._payload = payload
        self._lane = lane
        self.outgoing, self.landing = payload.outgoing, payload.landing

    def work(self, instruction: Instruction) -> None:
        begin_ns = now_ns()
        self._payload.work(instruction)
        self._lane.span(_NAMES[Kind(instruction.kind)], begin_ns, elements=instruction.length)


class TracedTransport:
    """Records the messages that a transport sends, and how long the wait for each message takes."""

    def __init__(self, transport: Transport, lane: Lane) -> None:
        self._transport = transport
        self._lane = lane

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        begin_ns = now_ns()
        sent, received = self._transport.post(sends, receives, tag)
        if sends:
            nbytes = sum(tensor.nbytes for _, tensor in sends)
            self._lane.span("send", begin_ns, bytes=nbytes, to=[peer for peer, _ in sends])
        return self._traced(sent, "to", sends), self._traced(received, "of", receives)

    def _traced(self, pending: Sequence[Pending], direction: str, messages: Sequence[Message]) -> list[Pending]:
        pairs = zip(pending, messages, strict=True)
        return [_TracedPending(each, self._lane, {direction: peer}) for each, (peer, _) in pairs]


class _TracedPending:
    """Records how long the wait for a message takes."""

    def __init__(self, pending: Pending, lane: Lane, details: dict[str, int]) -> None:
        self._pending = pending
        self._lane = lane
        self._details = details
        self.is_done = pending.is_done

    def wait(self, deadline: float) -> None:
        """See Pending."""
        begin_ns = now_ns()
        self._pending.wait(deadline)
        self._lane.span("wait", begin_ns, **self._details)
