"""Check planners by running their schedules on sets instead of numbers, without processes, tensors or a network.

A block holds the set of ranks whose contributions it contains, as a bit mask. The two masks of a reduction must not overlap, so
every contribution is added exactly once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gradwire.collectives.errors import ranks_text
from gradwire.collectives.schedules.algorithms import PLANNERS, ROOTED
from gradwire.collectives.schedules.coded import CodedProgram
from gradwire.collectives.schedules.program import Kind
from gradwire.collectives.schedules.schedule import Action, Place, Planner, Schedule, Step
from gradwire.collectives.schedules.spans import Span

#: State of a world: masks[rank][block].
Masks = list[list[int]]

#: The largest world in which check_algorithm() also checks codes; larger worlds follow the same rules.
_MOST_CODED = 16


class ScheduleError(ValueError):
    """A schedule deadlocks, loses or repeats a contribution, or does not end with the result of its collective."""


def check_algorithm(collective: str, planner: Planner, sizes: Iterable[int] = range(1, 17)) -> None:
    """Check a planner for worlds of these sizes, with hosts of one, of four and of all ranks. Rooted collectives are checked
    with the first, the middle and the last rank as root.

    For allreduce among up to 16 ranks, also check that all ranks would get the same bits with a codec that loses information in
    every encoding. Raises ScheduleError, which names the world and the fault; ValueError for an unknown collective.
    """
    if collective not in PLANNERS:
        raise ValueError(f"no collective is called {collective!r}; known are {', '.join(PLANNERS)}")
    for size in sizes:
        for root in sorted({0, size // 2, size - 1}) if collective in ROOTED else [0]:
            checked: list[Schedule] = []
            for per_host in sorted({1, min(4, size), size}):
                hosts = tuple(tuple(range(a, min(a + per_host, size))) for a in range(0, size, per_host))
                schedules = [planner(Place(rank, size, root, hosts)) for rank in range(size)]
                if schedules == checked:  # the planner ignores the hosts
                    continue
                checked = schedules
                try:
                    _check_form(schedules)
                    _check(collective, schedules, root)
                    if collective == "allreduce" and size <= _MOST_CODED:
                        encodings(schedules)
                except ScheduleError as error:
                    rooted = f", root {root}" if collective in ROOTED else ""
                    world = f"{_counted(size, 'rank')} on {_counted(len(hosts), 'host')}{rooted}"
                    raise ScheduleError(f"{collective} among {world}: {error}") from None


def _check_form(schedules: Sequence[object]) -> None:
    """Raise ScheduleError unless these are well-formed Schedules, one for each rank."""
    for rank, given in enumerate(schedules):
        if fault := _fault(given, rank, len(schedules)):
            raise ScheduleError(f"rank {rank}: {fault}")


def _fault(given: object, rank: int, size: int) -> str:
    """Return the fault in the form of a rank's Schedule; empty if there is none."""
    if not isinstance(given, Schedule):
        return f"the planner returned {given!r}, not a Schedule"
    if (given.rank, given.size) != (rank, size):
        return f"the planner returned the Schedule of rank {given.rank} of {given.size}, not {rank} of {size}"
    blocks: Any = given.blocks  # its type is not checked yet
    rounds: Any = given.rounds
    if not isinstance(blocks, int) or blocks < 1:
        return f"the buffer is cut into {blocks!r} blocks, not 1 or more"
    if not isinstance(rounds, tuple):
        return f"the rounds are {rounds!r}, not a tuple"
    for index, steps in enumerate(rounds):
        if not isinstance(steps, tuple):
            return f"round {index} is {steps!r}, not a tuple of Steps"
        for step in steps:
            if not _is_step(step):
                return f"round {index} holds {step!r}, not a Step with an Action, a peer and a Span"
    return ""


def _is_step(step: object) -> bool:
    return (
        isinstance(step, Step)
        and isinstance(step.action, Action)
        and isinstance(step.peer, int)
        and isinstance(step.span, Span)
        and all(isinstance(end, int) for end in step.span)
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def run(schedules: Sequence[Schedule], source: Masks, destination: Masks | None = None) -> Masks:
    """Return the state after all ranks have run their schedules. Receives write to `destination`; None means the source.

    Raises ScheduleError if ranks disagree on the number of rounds or blocks, a step names an invalid peer or block, a send has
    no matching receive, a contribution is added twice, or a receive overwrites a block that the same round sends or receives.
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
                _need(
                    0 <= step.peer < len(schedules),
                    f"in round {index} rank {schedule.rank} names peer {step.peer}, but the world has "
                    f"{_counted(len(schedules), 'rank')}",
                )
                _need(
                    step.peer != schedule.rank,
                    f"rank {schedule.rank} sends to or receives from itself in round {index}",
                )
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


def encodings(schedules: Sequence[Schedule], *, encodes_sums: bool = True) -> int:
    """Return the maximum number of encodings on the way of a number, in an allreduce of codes by the schedules of all ranks.

    encodes_sums: see CodedProgram. Numbers, codes and sums are symbolic things: a code or a sum is identified by the things of
    which it was made. Raises ScheduleError if ranks end with different things, or wait for codes that no rank sends.
    """
    things = _Things()
    channels: dict[tuple[int, int], list[int]] = defaultdict(list)
    held = [[things.made("number", s.rank, block) for block in range(s.blocks)] for s in schedules]
    followers = [_follow(s, held[s.rank], channels, things, encodes_sums=encodes_sums) for s in schedules]
    waiting: dict[int, tuple[int, int]] = {}  # by waiting rank: the sender of the awaited message, and its number
    while True:
        before = waiting
        waits = ((rank, next(follower, None)) for rank, follower in enumerate(followers))
        waiting = {rank: wait for rank, wait in waits if wait is not None}
        if not waiting:
            break
        rank, (peer, _) = next(iter(waiting.items()))
        _need(waiting != before, f"with a codec, rank {rank} would wait for rank {peer} forever")
    different = [rank for rank, blocks in enumerate(held) if blocks != held[0]]
    _need(not different, f"with a codec, ranks 0 and {different[:1]} would not have the same bits")
    return max((things.encodings[thing] for thing in held[0]), default=0)


class _Things:
    """Gives symbolic things numbers; things made in the same way get the same number. encodings: by number, the maximum number
    of encodings on the way to the thing."""

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
    schedule: Schedule,
    held: list[int],
    channels: dict[tuple[int, int], list[int]],
    things: _Things,
    *,
    encodes_sums: bool,
) -> Iterator[tuple[int, int]]:
    """Run one rank's program of codes on things. While the rank must wait, yield the sender and the number of the message."""
    blocks = tuple(Span(block, block + 1) for block in range(schedule.blocks))
    program = CodedProgram(schedule, [blocks], 1, range(schedule.size), encodes_sums=encodes_sums)
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
                yield sender, number
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
    """Check that each rank sends the blocks that the receiver expects: the same if there is one buffer, else equally many."""
    for sender, receiver in sent.keys() | received.keys():
        given, taken = sent[sender, receiver], received[sender, receiver]
        matches = given == taken if in_place else [s.length for s in given] == [s.length for s in taken]
        _need(
            matches,
            f"sends and receives do not match: in round {index} rank {sender} sends rank {receiver} {_listed(given)}; "
            f"rank {receiver} expects {_listed(taken)}",
        )


def _listed(spans: Sequence[Span]) -> str:
    texts = [f"block {span.start}" if span.length == 1 else f"blocks {span.start} to {span.stop - 1}" for span in spans]
    return ", ".join(texts) or "nothing"


def _take(held: list[int], span: Span, arrived: tuple[int, ...], *, reduces: bool) -> None:
    for block, mask in zip(range(*span), arrived, strict=True):
        if reduces:
            _need(held[block] & mask == 0, "a contribution is added twice")
        held[block] = held[block] | mask if reduces else mask


def _check(collective: str, schedules: Sequence[Schedule], root: int) -> None:
    """Raise ScheduleError unless the schedules give the result of their collective."""
    size, blocks = len(schedules), schedules[0].blocks
    if collective in ("reduce_scatter", "allgather", "gather", "scatter", "alltoall"):
        _need(blocks == size, f"{collective} has one block per rank, not {blocks}")
    owned = [[1 << rank if block == rank else 0 for block in range(size)] for rank in range(size)]
    source = owned if collective in ("allgather", "gather") else contributions(size, blocks)
    state = run(schedules, source, owned if collective == "alltoall" else None)
    for rank, masks in enumerate(state):
        for block, found in enumerate(masks):
            wanted = _wanted(collective, rank, block, size, root)
            if wanted is not None and wanted != found:
                lacking, foreign = _ranks(wanted & ~found), _ranks(found & ~wanted)
                faults = [f"lacks that of {ranks_text(lacking)}"] if lacking else []
                faults += [f"holds that of {ranks_text(foreign)}"] if foreign else []
                raise ScheduleError(
                    f"not every contribution arrives where it belongs: block {block} on rank {rank} {' and '.join(faults)}"
                )


def _wanted(collective: str, rank: int, block: int, size: int, root: int) -> int | None:
    """Return the ranks whose contributions a block must hold in the end; None if its contents are undefined."""
    if collective == "broadcast" or (collective == "scatter" and block == rank):
        return 1 << root
    if collective in ("allgather", "alltoall") or (collective == "gather" and rank == root):
        return 1 << block
    everywhere = collective in ("allreduce", "barrier")
    if everywhere or (collective == "reduce" and rank == root) or (collective == "reduce_scatter" and block == rank):
        return (1 << size) - 1
    return None


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ScheduleError(otherwise)
