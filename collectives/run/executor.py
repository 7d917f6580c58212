"""The one loop that runs a Schedule on a Transport, several segments of a large buffer in flight at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from collectives.link.base import Pending, Transport
from collectives.plan.schedule import Action, Schedule
from collectives.plan.spans import Layout, Span, joined
from collectives.reduction import Combine

#: Segments in flight at once: while one is reduced, the others keep the wire busy.
WINDOW = 3

#: How many rounds ahead of its turn a receive is posted. A message whose receive is already posted travels at once; any
#: other first costs a round trip to announce it.
LOOKAHEAD = 2


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A message to receive in round `round`: into the buffer, or where it must be reduced, at `scratch` first."""

    round: int
    peer: int
    span: Span
    scratch: int | None


@dataclass(frozen=True, slots=True)
class _RoundPlan:
    """One round of one segment, in elements: what is sent, and which arrivals, of this round or later ones, are posted."""

    sends: tuple[tuple[int, Span], ...]
    posts: tuple[_Arrival, ...]


@dataclass(frozen=True, slots=True)
class _SegmentPlan:
    rounds: tuple[_RoundPlan, ...]
    scratch: int  # elements


#: A Schedule laid out in a buffer: one plan per segment. All segments have equally many rounds.
Program = tuple[_SegmentPlan, ...]


def lay_out(
    schedule: Schedule, segments: Sequence[Layout], sources: Sequence[Layout] | None = None, lookahead: int = LOOKAHEAD
) -> Program:
    """Translate a schedule's blocks into elements, for every segment. Empty messages are left out, at both ends alike.

    sources: where the blocks lie in the buffer that is sent from, when that is another one than they arrive in.
    """
    post_at = _posting_rounds(schedule, lookahead)
    return tuple(
        _lay_out_segment(schedule, post_at, layout, source, lookahead)
        for layout, source in zip(segments, sources or segments, strict=True)
    )


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


def _lay_out_segment(
    schedule: Schedule, post_at: Sequence[int], layout: Layout, source: Layout, lookahead: int
) -> _SegmentPlan:
    sends: list[list[tuple[int, Span]]] = [[] for _ in schedule.rounds]
    posts: list[list[_Arrival]] = [[] for _ in schedule.rounds]
    regions = lookahead + 1  # of scratch: as many rounds as can be posted at once
    used = [0] * len(schedule.rounds)
    for index, steps in enumerate(schedule.rounds):
        for step in steps:
            if step.action is Action.SEND:
                sends[index] += [(step.peer, span) for span in joined(source[step.span.start : step.span.stop])]
                continue
            for span in joined(layout[step.span.start : step.span.stop]):
                offset = used[index] if step.action is Action.REDUCE else None
                posts[post_at[index]].append(_Arrival(index, step.peer, span, offset))
                used[index] += span.length if offset is not None else 0
    region = max(used, default=0)
    rounds = tuple(
        _RoundPlan(
            tuple(sends[index]),
            tuple(
                replace(a, scratch=a.scratch + a.round % regions * region) if a.scratch is not None else a
                for a in posts[index]
            ),
        )
        for index in range(len(schedule.rounds))
    )
    return _SegmentPlan(rounds, region * min(regions, len(schedule.rounds)))


class Scratch:
    """Memory for what arrives before it is reduced: one growing tensor per place in the window, kept between calls."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, torch.device], torch.Tensor] = {}

    def take(self, place: int, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A 1-D tensor of `numel` elements of like's dtype on its device; valid until the place is taken again."""
        key = (place, like.device)
        nbytes = numel * like.element_size()
        held = self._tensors.get(key)
        if held is None or held.numel() < nbytes:
            held = self._tensors[key] = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return held[:nbytes].view(like.dtype)


class _Flight:
    """One segment on its way through its rounds."""

    def __init__(
        self, plan: _SegmentPlan, source: torch.Tensor, destination: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        self._plan = plan
        self._source = source
        self._destination = destination
        self._scratch = scratch
        self._sent: list[Pending] = []
        self._arriving: dict[int, list[tuple[Pending, _Arrival]]] = {}

    def post(self, index: int, transport: Transport, tag: int) -> None:
        """Start the sends of a round, and the receives that are due."""
        plan = self._plan.rounds[index]
        sends = [(peer, self._source[span.start : span.stop]) for peer, span in plan.sends]
        receives = [(arrival.peer, self._place(arrival)) for arrival in plan.posts]
        self._sent, received = transport.post(sends, receives, tag)
        for pending, arrival in zip(received, plan.posts, strict=True):
            self._arriving.setdefault(arrival.round, []).append((pending, arrival))

    def finish(self, index: int, combine: Combine, rank: int, deadline: float) -> None:
        """Wait for a round's messages and reduce what it received, in the order of the schedule."""
        arrivals = self._arriving.pop(index, [])
        for pending, _ in arrivals:
            pending.wait(deadline)
        for pending in self._sent:
            pending.wait(deadline)
        for _, arrival in arrivals:
            if arrival.scratch is not None:
                mine, theirs = self._destination[arrival.span.start : arrival.span.stop], self._place(arrival)
                if rank < arrival.peer:
                    combine(mine, theirs, out=mine)
                else:
                    combine(theirs, mine, out=mine)

    def _place(self, arrival: _Arrival) -> torch.Tensor:
        if arrival.scratch is None:
            return self._destination[arrival.span.start : arrival.span.stop]
        return self._scratch[arrival.scratch : arrival.scratch + arrival.span.length]


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
    """Run a program: sends read `source`, receipts and reductions write `destination` (mostly the same 1-D tensor).

    All ranks walk the same fixed order of (segment, round), so nothing can deadlock: the earliest unfinished round only
    depends on earlier ones. Segment i uses the tag `tag + i`, so that its receives can be posted early. Segments start a part
    of their rounds apart, so that different phases (inside a host, between hosts) overlap. deadline: time.monotonic() seconds.
    Raises LinkError.
    """
    rounds = len(program[0].rounds)
    if rounds == 0:
        return
    stagger = -(-rounds // WINDOW)
    last_sweep = (len(program) - 1) * stagger + rounds
    flights: dict[int, _Flight] = {}
    for sweep in range(last_sweep + 1):
        newest = min(len(program) - 1, sweep // stagger)
        oldest = max(0, -(-(sweep - rounds) // stagger))
        for segment in range(newest, oldest - 1, -1):
            index = sweep - segment * stagger
            if index == 0:
                plan = program[segment]
                space = scratch.take(segment % (WINDOW + 1), plan.scratch, destination)
                flights[segment] = _Flight(plan, source, destination, space)
            else:
                flights[segment].finish(index - 1, combine, transport.rank, deadline)
            if index < rounds:
                flights[segment].post(index, transport, tag + segment)
            else:
                del flights[segment]
