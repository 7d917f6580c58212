"""Run schedules on sets instead of numbers: what a block holds is the set of ranks whose contributions are in it.

A set is a bit mask, so that "every contribution exactly once" is checked at each reduction: the two masks must not overlap.
"""

from __future__ import annotations

from collections import defaultdict

from collectives.plan.schedule import Action, Schedule

#: State of a world: masks[rank][block].
Masks = list[list[int]]


def run(schedules: list[Schedule], source: Masks, destination: Masks | None = None) -> Masks:
    """The final state. Blocks are received into `destination`, which is the source for in-place collectives.

    Fails when ranks disagree on the number of rounds or blocks, a send has no matching receive, a contribution is added
    twice, or a receive overwrites what the same round still sends or receives.
    """
    assert len({len(s.rounds) for s in schedules}) == 1, "ranks have different numbers of rounds"
    assert len({s.blocks for s in schedules}) == 1, "ranks cut the buffer differently"
    in_place = destination is None
    state = source if destination is None else destination
    for index in range(len(schedules[0].rounds)):
        sent: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
        spans_sent: dict[tuple[int, int], list[object]] = defaultdict(list)
        spans_received: dict[tuple[int, int], list[object]] = defaultdict(list)
        for schedule in schedules:
            overwritten: list[int] = []
            read: list[int] = []
            for step in schedule.rounds[index]:
                assert step.peer != schedule.rank, "a rank talks to itself"
                assert 0 <= step.span.start < step.span.stop <= schedule.blocks, (
                    "a step names blocks that are not there"
                )
                blocks = range(*step.span)
                if step.action is Action.SEND:
                    sent[schedule.rank, step.peer].append(tuple(source[schedule.rank][b] for b in blocks))
                    spans_sent[schedule.rank, step.peer].append(step.span)
                    read += blocks
                else:
                    spans_received[step.peer, schedule.rank].append(step.span)
                    overwritten += blocks if step.action is Action.RECEIVE else ()
            assert len(set(overwritten)) == len(overwritten), "two receives of a round overlap"
            assert not (in_place and set(overwritten) & set(read)), "a receive overwrites what the round sends"
        if in_place:
            assert spans_sent == spans_received, "sends and receives do not match"
        else:
            assert {k: len(v) for k, v in spans_sent.items()} == {k: len(v) for k, v in spans_received.items()}
        for schedule in schedules:
            for step in schedule.rounds[index]:
                if step.action is Action.SEND:
                    continue
                arrived = sent[step.peer, schedule.rank].pop(0)
                for block, mask in zip(range(*step.span), arrived, strict=True):
                    if step.action is Action.REDUCE:
                        assert state[schedule.rank][block] & mask == 0, "a contribution is added twice"
                        mask |= state[schedule.rank][block]
                    state[schedule.rank][block] = mask
    return state


def contributions(size: int, blocks: int) -> Masks:
    """The start of a reduction: every rank holds its own contribution to every block."""
    return [[1 << rank] * blocks for rank in range(size)]
