"""The one loop that runs a Schedule on a Transport, several segments of a large buffer in flight at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from collectives.reduction import Combine
from collectives.schedule import Action, Schedule, Step
from collectives.spans import Layout, Span, joined
from collectives.transport.base import Pending, Transport

#: Segments in flight at once: while one is reduced, the others keep the wire busy.
WINDOW = 3

_Part = tuple[int, Span]  # peer, elements


@dataclass(frozen=True, slots=True)
class _RoundPlan:
    """One round of one segment, in elements. `scratch` is how many elements its reductions receive in all."""

    sends: tuple[_Part, ...]
    receives: tuple[_Part, ...]
    reduces: tuple[_Part, ...]
    scratch: int


#: A Schedule laid out in a buffer: for every segment its rounds. All segments have equally many.
Program = tuple[tuple[_RoundPlan, ...], ...]


def lay_out(schedule: Schedule, segments: Sequence[Layout], sources: Sequence[Layout] | None = None) -> Program:
    """Translate a schedule's blocks into elements, for every segment. Empty messages are left out, at both ends alike.

    sources: where the blocks lie in the buffer that is sent from, when that is another one than they arrive in.
    """

    def parts(steps: Sequence[Step], action: Action, layout: Layout) -> tuple[_Part, ...]:
        return tuple(
            (step.peer, span)
            for step in steps
            if step.action is action
            for span in joined(layout[step.span.start : step.span.stop])
        )

    def plan(steps: Sequence[Step], layout: Layout, source: Layout) -> _RoundPlan:
        reduces = parts(steps, Action.REDUCE, layout)
        return _RoundPlan(
            sends=parts(steps, Action.SEND, source),
            receives=parts(steps, Action.RECEIVE, layout),
            reduces=reduces,
            scratch=sum(span.length for _, span in reduces),
        )

    return tuple(
        tuple(plan(steps, layout, source) for steps in schedule.rounds)
        for layout, source in zip(segments, sources or segments, strict=True)
    )


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
    """One round of one segment between being posted and being finished."""

    __slots__ = ("_arrivals", "_pending", "_sent")

    def __init__(
        self,
        plan: _RoundPlan,
        source: torch.Tensor,
        destination: torch.Tensor,
        scratch: torch.Tensor | None,
        transport: Transport,
        tag: int,
    ) -> None:
        sends = [(peer, source[span.start : span.stop]) for peer, span in plan.sends]
        receives = [(peer, destination[span.start : span.stop]) for peer, span in plan.receives]
        self._arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0
        for peer, span in plan.reduces:
            assert scratch is not None
            landed = scratch[start : start + span.length]
            start += span.length
            receives.append((peer, landed))
            self._arrivals.append((destination[span.start : span.stop], landed))
        self._sent: list[Pending]
        self._sent, self._pending = transport.post(sends, receives, tag)

    def finish(self, combine: Combine, deadline: float) -> None:
        for pending in self._pending:
            pending.wait(deadline)
        for pending in self._sent:
            pending.wait(deadline)
        for target, landed in self._arrivals:
            combine(target, landed)


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

    All ranks walk the same fixed order of (segment, round), so messages between two ranks match in the order posted and
    nothing can deadlock: the earliest unfinished round only depends on earlier ones. Segments start a part of their rounds
    apart, so that different phases (inside a host, between hosts) overlap. deadline: time.monotonic() seconds.
    Raises LinkError.
    """
    rounds = len(program[0])
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
            if index > 0:
                flights.pop(segment).finish(combine, deadline)
            if index < rounds:
                plan = program[segment][index]
                space = scratch.take(segment % (WINDOW + 1), plan.scratch, destination) if plan.scratch else None
                flights[segment] = _Flight(plan, source, destination, space, transport, tag)
