"""Every algorithm, for world sizes from 1 to 64: complete, matched, free of deadlock, and as cheap as its docstring says."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import ceil, log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.collectives.schedules.algorithms import BETWEEN_HOSTS, PLANNERS, direct
from gradwire.collectives.schedules.check import ScheduleError, check_algorithm, contributions, encodings, run
from gradwire.collectives.schedules.schedule import Action, Place, Planner, Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import Span
from tests.harness import wide

SIZES = (1, 2, 3, 4, 5, 7, 8, 33)
MORE_SIZES = (6, *range(9, 18), 31, 32, 47, 64)  # a check takes about the cube of the size


def plan(collective: str, algorithm: str, size: int, root: int = 0) -> list[Schedule]:
    hosts = tuple(tuple(range(start, min(start + 4, size))) for start in range(0, size, 4))
    return [PLANNERS[collective][algorithm](Place(rank, size, root, hosts)) for rank in range(size)]


def of(collective: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("algorithm", list(PLANNERS[collective]))


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


def changed(planner: Planner, change: Callable[[Schedule], Schedule], rank: int = 1) -> Planner:
    return lambda place: change(planner(place)) if place.rank == rank else planner(place)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: replace(s, rounds=s.rounds[:-1]), "different numbers of rounds"),
        (lambda s: replace(s, blocks=s.blocks + 1), "cut the buffer differently"),
        (
            lambda s: replace(s, rounds=(s.rounds[0][:1], *s.rounds[1:])),
            r"in round 0 rank 0 sends rank 1 block 2; rank 1 expects nothing$",
        ),
        (lambda s: replace(s, rounds=(s.rounds[0] * 2, *s.rounds[1:])), "in round 0 rank"),
        (
            lambda s: replace(s, rounds=(tuple(replace(step, peer=1) for step in s.rounds[0]), *s.rounds[1:])),
            "rank 1 sends to or receives from itself",
        ),
        (
            lambda s: replace(s, rounds=(tuple(replace(step, span=Span(0, 9)) for step in s.rounds[0]), *s.rounds[1:])),
            "names blocks",
        ),
    ],
)
def test_a_planner_that_is_wrong_for_one_rank_is_told_where(change: Callable[[Schedule], Schedule], said: str) -> None:
    with pytest.raises(ScheduleError, match=f"allreduce among 3 ranks on 3 hosts: .*{said}"):
        check_algorithm("allreduce", changed(PLANNERS["allreduce"]["ring"], change), [3])


def test_a_planner_that_is_alike_on_all_ranks_and_wrong_is_told() -> None:
    for collective, planner in (
        ("allreduce", PLANNERS["reduce_scatter"]["ring"]),
        ("broadcast", PLANNERS["reduce"]["tree"]),
        ("allgather", PLANNERS["alltoall"]["direct"]),
    ):
        with pytest.raises(ScheduleError, match=f"{collective} among "):
            check_algorithm(collective, planner)
    with pytest.raises(ScheduleError, match="added twice"):
        check_algorithm("allreduce", lambda place: twice(PLANNERS["allreduce"]["direct"](place)))
    with pytest.raises(ScheduleError, match="added twice"):  # as part of a sum that has more besides
        check_algorithm("allreduce", lambda place: first_round_again(PLANNERS["allreduce"]["ring"](place)), [3])
    with pytest.raises(ValueError, match="no collective is called 'dance'; known are allreduce, reduce_scatter, "):
        check_algorithm("dance", PLANNERS["allreduce"]["ring"])


BLOCK = (Span(0, 1),)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "the planner returned None, not a Schedule"),
        ([()], r"the planner returned \[\(\)\], not a Schedule"),
        (Schedule(1, 3, 1, ()), "the planner returned the Schedule of rank 1 of 3, not 0 of 1"),
        (Schedule(0, 1, 0, ()), "the buffer is cut into 0 blocks, not 1 or more"),
        (Schedule(0, 1, 1, [()]), r"the rounds are \[\(\)\], not a tuple"),  # type: ignore[arg-type]
        (Schedule(0, 1, 1, send(1, BLOCK)), r"round 0 is Step\(.*\), not a tuple of Steps"),  # type: ignore[arg-type]
        (Schedule(0, 1, 1, ((BLOCK[0],),)), r"round 0 holds Span\(.*\), not a Step"),  # type: ignore[arg-type]
        (Schedule(0, 1, 1, (send(1, [(0, 1)]),)), r"round 0 holds Step\(.*, not a Step with"),  # type: ignore[list-item]
        (Schedule(0, 1, 1, (send("1", BLOCK),)), r"round 0 holds Step\(.*peer='1'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_schedule_is_told_as_such(returned: Any, said: str) -> None:
    with pytest.raises(ScheduleError, match=f"allreduce among 1 rank on 1 host: rank 0: {said}"):
        check_algorithm("allreduce", lambda place: returned)


def test_a_peer_outside_of_the_world_is_told() -> None:
    def fixed(place: Place) -> Schedule:
        return Schedule(place.rank, place.size, 1, (send(1 - place.rank, BLOCK) + reduce(1 - place.rank, BLOCK),))

    check_algorithm("allreduce", fixed, [2])
    with pytest.raises(ScheduleError, match=r"rank 0 names peer 1, but the world has 1 rank$"):
        check_algorithm("allreduce", fixed)
    with pytest.raises(ScheduleError, match=r"rank 2 names peer -1, but the world has 3 ranks$"):
        check_algorithm("allreduce", fixed, [3])


def test_what_is_missing_is_told_of_the_first_block_that_is_wrong() -> None:
    def idle(place: Place) -> Schedule:
        return Schedule(place.rank, place.size, place.size, ())

    belongs = "not every contribution arrives where it belongs: block"
    for collective, said in (
        ("allreduce", "0 on rank 0 lacks that of ranks 1, 2"),
        ("reduce_scatter", "0 on rank 0 lacks that of ranks 1, 2"),
        ("allgather", "1 on rank 0 lacks that of rank 1"),
        ("broadcast", "0 on rank 1 lacks that of rank 0 and holds that of rank 1"),
        ("reduce", "0 on rank 0 lacks that of ranks 1, 2"),
        ("gather", "1 on rank 0 lacks that of rank 1"),
        ("scatter", "1 on rank 1 lacks that of rank 0 and holds that of rank 1"),
        ("alltoall", "1 on rank 0 lacks that of rank 1"),
    ):
        with pytest.raises(ScheduleError, match=f"{collective} among 3 ranks on 3 hosts.*: {belongs} {said}$"):
            check_algorithm(collective, idle, [3])


def test_parts_of_unequal_length_do_not_match() -> None:
    """Between two buffers the blocks need not be the same, but must be as many."""

    def more(place: Place) -> Schedule:
        steps = send(1, [Span(0, 2)]) + receive(1, [Span(1, 2)])
        if place.rank == 1:
            steps = send(0, [Span(0, 1)]) + receive(0, [Span(0, 1)])
        return Schedule(place.rank, 2, 2, (steps,))

    with pytest.raises(ScheduleError, match=r"rank 0 sends rank 1 blocks 0 to 1; rank 1 expects block 0$"):
        check_algorithm("alltoall", more, [2])


def first_round_again(schedule: Schedule) -> Schedule:
    return replace(schedule, rounds=(schedule.rounds[0], *schedule.rounds))


def twice(schedule: Schedule) -> Schedule:
    return schedule.then(schedule)


@contextmanager
def world_of(size: int) -> Iterator[None]:
    """Say in which world a check failed, where one test goes through them all."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"in a world of {size}") from error


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
        with world_of(size):
            schedules = plan(collective, algorithm, size)
            rounds, share = shares(collective, algorithm, size)
            assert len(schedules[0].rounds) == rounds
            assert max(sent_blocks(s) / s.blocks for s in schedules) == pytest.approx(share)


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
