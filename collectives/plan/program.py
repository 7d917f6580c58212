"""A schedule laid out in a buffer: one rank's instructions, as integers, in the order in which they are followed.

A large buffer is cut into segments, each of which goes through all rounds of the schedule. Several are in flight at once, and
receives are posted ahead of their turn; all of that is decided here, so that whoever runs a Program just follows it: a loop in
Python (collectives.run.executor) or a compiled one. It can also be counted, priced and drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from collectives.plan.schedule import Action, Schedule
from collectives.plan.spans import Layout, Span, joined

#: Segments in flight at once: while one is reduced, the others keep the wire busy.
WINDOW = 3

#: How many rounds ahead of its turn a receive is posted. A message whose receive is already posted travels at once; any
#: other first costs a round trip to announce it.
LOOKAHEAD = 2

#: Programs of up to so many instructions are kept; longer ones are laid out while they run, each time.
_KEPT = 1 << 14


class Kind(IntEnum):
    """What an instruction asks for."""

    SEND = 0  # to `peer`, what lies in the source at `offset`
    RECEIVE = 1  # from `peer`: into the destination at `offset`, or where `scratch` is not negative, into scratch memory there
    POST = 2  # start all sends and receives since the last POST; they carry the tag of `segment`
    WAIT = 3  # for the message that is number `message` of all sends and receives
    REDUCE = 4  # what came from `peer` into scratch memory at `scratch`, into the destination at `offset`


class Instruction(NamedTuple):
    """One row of the table. offset, length and scratch count elements; what an instruction does not use is 0, scratch -1."""

    kind: int
    peer: int = 0
    offset: int = 0
    length: int = 0
    scratch: int = -1
    message: int = 0
    segment: int = 0


class Program:
    """The instructions of one rank.

    Iterating yields them in order. All ranks walk the same fixed order of (segment, round), so nothing can deadlock: the earliest
    unfinished round only depends on earlier ones. Segments start a part of their rounds apart, so that different phases
    (inside a host, between hosts) overlap.

    Attribute scratch: how many elements of scratch memory the instructions use.
    """

    def __init__(
        self,
        schedule: Schedule,
        segments: Sequence[Layout],
        sources: Sequence[Layout] | None = None,
        lookahead: int = LOOKAHEAD,
    ) -> None:
        """segments: where the blocks of each segment lie, in elements; empty messages are left out, at both ends alike. sources:
        where they lie in the buffer that is sent from, when that is another one than they arrive in."""
        self._schedule = schedule
        self._segments = segments
        self._sources = sources or segments
        self._lookahead = lookahead
        self._post_at = _posting_rounds(schedule, lookahead)
        self._regions = min(lookahead + 1, len(schedule.rounds))  # as many rounds as can be posted at once
        self._region = max((self._reduced(layout) for layout in segments), default=0)
        self._places = min(WINDOW + 1, len(segments))
        self.scratch = self._places * self._regions * self._region
        self._kept: tuple[Instruction, ...] | None = None
        estimate = 6 * len(segments) * sum(map(len, schedule.rounds))
        if estimate <= _KEPT:
            self._kept = tuple(self._laid_out())

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self._kept) if self._kept is not None else self._laid_out()

    def sent(self) -> tuple[int, int]:
        """Return how many messages this rank sends, and how many elements in all."""
        lengths = [instruction.length for instruction in self if instruction.kind == Kind.SEND]
        return len(lengths), sum(lengths)

    def _reduced(self, layout: Layout) -> int:
        """Return how many elements the largest round of a segment receives to reduce them."""
        return max(
            (
                sum(
                    layout[block].length
                    for step in steps
                    if step.action is Action.REDUCE
                    for block in range(*step.span)
                )
                for steps in self._schedule.rounds
            ),
            default=0,
        )

    def _laid_out(self) -> Iterator[Instruction]:
        rounds = len(self._schedule.rounds)
        if rounds == 0:
            return
        stagger = -(-rounds // WINDOW)
        last_sweep = (len(self._segments) - 1) * stagger + rounds
        flights: dict[int, _Flight] = {}
        numbers = iter(range(2**63))
        for sweep in range(last_sweep + 1):
            newest = min(len(self._segments) - 1, sweep // stagger)
            oldest = max(0, -(-(sweep - rounds) // stagger))
            for segment in range(newest, oldest - 1, -1):
                index = sweep - segment * stagger
                if index == 0:
                    flights[segment] = _Flight(segment, numbers)
                else:
                    yield from flights[segment].finish(index - 1)
                if index < rounds:
                    yield from self._post(flights[segment], index)
                else:
                    del flights[segment]

    def _post(self, flight: _Flight, index: int) -> Iterator[Instruction]:
        """Start the sends of a round, and the receives that are due."""
        layout, source = self._segments[flight.segment], self._sources[flight.segment]
        posted = False
        for due in range(index, min(index + self._lookahead + 1, len(self._schedule.rounds))):
            if self._post_at[due] == index:
                place = (flight.segment % self._places * self._regions + due % self._regions) * self._region
                for step in self._schedule.rounds[due]:
                    if step.action is Action.SEND:
                        continue
                    for span in joined(layout[step.span.start : step.span.stop]):
                        reduces = step.action is Action.REDUCE
                        yield flight.receive(due, step.peer, span, place if reduces else -1)
                        place += span.length if reduces else 0
                        posted = True
        for step in self._schedule.rounds[index]:
            if step.action is Action.SEND:
                for span in joined(source[step.span.start : step.span.stop]):
                    yield flight.send(step.peer, span)
                    posted = True
        if posted:
            yield Instruction(Kind.POST, segment=flight.segment)


class _Flight:
    """One segment on its way through its rounds."""

    def __init__(self, segment: int, numbers: Iterator[int]) -> None:
        self.segment = segment
        self._numbers = numbers
        self._sent: list[int] = []
        self._arriving: dict[int, list[Instruction]] = defaultdict(list)

    def receive(self, index: int, peer: int, span: Span, scratch: int) -> Instruction:
        instruction = Instruction(
            Kind.RECEIVE, peer, span.start, span.length, scratch, next(self._numbers), self.segment
        )
        self._arriving[index].append(instruction)
        return instruction

    def send(self, peer: int, span: Span) -> Instruction:
        self._sent.append(next(self._numbers))
        return Instruction(Kind.SEND, peer, span.start, span.length, -1, self._sent[-1], self.segment)

    def finish(self, index: int) -> Iterator[Instruction]:
        """Wait for a round's messages and reduce what it received, in the order of the schedule."""
        arrivals = self._arriving.pop(index, [])
        for arrival in arrivals:
            yield Instruction(Kind.WAIT, message=arrival.message)
        for number in self._sent:
            yield Instruction(Kind.WAIT, message=number)
        self._sent.clear()
        for arrival in arrivals:
            if arrival.scratch >= 0:
                yield arrival._replace(kind=Kind.REDUCE)


def _posting_rounds(schedule: Schedule, lookahead: int) -> list[int]:
    """For every round, the one in which its receives are posted: at most `lookahead` earlier, never while an unfinished
    round still uses the blocks that they overwrite, and in order of the rounds."""
    touched = [{b for step in steps for b in range(*step.span)} for steps in schedule.rounds]
    post_at: list[int] = []
    for index, steps in enumerate(schedule.rounds):
        overwritten = {b for step in steps if step.action is Action.RECEIVE for b in range(*step.span)}
        earliest = index
        lowest = max(0, index - lookahead, post_at[-1] if post_at else 0)
        while earliest > lowest and not overwritten & touched[earliest - 1]:
            earliest -= 1
        post_at.append(earliest)
    return post_at
