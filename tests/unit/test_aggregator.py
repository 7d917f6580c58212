"""What a parameter server decides, by its four numbers: quorum, grace, staleness, and what is late."""

import random
from typing import Any

import pytest

from gradwire.trainer.servers.aggregator import Aggregator, Scheme


def aggregator(workers: int = 4, **options: Any) -> Aggregator[str]:
    return Aggregator(
        range(workers), Scheme(**{"quorum": 3, "grace_s": 0.0, "staleness": None, "late": "weight"} | options)
    )


def push(server: Aggregator[str], *workers: int, version: int = 0, now: float = 0.0, weight: float = 1.0) -> None:
    for worker in workers:
        server.push(worker, version, weight, f"{worker}@{version}", now)


def test_an_update_is_made_of_a_quorum_in_the_order_of_workers() -> None:
    server = aggregator()
    push(server, 3, 0)
    assert server.take(0.0) is None
    assert not server.may_go(3)
    push(server, 2)
    assert server.take(0.0) == [("0@0", 1 / 3), ("2@0", 1 / 3), ("3@0", 1 / 3)]
    assert server.version == 1
    assert all(server.may_go(worker) for worker in (0, 2, 3))
    assert server.take(0.0) is None


def test_two_contributions_of_one_worker_are_no_quorum_of_two() -> None:
    server = aggregator(quorum=2, late="next")
    push(server, 0, 1)
    server.take(0.0)
    push(server, 2)  # late
    push(server, 2, version=1)
    assert server.take(0.0) is None
    push(server, 0, version=1)
    assert server.take(0.0) == [("0@1", 1 / 3), ("2@0", 1 / 3), ("2@1", 1 / 3)]


def test_grace_is_waited_for_after_the_quorum_unless_all_have_come() -> None:
    server = aggregator(grace_s=5.0)
    push(server, 0, 1, now=10.0)
    assert server.due_at(10.0) is None
    push(server, 2, now=12.0)
    assert server.due_at(13.0) == 17.0
    assert server.take(16.9) is None
    assert server.take(17.0) is not None
    push(server, 0, 1, 2, version=1, now=20.0)
    push(server, 3, version=1, now=21.0)
    assert server.due_at(21.0) == 21.0
    assert len(server.take(21.0) or []) == 4


@pytest.mark.parametrize(
    ("late", "taken"),
    [
        ("weight", [("0@1", 1 / 4), ("1@1", 1 / 4), ("2@1", 1 / 4), ("3@0", 1 / 8)]),
        ("next", [("0@1", 1 / 4), ("1@1", 1 / 4), ("2@1", 1 / 4), ("3@0", 1 / 4)]),
        ("drop", [("0@1", 1 / 3), ("1@1", 1 / 3), ("2@1", 1 / 3)]),
    ],
)
def test_what_comes_late_is_weighted_counted_for_the_next_or_dropped(late: str, taken: list[tuple[str, float]]) -> None:
    server = aggregator(late=late, grace_s=1.0)
    push(server, 0, 1, 2)
    assert server.take(1.0) is not None
    push(server, 3, now=1.0)
    assert server.may_go(3)
    push(server, 0, 1, 2, version=1, now=1.0)
    assert server.take(2.0) == taken
    counts = server.counts()
    assert (counts.late, counts.dropped, counts.pending) == (1, int(late == "drop"), 0)
    assert counts.staleness == {0: 6, 1: 1}
    assert counts.contributions == {0: 2, 1: 2, 2: 2, 3: 1}


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_nobody_is_further_ahead_of_the_slowest_than_allowed(bound: int) -> None:
    server = aggregator(2, quorum=1, staleness=bound)
    for step in range(bound + 1):
        push(server, 0, version=server.version)
        server.take(0.0)
        assert server.may_go(0) == (step < bound)
    push(server, 1)
    server.take(0.0)
    assert server.may_go(0)
    assert server.may_go(1)


def test_the_lost_are_left_out_and_what_they_contributed_counts() -> None:
    server = aggregator(quorum=2, grace_s=9.0)
    push(server, 0, 1, 3)
    server.lose(3, 0.0)
    assert server.due_at(0.0) == 9.0
    server.lose(2, 0.0)
    assert [value for value, _ in server.take(0.0) or []] == ["0@0", "1@0", "3@0"]
    holds = [server.holds_quorum]
    server.lose(1, 0.0)
    assert [*holds, server.holds_quorum] == [True, False]
    assert server.counts().lost == (1, 2, 3)


def test_who_is_done_makes_the_quorum_smaller_and_is_waited_for_no_more() -> None:
    server = aggregator(2, quorum=2, staleness=0)
    push(server, 0)
    assert server.take(0.0) is None
    server.leave(1, 0.0)
    assert (server.holds_quorum, server.quorum) == (True, 1)
    assert server.take(0.0) == [("0@0", 1.0)]
    assert server.may_go(0)
    server.leave(0, 0.0)


def test_a_contribution_to_a_version_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="newest is 0"):
        push(aggregator(), 0, version=1)


@pytest.mark.parametrize("late", ["weight", "drop", "next"])
@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_and_nobody_waits_for_good(late: str, seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.randint(1, 5)
    bound = draw.choice([None, 0, 1, 2])
    server = aggregator(workers, quorum=draw.randint(1, workers), staleness=bound, late=late)
    held, waiting, steps, taken = dict.fromkeys(range(workers), 0), set[int](), dict.fromkeys(range(workers), 0), 0
    while set(held) - waiting and sum(steps.values()) < 200:
        worker = draw.choice(sorted(set(held) - waiting))
        push(server, worker, version=held[worker])
        steps[worker] += 1
        waiting.add(worker)
        taken += len(server.take(0.0) or [])
        for each in sorted(waiting):
            if server.may_go(each):
                assert bound is None or steps[each] - min(steps.values()) <= bound
                held[each] = server.version
                server.went(each)
                waiting.remove(each)
    counts = server.counts()
    assert sum(steps.values()) == 200, "all wait"
    assert counts.contributions == steps
    assert taken + counts.dropped + counts.pending == 200
    assert sum(counts.staleness.values()) == 200
    assert bound is None or counts.lead <= bound


def test_who_holds_up_a_worker_is_who_has_not_contributed_and_then_who_is_behind() -> None:
    server = aggregator(3, quorum=2, staleness=0)
    push(server, 0)
    assert server.blocking(0) == (1, 2)
    push(server, 1)
    server.take(0.0)
    assert not server.may_go(0)
    assert server.blocking(0) == (2,)
