"""Is a planner right? Its schedules are run on sets instead of numbers, without a process, a tensor or a network.

What a block holds is the set of ranks whose contributions are in it, as a bit mask, so that "every contribution exactly once" is
checked at each reduction: the two masks must not overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from collectives.plan.coded import CodedProgram
from collectives.plan.program import Kind
from collectives.plan.schedule import Action, Place, Planner, Schedule
from collectives.plan.spans import Span

#: State of a world: masks[rank][block].
Masks = list[list[int]]

#: Among how many ranks codes are followed: what they do among more follows the same rules.
_MOST_CODED = 16

#: The collectives that have a root.
ROOTED = ("broadcast", "reduce", "gather", "scatter")


class ScheduleError(ValueError):
    """A schedule that deadlocks, loses or repeats a contribution, or leaves something else than its collective says."""


def check_algorithm(collective: str, planner: Planner, sizes: Iterable[int] = range(1, 17)) -> None:
    """Check what a planner makes for worlds of these sizes, every root that differs, and hosts of one, four and all ranks.

    Of allreduce, among up to 16 ranks, it is checked as well that codes, which lose something each time, leave all ranks with
    the same bits. Raises ScheduleError, which says for which world and what is wrong; ValueError for an unknown collective.
    """
    for size in sizes:
        for root in sorted({0, size // 2, size - 1}) if collective in ROOTED else [0]:
            checked: list[Schedule] = []
            for per_host in sorted({1, min(4, size), size}):
                hosts = tuple(tuple(range(a, min(a + per_host, size))) for a in range(0, size, per_host))
                schedules = [planner(Place(rank, size, root, hosts)) for rank in range(size)]
                if schedules == checked:  # of a planner that does not look at the hosts
                    continue
                checked = schedules
                try:
                    _check(collective, schedules, root)
                    if collective == "allreduce" and size <= _MOST_CODED:
                        encodings(schedules)
                except ScheduleError as error:
                    rooted = f", root {root}" if collective in ROOTED else ""
                    raise ScheduleError(
                        f"{collective} among {size} ranks on {len(hosts)} hosts{rooted}: {error}"
                    ) from None


def run(schedules: Sequence[Schedule], source: Masks, destination: Masks | None = None) -> Masks:
    """Return the state after the schedules of all ranks. Blocks are received into `destination`: the source, if None.

    Raises ScheduleError when ranks disagree on the number of rounds or blocks, a send has no matching receive, a contribution is
    added twice, or a receive overwrites what the same round still sends or receives.
    """
    _need(len({len(s.rounds) for s in schedules}) == 1, "ranks have different numbers of rounds")
    _need(len({s.blocks for s in schedules}) == 1, "ranks cut the buffer differently")
    state = source if destination is None else destination
    for index in range(len(schedules[0].rounds)):
        sent: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
        spans_sent: dict[tuple[int, int], list[Span]] = defaultdict(list)
        spans_received: dict[tuple[int, int], list[Span]] = defaultdict(list)
        for schedule in schedules:
            overwritten: list[int] = []
            read: list[int] = []
            for step in schedule.rounds[index]:
                _need(step.peer != schedule.rank, f"rank {schedule.rank} talks to itself in round {index}")
                _need(
                    0 <= step.span.start < step.span.stop <= schedule.blocks,
                    f"rank {schedule.rank} names blocks {step.span} of {schedule.blocks} in round {index}",
                )
                blocks = range(*step.span)
                if step.action is Action.SEND:
                    sent[schedule.rank, step.peer].append(tuple(source[schedule.rank][b] for b in blocks))
                    spans_sent[schedule.rank, step.peer].append(step.span)
                    read += blocks
                else:
                    spans_received[step.peer, schedule.rank].append(step.span)
                    overwritten += blocks if step.action is Action.RECEIVE else ()
            where = f"of rank {schedule.rank} in round {index}"
            _need(len(set(overwritten)) == len(overwritten), f"two receives {where} overlap")
            in_place = destination is None
            _need(not (in_place and set(overwritten) & set(read)), f"a receive {where} overwrites what the round sends")
        _match(spans_sent, spans_received, index, in_place=destination is None)
        for schedule in schedules:
            for step in schedule.rounds[index]:
                if step.action is not Action.SEND:
                    arrived = sent[step.peer, schedule.rank].pop(0)
                    _take(state[schedule.rank], step.span, arrived, reduces=step.action is Action.REDUCE)
    return state


def encodings(schedules: Sequence[Schedule]) -> int:
    """Return how often a number is encoded on its way at most, in an allreduce of codes by the schedules of all ranks.

    Follows their CodedPrograms, and takes what is encoded or added for a thing that depends on all that it was made of. Raises
    ScheduleError where ranks end with different things.
    """
    things = _Things()
    channels: dict[tuple[int, int], list[int]] = defaultdict(list)
    held = [[things.made("number", s.rank, block) for block in range(s.blocks)] for s in schedules]
    followers = [_follow(schedule, held[schedule.rank], channels, things) for schedule in schedules]
    while followers:
        followers = [follower for follower in followers if next(follower, None) is not None]
    different = [rank for rank, blocks in enumerate(held) if blocks != held[0]]
    _need(not different, f"ranks 0 and {different[:1]} would not have the same bits, were codes exchanged")
    return max((things.encodings[thing] for thing in held[0]), default=0)


class _Things:
    """Numbers for things, the same for those made alike. encodings: on the way to each, at most."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | int, ...], int] = {}
        self.encodings: list[int] = []

    def made(self, how: str, *of: int, encodings: int = 0) -> int:
        made: tuple[str | int, ...] = (how, *of)
        if made not in self._known:
            self._known[made] = len(self.encodings)
            self.encodings.append(encodings)
        return self._known[made]


def _follow(
    schedule: Schedule, held: list[int], channels: dict[tuple[int, int], list[int]], things: _Things
) -> Iterator[int]:
    """Follow one rank's program of codes, yielding while it must wait."""
    blocks = tuple(Span(block, block + 1) for block in range(schedule.blocks))
    program = CodedProgram(schedule, [blocks], 1, range(schedule.size))
    codes: dict[int, int] = {}
    expected: dict[int, tuple[int, int, int]] = {}
    received: dict[int, int] = defaultdict(int)
    for kind, peer, block, _, place, number, _, _ in program:
        if kind == Kind.SEND:
            channels[schedule.rank, peer].append(codes[place])
        elif kind == Kind.RECEIVE:
            expected[number] = (peer, place, received[peer])
            received[peer] += 1
        elif kind == Kind.WAIT and number in expected:
            sender, place, turn = expected[number]
            while turn >= len(channels[sender, schedule.rank]):
                yield number
            codes[place] = channels[sender, schedule.rank][turn]
        elif kind == Kind.ENCODE:
            codes[place] = things.made("code", held[block], encodings=things.encodings[held[block]] + 1)
        elif kind == Kind.DECODE:
            held[block] = codes[place]
        elif kind == Kind.ADD:
            parts = held[block], codes[place]
            held[block] = things.made("sum", *parts, encodings=max(things.encodings[part] for part in parts))


def contributions(size: int, blocks: int) -> Masks:
    """Return the start of a reduction: every rank holds its own contribution to every block."""
    return [[1 << rank] * blocks for rank in range(size)]


def _match(
    sent: dict[tuple[int, int], list[Span]], received: dict[tuple[int, int], list[Span]], index: int, *, in_place: bool
) -> None:
    """Check that what each rank sends another is what that expects: the same blocks where there is one buffer."""
    for sender, receiver in sent.keys() | received.keys():
        given, taken = sent[sender, receiver], received[sender, receiver]
        matches = given == taken if in_place else len(given) == len(taken)
        _need(
            matches,
            f"sends and receives do not match: in round {index} rank {sender} sends rank {receiver} blocks {given}, "
            f"which expects {taken}",
        )


def _take(held: list[int], span: Span, arrived: tuple[int, ...], *, reduces: bool) -> None:
    for block, mask in zip(range(*span), arrived, strict=True):
        if reduces:
            _need(held[block] & mask == 0, "a contribution is added twice")
        held[block] = held[block] | mask if reduces else mask


def _check(collective: str, schedules: Sequence[Schedule], root: int) -> None:
    size, blocks = len(schedules), schedules[0].blocks
    everyone = (1 << size) - 1
    owned = [[1 << rank if block == rank else 0 for block in range(size)] for rank in range(size)]
    every_block = [1 << block for block in range(size)]
    if collective in ("reduce_scatter", "allgather", "gather", "scatter", "alltoall"):
        _need(blocks == size, f"{collective} has one block per rank, not {blocks}")
    if collective in ("allreduce", "barrier"):
        found, wanted = run(schedules, contributions(size, blocks)), [[everyone] * blocks] * size
    elif collective == "reduce_scatter":
        state = run(schedules, contributions(size, size))
        found, wanted = [[state[rank][rank]] for rank in range(size)], [[everyone]] * size
    elif collective == "allgather":
        found, wanted = run(schedules, owned), [every_block] * size
    elif collective == "broadcast":
        found, wanted = run(schedules, contributions(size, blocks)), [[1 << root] * blocks] * size
    elif collective == "reduce":
        found, wanted = [run(schedules, contributions(size, blocks))[root]], [[everyone] * blocks]
    elif collective == "gather":
        found, wanted = [run(schedules, owned)[root]], [every_block]
    elif collective == "scatter":
        state = run(schedules, contributions(size, size))
        found, wanted = [[state[rank][rank]] for rank in range(size)], [[1 << root]] * size
    elif collective == "alltoall":
        landed = [list(masks) for masks in owned]
        found, wanted = run(schedules, contributions(size, size), landed), [every_block] * size
    else:
        raise ValueError(f"no collective is called {collective!r}")
    _need(found == wanted, "not every contribution arrives where it belongs")


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ScheduleError(otherwise)
