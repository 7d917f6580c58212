"""Every algorithm, for world sizes from 1 to 64: complete, matched, free of deadlock, and as cheap as its docstring says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.collectives.schedules.algorithms import BETWEEN_HOSTS, PLANNERS, direct
from gradwire.collectives.schedules.check import ScheduleError, check_algorithm, contributions, encodings, run
from gradwire.collectives.schedules.schedule import Action, Place, Planner, Round, Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import Span
from tests.harness import wide

SIZES = (1, 2, 3, 4, 5, 7, 8, 33)
MORE_SIZES = (6, *range(9, 18), 31, 32, 47, 64)  # a check takes about the cube of the size


def plan(collective: str, algorithm: str, size: int, root: int = 0) -> list[Schedule]:
    hosts = tuple(tuple(range(start, min(start + 4, size))) for start in range(0, size, 4))
    return [PLANNERS[collective][algorithm](Place(rank, size, root, hosts)) for rank in range(size)]


def everyone(size: int) -> int:
    return (1 << size) - 1


ALL = [(collective, algorithm) for collective, planners in PLANNERS.items() for algorithm in planners]


@pytest.mark.parametrize("sizes", [SIZES, *wide(MORE_SIZES)], ids=["some sizes", "more sizes"])
@pytest.mark.parametrize(("collective", "algorithm"), ALL)
def test_every_contribution_arrives_once_where_it_belongs(
    collective: str, algorithm: str, sizes: Sequence[int]
) -> None:
    if "(" in algorithm:  # what is nested has been looked at by itself
        sizes = [size for size in sizes if size <= 16 or size in (33, 64)]
    check_algorithm(collective, PLANNERS[collective][algorithm], sizes)


# What is wrong with a planner

BLOCK = (Span(0, 1),)
RING = PLANNERS["allreduce"]["ring"]


def again(schedule: Schedule) -> Schedule:
    return replace(schedule, rounds=(schedule.rounds[0], *schedule.rounds))


def first_round(change: Callable[[Round], Round]) -> Callable[[Schedule], Schedule]:
    return lambda schedule: replace(schedule, rounds=(change(schedule.rounds[0]), *schedule.rounds[1:]))


#: What rank 1 of a ring of three does otherwise.
CHANGES: dict[str, Callable[[Schedule], Schedule]] = {
    "different numbers of rounds": lambda s: replace(s, rounds=s.rounds[:-1]),
    "cut the buffer differently": lambda s: replace(s, blocks=s.blocks + 1),
    "in round 0 rank 0 sends rank 1 block 2; rank 1 expects nothing$": first_round(lambda steps: steps[:1]),
    "in round 0 rank": first_round(lambda steps: steps * 2),
    "rank 1 sends to or receives from itself": first_round(lambda steps: tuple(replace(s, peer=1) for s in steps)),
    "names blocks": first_round(lambda steps: tuple(replace(step, span=Span(0, 9)) for step in steps)),
}


def differing(change: Callable[[Schedule], Schedule]) -> Planner:
    return lambda place: change(RING(place)) if place.rank == 1 else RING(place)


#: What is returned in place of a schedule.
RETURNED: list[tuple[str, Any]] = [
    ("the planner returned None, not a Schedule", None),
    (r"the planner returned \[\(\)\], not a Schedule", [()]),
    ("the planner returned the Schedule of rank 1 of 3, not 0 of 1", Schedule(1, 3, 1, ())),
    ("the buffer is cut into 0 blocks, not 1 or more", Schedule(0, 1, 0, ())),
    (r"the rounds are \[\(\)\], not a tuple", Schedule(0, 1, 1, [()])),  # type: ignore[arg-type]
    (r"round 0 is Step\(.*\), not a tuple of Steps", Schedule(0, 1, 1, send(1, BLOCK))),  # type: ignore[arg-type]
    (r"round 0 holds Span\(.*\), not a Step", Schedule(0, 1, 1, ((BLOCK[0],),))),  # type: ignore[arg-type]
    (r"round 0 holds Step\(.*, not a Step with", Schedule(0, 1, 1, (send(1, [(0, 1)]),))),  # type: ignore[list-item]
    (r"round 0 holds Step\(.*peer='1'", Schedule(0, 1, 1, (send("1", BLOCK),))),  # type: ignore[arg-type]
]


def of_two(place: Place) -> Schedule:
    return Schedule(place.rank, place.size, 1, (send(1 - place.rank, BLOCK) + reduce(1 - place.rank, BLOCK),))


def idle(place: Place) -> Schedule:
    return Schedule(place.rank, place.size, place.size, ())


#: By collective, what is missing where nobody does anything.
MISSING = {
    **dict.fromkeys(("allreduce", "reduce_scatter", "reduce"), "0 on rank 0 lacks that of ranks 1, 2"),
    **dict.fromkeys(("allgather", "gather", "alltoall"), "1 on rank 0 lacks that of rank 1"),
    "broadcast": "0 on rank 1 lacks that of rank 0 and holds that of rank 1",
    "scatter": "1 on rank 1 lacks that of rank 0 and holds that of rank 1",
}


def uneven(place: Place) -> Schedule:
    """Between two buffers the blocks need not be the same, but must be as many."""
    steps = send(1, [Span(0, 2)]) + receive(1, [Span(1, 2)])
    if place.rank == 1:
        steps = send(0, [Span(0, 1)]) + receive(0, [Span(0, 1)])
    return Schedule(place.rank, 2, 2, (steps,))


WRONG: list[tuple[str, Planner, Sequence[int], str]] = [
    *(("allreduce", differing(change), [3], f"3 ranks on 3 hosts: .*{said}") for said, change in CHANGES.items()),
    *(
        ("allreduce", lambda place, r=returned: r, [1], f"1 rank on 1 host: rank 0: {said}")
        for said, returned in RETURNED
    ),
    *(
        (verb, idle, [3], f"not every contribution arrives where it belongs: block {said}$")
        for verb, said in MISSING.items()
    ),
    ("allreduce", PLANNERS["reduce_scatter"]["ring"], (1, 2, 3), ""),
    ("broadcast", PLANNERS["reduce"]["tree"], (1, 2, 3), ""),
    ("allgather", PLANNERS["alltoall"]["direct"], (1, 2, 3), ""),
    ("allreduce", lambda place: of_two(place).then(of_two(place)), [2], "added twice"),
    ("allreduce", lambda place: again(RING(place)), [3], "added twice"),  # as part of a sum that has more besides
    ("allreduce", of_two, [1], r"rank 0 names peer 1, but the world has 1 rank$"),
    ("allreduce", of_two, [3], r"rank 2 names peer -1, but the world has 3 ranks$"),
    ("alltoall", uneven, [2], r"rank 0 sends rank 1 blocks 0 to 1; rank 1 expects block 0$"),
]


@pytest.mark.parametrize(("collective", "planner", "sizes", "said"), WRONG)
def test_a_planner_that_is_wrong_is_told_where(
    collective: str, planner: Planner, sizes: Sequence[int], said: str
) -> None:
    with pytest.raises(ScheduleError, match=f"{collective} among .*{said}"):
        check_algorithm(collective, planner, sizes)


def test_an_unknown_collective() -> None:
    with pytest.raises(ValueError, match="no collective is called 'dance'; known are allreduce, reduce_scatter, "):
        check_algorithm("dance", RING)


def levels(size: int) -> int:
    return ceil(log2(size))


def shares(collective: str, algorithm: str, size: int) -> tuple[int, float]:
    """(rounds, most that a rank sends as a share of the buffer): the closed forms of the docstrings."""
    part = (size - 1) / size
    power = size.bit_length() - 1
    folded = size != 1 << power
    forms: dict[tuple[str, str], tuple[int, float]] = {
        ("allreduce", "ring"): (2 * (size - 1), 2 * part),
        ("allreduce", "rsag"): (2 * levels(size), 2 * part),
        ("allreduce", "recursive_doubling"): (power + 2 * folded, power + folded),
        ("allreduce", "tree"): (2 * levels(size), max(levels(size), 1)),
        ("allreduce", "direct"): (2, 2 * part),
        ("reduce_scatter", "ring"): (size - 1, part),
        ("reduce_scatter", "rsag"): (levels(size), part),
        ("reduce_scatter", "direct"): (1, part),
        ("allgather", "ring"): (size - 1, part),
        ("allgather", "rsag"): (levels(size), part),
        ("allgather", "direct"): (1, part),
        ("broadcast", "tree"): (levels(size), levels(size)),
        ("broadcast", "direct"): (1, size - 1),
        ("broadcast", "rsag"): (1 + levels(size), 2 * part),
        ("reduce", "tree"): (levels(size), 1),
        ("reduce", "direct"): (1, 1),
        ("gather", "direct"): (1, 1 / size),
        ("scatter", "direct"): (1, part),
        ("alltoall", "direct"): (1, part),
        ("barrier", "recursive_doubling"): (power + 2 * folded, power + folded),
        ("barrier", "tree"): (2 * levels(size), max(levels(size), 1)),
    }
    return forms[collective, algorithm]


def sent_blocks(schedule: Schedule) -> int:
    """Count with repetition."""
    return sum(s.span.length for steps in schedule.rounds for s in steps if s.action is Action.SEND)


COSTED = [(c, a) for c, planners in PLANNERS.items() for a in planners if a not in BETWEEN_HOSTS]


@pytest.mark.parametrize("sizes", [SIZES, *wide(MORE_SIZES)], ids=["some sizes", "more sizes"])
@pytest.mark.parametrize(("collective", "algorithm"), COSTED)
def test_rounds_and_bytes_are_those_of_the_docstring(collective: str, algorithm: str, sizes: Sequence[int]) -> None:
    for size in sizes[1:]:
        schedules = plan(collective, algorithm, size)
        rounds, share = shares(collective, algorithm, size)
        assert len(schedules[0].rounds) == rounds, size
        assert max(sent_blocks(s) / s.blocks for s in schedules) == pytest.approx(share), size


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Ranks in any numbering, over hosts of any sizes."""
    size = draw(st.integers(1, 24))
    order = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=5)) | {0, size})
    return tuple(tuple(sorted(order[a:b])) for a, b in pairwise(cuts) if b > a)


@settings(max_examples=40)
@given(worlds())
def test_hierarchical_works_on_any_hosts_and_crosses_links_once(hosts: tuple[tuple[int, ...], ...]) -> None:
    size = sum(map(len, hosts))
    across = len(hosts)
    schedules = [PLANNERS["allreduce"]["hierarchical"](Place(r, size, 0, hosts)) for r in range(size)]
    state = run(schedules, contributions(size, schedules[0].blocks))
    assert all(mask == everyone(size) for masks in state for mask in masks)
    for host in hosts:
        leaving = sum(
            step.span.length
            for rank in host
            for steps in schedules[rank].rounds
            for step in steps
            if step.action is Action.SEND and step.peer not in host
        )
        assert leaving / schedules[0].blocks == pytest.approx(2 * (across - 1) / across)
    inside = 2 * any(len(host) > 1 for host in hosts)
    assert len(schedules[0].rounds) == inside + 2 * (across - 1)


@given(st.integers(3, 24), st.data())
def test_ranks_on_slow_links_are_leaves_of_the_tree(size: int, data: st.DataObject) -> None:
    slow = tuple(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size // 2))))
    schedules = [PLANNERS["allreduce"]["tree"](Place(r, size, slow=slow)) for r in range(size)]
    state = run(schedules, contributions(size, 1))
    assert all(mask == everyone(size) for masks in state for mask in masks)
    for rank in slow:
        steps = [step for steps in schedules[rank].rounds for step in steps]
        assert [step.action for step in steps] == [Action.SEND, Action.RECEIVE]
    for root in {0, slow[0]}:
        check = [PLANNERS["broadcast"]["tree"](Place(r, size, root, slow=slow)) for r in range(size)]
        state = run(check, [[1 << rank if rank == root else 0] for rank in range(size)])
        assert all(masks == [1 << root] for masks in state)


@pytest.mark.parametrize(
    ("algorithm", "count"),
    [("direct", lambda p: 2), ("ring", lambda p: max(2, p)), ("tree", lambda p: max(2, 1 + (p - 1).bit_length()))],
)
def test_how_often_codes_are_encoded(algorithm: str, count: Callable[[int], int]) -> None:
    for size in (1, 2, 3, 4, 5, 8, 16):
        assert encodings(plan("allreduce", algorithm, size)) == count(size)


def test_one_shot_encodes_once() -> None:
    check_algorithm("allreduce", direct.one_shot, range(1, 17))
    for size in range(1, 17):
        assert encodings([direct.one_shot(Place(rank, size)) for rank in range(size)], encodes_sums=False) == 1


def test_codes_that_nobody_sends_are_not_waited_for() -> None:
    schedules = [Schedule(rank, 2, 1, (reduce(1 - rank, BLOCK), send(1 - rank, BLOCK))) for rank in range(2)]
    with pytest.raises(ScheduleError, match="with a codec, rank 0 would wait for rank 1 forever"):
        encodings(schedules)


def test_replicas_that_would_differ_are_found() -> None:
    """Rank 0 adds three codes at once, rank 1 one and then a second to the code of a sum."""
    schedules = [
        Schedule(0, 3, 1, (send(1, BLOCK) + reduce(1, BLOCK) + reduce(2, BLOCK), (), send(2, BLOCK))),
        Schedule(1, 3, 1, (send(0, BLOCK) + reduce(0, BLOCK), reduce(2, BLOCK), ())),
        Schedule(2, 3, 1, (send(0, BLOCK), send(1, BLOCK), receive(0, BLOCK))),
    ]
    assert run(schedules, contributions(3, 1)) == [[7]] * 3
    with pytest.raises(ScheduleError, match="the same bits"):
        encodings(schedules)
