"""A collective algorithm as data: which rank sends which blocks to which rank, round by round. No tensors, no I/O.

A planner (`gradwire.collectives.schedules.algorithms`) returns one Schedule per rank; `gradwire.collectives.transports.loop` runs
it. Because a Schedule is plain data it can also be checked symbolically, priced and drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from gradwire.collectives.schedules.spans import Span


class Action(Enum):
    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "receive-and-reduce"


@dataclass(frozen=True, slots=True)
class Step:
    """One message. `span` counts blocks of the schedule. Except in an alltoall, both ends use the same span."""

    action: Action
    peer: int
    span: Span


Round = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one rank in a collective over `blocks` blocks.

    Within a round, every send carries the contents of its blocks at the beginning of the round. Receives and reductions take
    effect at the end of the round, in the order listed, so the order of additions is fixed. The schedules of all ranks in one
    collective have the same number of rounds, of which some may be empty. Messages from one rank to another arrive in the order
    sent.
    """

    rank: int
    size: int
    blocks: int
    rounds: tuple[Round, ...]

    def then(self, other: Schedule) -> Schedule:
        """Return this schedule followed by another over the same blocks."""
        assert (self.rank, self.size, self.blocks) == (other.rank, other.size, other.blocks)
        return replace(self, rounds=self.rounds + other.rounds)

    def embedded(self, ranks: tuple[int, ...], rank: int, size: int, first_block: int, blocks: int) -> Schedule:
        """Return the schedule of a sub-group as part of a larger one. Rank i becomes ranks[i], and block 0 `first_block`."""
        rounds: list[Round] = []
        for steps in self.rounds:
            moved: list[Step] = []
            for step in steps:
                span = Span(first_block + step.span.start, first_block + step.span.stop)
                moved.append(Step(step.action, ranks[step.peer], span))
            rounds.append(tuple(moved))
        return Schedule(rank, size, blocks, tuple(rounds))


@dataclass(frozen=True, slots=True)
class Place:
    """The arguments of a planner: this rank, the world size, the root of rooted collectives, the ranks of each host, and the
    ranks of hosts whose links were measured to be much slower than the others'."""

    rank: int
    size: int
    root: int = 0
    hosts: tuple[tuple[int, ...], ...] = ()
    slow: tuple[int, ...] = ()


Planner = Callable[[Place], Schedule]


def send(peer: int, spans: Iterable[Span]) -> Round:
    return tuple(Step(Action.SEND, peer, span) for span in spans)


def receive(peer: int, spans: Iterable[Span]) -> Round:
    return tuple(Step(Action.RECEIVE, peer, span) for span in spans)


def reduce(peer: int, spans: Iterable[Span]) -> Round:
    return tuple(Step(Action.REDUCE, peer, span) for span in spans)
