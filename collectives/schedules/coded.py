"""A program whose messages are codes. It determines which numbers are encoded, decoded, added and forwarded, and when.

A block begins as version 0, this rank's own numbers. An addition in round r makes it version r + 1. Each version that is sent
or added to is encoded once, and then replaced by its decoded code, on this rank too. The sum over all ranks is treated in the
same way, on every rank that holds it, unless all ranks add the same codes. A received code is decoded into its block, or added
to it. Codes of several ranks, including this rank's own, are added in the order of the group. A forwarded code is not encoded
again. So replicas are the same to the bit, which gradwire.collectives.schedules.check verifies.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count

from gradwire.collectives.schedules.program import Flight, Instruction, Kind, Program
from gradwire.collectives.schedules.schedule import Action, Round, Schedule
from gradwire.collectives.schedules.spans import Layout, Span, split

#: Codes begin at multiples of this in scratch memory, in bytes.
_APART = 64

#: In place of a place in scratch memory: the next one.
_NEW = -2


class CodedProgram(Program):
    """The instructions of one rank for an allreduce of codes. Attributes: scratch, how many bytes of scratch memory they use;
    encodes_sums, whether the sum over all ranks is encoded too.

    Each round of a segment takes two sweeps, so that the sum of the previous segment and the result of the segment before that
    are sent while a segment is encoded. An extra first round without messages allows receives to be posted one round earlier.
    """

    _pace = 2
    _window = 6

    def __init__(
        self,
        schedule: Schedule,
        segments: Sequence[Layout],
        code_bytes: int,
        group: Sequence[int],
        *,
        encodes_sums: bool = True,
        lookahead: int = 1,
        sums_apart: bool = False,
        codes_apart: bool = False,
    ) -> None:
        """Lay out a schedule.

        segments: see Program; their blocks are encoded one by one. code_bytes: the length of the longest code. group: by rank
        of the schedule, the rank of the Communicator. encodes_sums: whether the sum over all ranks is encoded too. lookahead:
        see Program. sums_apart: whether the sum over all ranks is added in other memory than that of the block also if it is not
        encoded. codes_apart: whether each code of a run has a place of its own in scratch memory.
        """
        self.encodes_sums = encodes_sums
        self._sums_apart = sums_apart or encodes_sums
        if codes_apart:
            self._most_flights = len(segments)
        self._stride = -(-max(code_bytes, 1) // _APART) * _APART
        self._rank = group[schedule.rank]
        self._order = dict(zip(group, range(len(group)), strict=True))
        schedule = schedule.embedded(tuple(group), self._rank, len(group), 0, schedule.blocks)
        first: tuple[Round, ...] = ((),) if lookahead and schedule.rounds else ()
        self._lead = len(first)
        self._in_turn = lookahead > 0
        rounds = first + schedule.rounds
        # By block, the last round in which it is received, and in which codes are added to it.
        self._last_received: dict[int, int] = {}
        self._last_reduced: dict[int, int] = {}
        for index, steps in enumerate(rounds):
            for step in steps:
                if step.action is not Action.SEND:
                    last = self._last_reduced if step.action is Action.REDUCE else self._last_received
                    last.update(dict.fromkeys(range(*step.span), index))
        self._lengths = sorted({span.length for layout in segments for span in layout})
        super().__init__(replace(schedule, rounds=rounds), segments, lookahead=lookahead)

    @cached_property
    def adds_in_place(self) -> bool:
        """Return whether codes are added to the numbers of the buffer."""
        return any(each.kind == Kind.ADD and each.number == 0 for each in self)

    def tables_for(self, wire_bytes: Callable[[int], int]) -> Iterable[array[int]]:
        """Return the instructions as tables() does, but with the length of a message in bytes. wire_bytes: returns the
        length of the code of a number of elements."""
        return self._in_tables(self._in_bytes(wire_bytes), tuple(map(wire_bytes, self._lengths)))

    def _in_bytes(self, wire_bytes: Callable[[int], int]) -> Iterator[Instruction]:
        for each in self:
            moves = each.kind in (Kind.SEND, Kind.RECEIVE)
            yield each._replace(length=wire_bytes(each.length)) if moves else each

    def _posting_rounds(self) -> list[int]:
        """Return for every round the round in which its receives are posted. Each code arrives in its own place in scratch
        memory, so that no earlier round delays the receives."""
        rounds = len(self._schedule.rounds)
        return [0] * min(self._lookahead, rounds) + list(range(rounds - self._lookahead))

    def _room(self) -> int:
        """Return how many bytes of scratch memory each segment in flight needs. A walk through the rounds counts the codes."""
        blocks = split(Span(0, self._schedule.blocks), self._schedule.blocks)
        flight = Flight(0, blocks, blocks, count(), 0)
        for index in range(len(self._schedule.rounds)):
            for _ in (*self._post(flight, index), *self._finish(flight, index)):
                pass
        if not self._schedule.rounds:
            for _ in self._alone(flight):
                pass
        return flight.places * self._stride

    def _about(self, flight: Flight, block: int, kind: Kind, peer: int, place: int, number: int = 0) -> Instruction:
        """Return an instruction about one block. place: of its code in scratch memory; _NEW for the next place."""
        span = flight.layout[block]
        if place == _NEW:
            place = flight.scratch + flight.places * self._stride
            flight.places += 1
        return Instruction(kind, peer, span.start, span.length, place, number, flight.segment, block)

    def _receives(self, flight: Flight, index: int) -> list[Instruction]:
        receives: list[Instruction] = []
        for step in self._schedule.rounds[index]:
            for block in range(*step.span) if step.action is not Action.SEND else ():
                if flight.layout[block].length:
                    number = next(flight.numbers)
                    receives.append(self._about(flight, block, Kind.RECEIVE, step.peer, _NEW, number))
        return receives

    def _sends(self, flight: Flight, steps: Round) -> Iterator[Instruction]:
        """Yield the sends of a round, and the encodings that they need. Each code is sent as soon as it is made."""
        for block in _blocks(flight, steps, Action.SEND):
            if block not in flight.codes:
                yield self._encode(flight, block)
            for step in steps:
                if step.action is Action.SEND and step.span.start <= block < step.span.stop:
                    flight.sent.append(next(flight.numbers))
                    yield self._about(flight, block, Kind.SEND, step.peer, flight.codes[block], flight.sent[-1])
            if self._in_turn:
                yield Instruction(Kind.POST, segment=flight.segment)
        for block in _blocks(flight, steps, Action.REDUCE):  # the codes of other ranks will be added to these
            if block not in flight.codes:
                yield self._encode(flight, block)
        yield from self._settle(flight)

    def _finish(self, flight: Flight, index: int) -> Iterator[Instruction]:
        """Decode the codes that a round received into their blocks, or add them to the blocks."""
        arrivals = flight.arriving.pop(index, [])
        steps = self._schedule.rounds[index]
        for block in _blocks(flight, steps, Action.REDUCE):
            own = self._decode(flight, block)
            codes = sorted((*(a for a in arrivals if a.block == block), own), key=lambda code: self._order[code.peer])
            completes = self._last_received.get(block, -1) < index == self._last_reduced[block]
            in_sum = completes and self._sums_apart
            for position, code in enumerate(codes):
                if code is not own:
                    yield Instruction(Kind.WAIT, number=code.number)
                yield code._replace(kind=Kind.ADD if position else Kind.DECODE, number=int(in_sum))
            del flight.codes[block]
            flight.versions[block] = 1 + index - self._lead
            if completes:
                yield from self._complete(flight, block)
        received = set(_blocks(flight, steps, Action.RECEIVE))
        for arrival in arrivals:
            if arrival.block in received:
                yield Instruction(Kind.WAIT, number=arrival.number)
                yield arrival._replace(kind=Kind.DECODE, number=0)
                flight.codes[arrival.block] = arrival.scratch

    def _land(self, flight: Flight) -> Iterator[Instruction]:
        yield from self._settle(flight)
        yield from super()._land(flight)

    def _alone(self, flight: Flight) -> Iterator[Instruction]:
        """Encode a segment on a single rank too, so that training on one rank has the same errors of encoding."""
        for block, span in enumerate(flight.layout):
            if span.length:
                yield self._encode(flight, block)
                yield self._decode(flight, block)._replace(number=int(self._sums_apart))
                flight.versions[block] = 1
                yield from self._complete(flight, block)
        yield from self._settle(flight)

    def _complete(self, flight: Flight, block: int) -> Iterator[Instruction]:
        """Encode the sum over all ranks, if encodes_sums. Every rank that holds the sum does so, even without sending it."""
        yield self._about(flight, block, Kind.COMPLETE, self._rank, -1, int(self._sums_apart))
        if self.encodes_sums:
            yield self._encode(flight, block)
            flight.unsettled.append(block)

    def _settle(self, flight: Flight) -> Iterator[Instruction]:
        """Replace sums with their decoded codes, after the sends of these codes have begun."""
        for block in flight.unsettled:
            yield self._decode(flight, block)
        flight.unsettled.clear()

    def _encode(self, flight: Flight, block: int) -> Instruction:
        """Return the instruction that encodes the current version of a block."""
        encode = self._about(flight, block, Kind.ENCODE, self._rank, _NEW, flight.versions[block])
        flight.codes[block] = encode.scratch
        return encode

    def _decode(self, flight: Flight, block: int) -> Instruction:
        """Return the instruction that decodes the code of a block in place."""
        return self._about(flight, block, Kind.DECODE, self._rank, flight.codes[block])


def _blocks(flight: Flight, steps: Round, action: Action) -> list[int]:
    """Return the nonempty blocks with a step of this kind, each once, in the order of the steps."""
    found: dict[int, None] = {}
    for step in steps:
        if step.action is action:
            found |= dict.fromkeys(range(*step.span))
    return [block for block in found if flight.layout[block].length]
