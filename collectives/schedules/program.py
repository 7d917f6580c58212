"""A schedule laid out in a buffer: one rank's instructions, as integers, in the order of execution.

A large buffer is cut into segments, each of which goes through all rounds of the schedule. Several segments are in flight at
once, and receives are posted ahead of their turn. The Program decides all of that, so that a loop, in Python or compiled, only
executes it. A Program can also be counted, priced and drawn. This Program moves plain numbers; the CodedProgram in
gradwire.collectives.schedules.coded moves codes.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import NamedTuple

from gradwire.collectives.kernels.layout import Kind as Kind
from gradwire.collectives.schedules.schedule import Action, Round, Schedule
from gradwire.collectives.schedules.spans import Layout, joined

#: Segments in flight at once: while one is reduced, the others keep the wire busy.
WINDOW = 3

#: How many rounds ahead of its turn a receive is posted. A message whose receive is already posted travels at once; any
#: other first costs a round trip to announce it.
LOOKAHEAD = 2

#: The most instructions that a Program keeps; a longer Program is laid out anew at each run.
_KEPT = 1 << 14


class Instruction(NamedTuple):
    """One row of the table. offset and length count elements; scratch counts elements, or bytes in a CodedProgram. Unused
    fields are 0, an unused scratch -1."""

    kind: int
    peer: int = 0
    offset: int = 0
    length: int = 0
    scratch: int = -1
    number: int = 0
    segment: int = 0
    block: int = 0


def blocks_of(steps: Round, *actions: Action) -> list[int]:
    """Return the blocks of the steps with these actions, in the order of the steps."""
    return [block for step in steps if step.action in actions for block in range(*step.span)]


class Flight:
    """One segment in flight through its rounds. layout, source: the places of its blocks in the destination and the source.
    scratch: where its scratch memory begins."""

    def __init__(self, segment: int, layout: Layout, source: Layout, numbers: Iterator[int], scratch: int) -> None:
        self.segment = segment
        self.layout = layout
        self.source = source
        self.numbers = numbers
        self.scratch = scratch
        self.sent: list[int] = []
        self.arriving: dict[int, list[Instruction]] = defaultdict(list)
        # For a CodedProgram: how many codes have a place in scratch memory, the place of each block's code, the block's version,
        # and the blocks whose sums are still to be decoded.
        self.places = 0
        self.codes: dict[int, int] = {}
        self.versions: dict[int, int] = defaultdict(int)
        self.unsettled: list[int] = []


def _pieces(instructions: Iterator[Instruction]) -> Iterator[array[int]]:
    """Yield instructions as 64-bit integers, at most _KEPT instructions at a time."""
    while piece := array("q", chain.from_iterable(islice(instructions, _KEPT))):
        yield piece


class Program:
    """The instructions of one rank.

    Iteration yields the instructions in order. All ranks follow the same fixed order of (segment, round), so they cannot
    deadlock: the earliest unfinished round only depends on earlier ones. Segments start staggered, so that different phases
    (inside a host, between hosts) overlap.

    Attribute scratch: how many elements of scratch memory the instructions use.
    """

    #: How many sweeps over the segments in flight advance each of them by one round, and how many segments are in flight.
    _pace = 1
    _window = WINDOW

    #: How many segments have scratch memory of their own; None for as many as are in flight.
    _most_flights: int | None = None

    #: Whether messages are posted one by one, each as soon as its contents are ready.
    _in_turn = False

    def __init__(
        self,
        schedule: Schedule,
        segments: Sequence[Layout],
        sources: Sequence[Layout] | None = None,
        lookahead: int = LOOKAHEAD,
        *,
        answered: bool = False,
    ) -> None:
        """Lay out a schedule.

        segments: the places of the blocks of each segment, in elements. Both ends of an empty message leave it out. sources:
        their places in the source, if the source is another buffer than the destination. lookahead: how many rounds ahead
        receives may be posted; 0 if the messages of a round must be posted together on both sides, as NCCL requires. answered:
        whether a rank that only receives from another one sends it an empty message at the end, so that a call that no other
        rank has made does not succeed."""
        self._schedule = schedule
        self._segments = segments
        self._sources = sources or segments
        self._lookahead = lookahead
        self._answered = answered
        self._post_at = self._posting_rounds()
        self._flights = min(self._most_flights or self._window + 1, len(segments))
        self._scratch_each = self._room()
        self.scratch = self._flights * self._scratch_each
        first = tuple(islice(self._laid_out(), _KEPT + 1))
        self._kept = first if len(first) <= _KEPT else None
        self._tables: dict[tuple[int, ...], list[array[int]]] = {}

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self._kept) if self._kept is not None else self._laid_out()

    def tables(self) -> Iterable[array[int]]:
        """Return the instructions as 64-bit integers, one after the other, for a compiled loop. A Program of more than _KEPT
        instructions gives several pieces, which are made anew at each call."""
        return self._in_tables(self, ())

    def _in_tables(self, instructions: Iterable[Instruction], key: tuple[int, ...]) -> Iterable[array[int]]:
        """Return instructions as tables. key: other instructions have another one."""
        if self._kept is None:
            return _pieces(iter(instructions))
        if key not in self._tables:
            self._tables[key] = list(_pieces(iter(instructions)))
        return self._tables[key]

    def sent_bytes(self, nbytes: Callable[[int], int]) -> int:
        """Return how many bytes this rank sends. nbytes: returns the bytes of a message of a number of elements."""
        return sum(nbytes(instruction.length) for instruction in self if instruction.kind == Kind.SEND)

    def _laid_out(self) -> Iterator[Instruction]:
        rounds = len(self._schedule.rounds)
        if rounds == 0:
            for segment in range(len(self._segments)):
                yield from self._alone(self._flight(segment, count()))
            return
        sweeps = rounds * self._pace
        stagger = -(-sweeps // self._window)
        last_sweep = (len(self._segments) - 1) * stagger + sweeps
        flights: dict[int, Flight] = {}
        numbers = count()
        for sweep in range(last_sweep + 1):
            newest = min(len(self._segments) - 1, sweep // stagger)
            oldest = max(0, -(-(sweep - sweeps) // stagger))
            for segment in range(newest, oldest - 1, -1):
                index, between = divmod(sweep - segment * stagger, self._pace)
                if between:
                    continue
                if index == 0:
                    flights[segment] = self._flight(segment, numbers)
                else:
                    yield from self._finish(flights[segment], index - 1)
                if index < rounds:
                    yield from self._post(flights[segment], index)
                else:
                    yield from self._land(flights.pop(segment))
        if self._answered:
            yield from self._answer(numbers)

    def _answer(self, numbers: Iterator[int]) -> Iterator[Instruction]:
        """Send an empty message to each rank from which this rank has only received, and receive one from each rank to which it
        has only sent."""
        steps = [step for steps in self._schedule.rounds for step in steps]
        sent_to = {step.peer for step in steps if step.action is Action.SEND}
        received_from = {step.peer for step in steps if step.action is not Action.SEND}
        answers = [Instruction(Kind.SEND, peer, number=next(numbers)) for peer in sorted(received_from - sent_to)]
        answers += [Instruction(Kind.RECEIVE, peer, number=next(numbers)) for peer in sorted(sent_to - received_from)]
        if answers:
            yield from answers
            yield Instruction(Kind.POST)
        for answer in answers:
            yield Instruction(Kind.WAIT, number=answer.number)

    def _flight(self, segment: int, numbers: Iterator[int]) -> Flight:
        scratch = segment % self._flights * self._scratch_each
        return Flight(segment, self._segments[segment], self._sources[segment], numbers, scratch)

    def _post(self, flight: Flight, index: int) -> Iterator[Instruction]:
        """Start the sends of a round, and the receives that are due."""
        receives: list[Instruction] = []
        for due in range(index, min(index + self._lookahead + 1, len(self._schedule.rounds))):
            if self._post_at[due] == index:
                flight.arriving[due] += self._receives(flight, due)
                receives += flight.arriving[due]
        yield from receives
        if receives and self._in_turn:
            yield Instruction(Kind.POST, segment=flight.segment)
        posted = bool(receives) and not self._in_turn
        for instruction in self._sends(flight, self._schedule.rounds[index]):
            if instruction.kind == Kind.SEND:
                posted = True
            elif instruction.kind == Kind.POST:
                posted = False
            yield instruction
        if posted:
            yield Instruction(Kind.POST, segment=flight.segment)

    # The methods that CodedProgram overrides

    def _posting_rounds(self) -> list[int]:
        """Return for every round the round in which its receives are posted: at most `lookahead` earlier, never while an
        unfinished round still uses the blocks that they overwrite, and in order of the rounds."""
        rounds = self._schedule.rounds
        touched = [set(blocks_of(steps, *Action)) for steps in rounds]
        post_at: list[int] = []
        for index, steps in enumerate(rounds):
            overwritten = set(blocks_of(steps, Action.RECEIVE))
            earliest = index
            lowest = max(0, index - self._lookahead, post_at[-1] if post_at else 0)
            while earliest > lowest and not overwritten & touched[earliest - 1]:
                earliest -= 1
            post_at.append(earliest)
        return post_at

    def _room(self) -> int:
        """Return how much scratch memory each segment in flight needs."""
        self._regions = min(self._lookahead + 1, len(self._schedule.rounds))  # as many as can be posted at once
        reduced = [blocks_of(steps, Action.REDUCE) for steps in self._schedule.rounds]
        sums = (sum(layout[block].length for block in blocks) for layout in self._segments for blocks in reduced)
        self._region = max(sums, default=0)  # of the largest round of any segment
        return self._regions * self._region

    def _receives(self, flight: Flight, index: int) -> list[Instruction]:
        """Return the receives of a round."""
        place = flight.scratch + index % self._regions * self._region
        receives: list[Instruction] = []
        for step in self._schedule.rounds[index]:
            if step.action is Action.SEND:
                continue
            for span in joined(flight.layout[step.span.start : step.span.stop]):
                scratch = place if step.action is Action.REDUCE else -1
                number = next(flight.numbers)
                receives.append(
                    Instruction(Kind.RECEIVE, step.peer, span.start, span.length, scratch, number, flight.segment)
                )
                place += span.length if step.action is Action.REDUCE else 0
        return receives

    def _sends(self, flight: Flight, steps: Round) -> Iterator[Instruction]:
        """Yield the sends of a round."""
        for step in steps:
            if step.action is Action.SEND:
                for span in joined(flight.source[step.span.start : step.span.stop]):
                    flight.sent.append(next(flight.numbers))
                    yield Instruction(
                        Kind.SEND, step.peer, span.start, span.length, -1, flight.sent[-1], flight.segment
                    )

    def _finish(self, flight: Flight, index: int) -> Iterator[Instruction]:
        """Wait for a round's messages and reduce what it received, in the order of the schedule."""
        arrivals = flight.arriving.pop(index, [])
        for arrival in arrivals:
            yield Instruction(Kind.WAIT, number=arrival.number)
        yield from self._land(flight)
        for arrival in arrivals:
            if arrival.scratch >= 0:
                yield arrival._replace(kind=Kind.REDUCE)

    def _land(self, flight: Flight) -> Iterator[Instruction]:
        """Wait until the sends have completed."""
        for number in flight.sent:
            yield Instruction(Kind.WAIT, number=number)
        flight.sent.clear()

    def _alone(self, flight: Flight) -> Iterator[Instruction]:
        """Yield the instructions for a segment in a world of one rank."""
        return iter(())
