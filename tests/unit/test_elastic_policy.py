"""What an elastic job decides, whatever comes in whatever order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gradwire.trainer.launcher.hosts import Host
from gradwire.trainer.launcher.options import Elastic
from gradwire.trainer.launcher.policy import (
    BLAMED_S,
    GRACE_S,
    NEW_STARTS,
    TOGETHER_S,
    VAIN_GENERATIONS,
    JobPolicy,
    next_generation,
)
from gradwire.trainer.launcher.workers import (
    HOST_FAILURES,
    LONGEST_PAUSE_S,
    LOST_PAUSE_S,
    Action,
    Begin,
    End,
    Kill,
    Release,
    Say,
    Start,
    Stop,
    Update,
)
from gradwire.trainer.world.generations import Departure, Generation

START_S = 30.0
SCRIPT = Path("discover")
LOST = Departure(is_update=False, reason="PeerLost")
UPDATE = Departure(is_update=True)


def set_hosts(policy: JobPolicy, slots: dict[str, int]) -> None:
    policy.workers.set_hosts(Host(name, number, is_here=False) for name, number in slots.items())


def fresh(wanted: Elastic, hosts: dict[str, int]) -> JobPolicy:
    policy = JobPolicy(wanted, START_S)
    set_hosts(policy, hosts)
    return policy


def begun(wanted: Elastic, hosts: dict[str, int]) -> JobPolicy:
    """Return a policy whose first generation has begun at 0 s, with all workers that it starts."""
    policy = fresh(wanted, hosts)
    for action in policy.decide(0):
        assert isinstance(action, Start)
        policy.arrived(action.worker)
    (begin,) = policy.decide(0)
    assert isinstance(begin, Begin)
    return policy


def workers_of(actions: list[Action]) -> tuple[int, ...]:
    """Return the workers of the one generation that begins."""
    (begin,) = [action for action in actions if isinstance(action, Begin)]
    return begin.generation.workers


@pytest.mark.parametrize(
    ("staying", "joining", "workers"),
    [
        ((0, 1, 11), (), (0, 1, 11)),
        ((0, 1, 11), (12,), (0, 1, 12, 11)),
        ((0, 1, 11), (20,), (0, 1, 20, 11)),
        ((1, 10, 11), (12,), (1, 10, 11, 12)),  # beside those of its host
        ((0, 1, 10, 11), (2,), (0, 1, 2, 10, 11)),
        ((10, 11), (20, 21), (20, 21, 10, 11)),
        ((0, 11), (20, 2, 12), (0, 2, 12, 11, 20)),
    ],
)
def test_ranks(staying: tuple[int, ...], joining: tuple[int, ...], workers: tuple[int, ...]) -> None:
    """Of workers 0, 1 on one host and 10, 11 on another."""
    nodes = {worker: worker // 10 for worker in range(30)}
    generation = next_generation(Generation(4, (0, 1, 10, 11), (0, 0, 1, 1)), staying, joining, nodes)
    assert generation == Generation(5, workers, tuple(nodes[worker] for worker in workers))


def test_one_that_others_blame_is_killed_and_those_that_compute_are_awaited() -> None:
    policy = begun(Elastic(), {"a": 3})
    policy.departed(0, replace(LOST, blamed=(1,)), now=10)
    assert policy.decide(10 + BLAMED_S - 0.01) == []
    assert policy.decide(10 + BLAMED_S) == [Kill(1)]
    assert policy.decide(10 + Elastic.timeout_s - 0.01) == []
    policy.departed(2, LOST, now=100)
    assert workers_of(policy.decide(100)) == (0, 2)


def test_one_that_never_answers_is_killed_at_last() -> None:
    policy = begun(Elastic(max_ranks=2), {"a": 2})
    policy.exited(0, -9, now=10)
    assert policy.decide(10) == [Start(2, 0, 0)]
    policy.exited(2, 1, now=11)
    end = 10 + Elastic.timeout_s
    assert Kill(1) not in policy.decide(end - 0.01)
    assert policy.decide(end)[0] == Kill(1)


@pytest.mark.parametrize("code", [-9, 1])
def test_what_fails_because_one_was_killed_is_started_again_all_together(code: int) -> None:
    """As ranks do that have not called the decorated function. Errors of the script alone end the job, and too many kills
    without a new commit between them."""
    policy = begun(Elastic(min_ranks=1, max_ranks=2), {"a": 2})
    worker = 0
    for start in range(2 * NEW_STARTS - 1):
        policy.resumed(7 if start >= NEW_STARTS - 1 else 0)
        policy.exited(worker, code, now=10)
        policy.exited(worker + 1, 1, now=10)
        if code == 1:
            break
        worker += 2
        said, *starts = policy.decide(10)
        assert isinstance(said, Say)
        assert starts == [Start(worker, 0, 0), Start(worker + 1, 0, 1)]
        policy.arrived(worker)
        assert policy.decide(10) == []
        policy.arrived(worker + 1)
        assert workers_of(policy.decide(10)) == (worker, worker + 1)
    else:
        policy.exited(worker, code, now=10)
        policy.exited(worker + 1, 1, now=10)
    assert policy.decide(10) == [End((worker, worker + 1), "no rank survived")]


def test_ranks_are_interrupted_once_for_workers_that_come_together() -> None:
    policy = begun(Elastic(max_ranks=4), {"a": 2})
    set_hosts(policy, {"a": 2, "b": 2})
    assert policy.decide(40) == [Start(2, 1, 0), Start(3, 1, 1)]
    policy.arrived(2)
    assert policy.decide(41) == []
    assert policy.decide(41 + TOGETHER_S) == [Update(0)]
    policy.departed(0, UPDATE, 50)
    policy.arrived(3)
    assert policy.decide(50) == []
    policy.departed(1, UPDATE, 50)
    assert workers_of(policy.decide(50)) == (0, 1, 2, 3)


def test_what_is_learnt_goes_from_one_host_to_another() -> None:
    """They are ranks together for one generation."""
    policy = begun(Elastic(max_ranks=1, discovery_script=SCRIPT), {"a": 1})
    set_hosts(policy, {"b": 1})
    assert policy.decide(40) == [Start(1, 1, 0)]
    policy.arrived(1)
    assert policy.decide(41) == [Update(0)]
    policy.departed(0, UPDATE, 42)
    assert workers_of(policy.decide(42)) == (0, 1)
    assert policy.decide(42) == [Update(1)]
    policy.departed(0, UPDATE, 43)
    policy.departed(1, UPDATE, 43)
    begin, stop = policy.decide(43)
    assert workers_of([begin]) == (1,)
    assert stop == Stop(0)
    policy.exited(0, -15, 44)
    assert policy.decide(44) == [Release(0)]


def test_a_host_that_comes_back() -> None:
    """Its ranks stay as if nothing had been, unless others have been started in their place."""
    policy = begun(Elastic(max_ranks=1, discovery_script=SCRIPT), {"a": 1})
    set_hosts(policy, {})
    assert policy.decide(40) == []
    set_hosts(policy, {"a": 1, "b": 1})
    assert policy.decide(41) == []
    set_hosts(policy, {"b": 1})
    assert policy.decide(42) == [Start(1, 1, 0)]
    set_hosts(policy, {"a": 1, "b": 1})
    policy.arrived(1)
    assert policy.decide(43) == [Update(0)]
    policy.departed(0, UPDATE, 44)
    assert workers_of(policy.decide(44)) == (0, 1)
    assert policy.decide(44) == [Update(1)]


def test_a_host_whose_workers_always_fail_is_left_alone() -> None:
    policy = begun(Elastic(max_ranks=2), {"a": 1, "b": 1, "c": 1})
    policy.exited(1, 1, now=10)
    policy.departed(0, LOST, now=10)
    begin, start = policy.decide(10)
    assert workers_of([begin]) == (0,)
    for _ in range(HOST_FAILURES):
        assert isinstance(start, Start)
        assert start.node == 1
        policy.exited(start.worker, 1, now=11)
        (start,) = policy.decide(11)
    assert isinstance(start, Start)
    assert start.node == 2


def test_a_host_that_was_lost_is_tried_again_less_and_less_often() -> None:
    policy = begun(Elastic(max_ranks=2), {"a": 1, "b": 1})
    policy.host_lost(1, "silent", now=10)
    policy.departed(0, LOST, now=10)
    (begin,) = policy.decide(10)
    assert isinstance(begin, Begin)
    assert begin.news[0] == "host b was lost, and is tried again in 10 s: silent"
    now, pauses = 10.0, [10, 20, 40, 80, 120, 120, 120, 120]
    for worker, (pause_s, next_pause_s) in enumerate(pairwise(pauses), start=2):
        assert policy.decide(now + pause_s - 0.01) == []
        now += pause_s
        assert policy.decide(now) == [Start(worker, 1, 0)]
        policy.host_lost(1, "no route", now)
        assert policy.decide(now) == [Say(f"host b was lost, and is tried again in {next_pause_s} s: no route")]
    now += next_pause_s
    (start,) = policy.decide(now)
    assert isinstance(start, Start)
    policy.arrived(start.worker)
    assert policy.decide(now) == [Update(1)]
    policy.departed(0, UPDATE, now)
    (begin,) = policy.decide(now)
    assert isinstance(begin, Begin)
    assert begin.generation.workers == (0, start.worker)
    assert begin.news == (f"worker {start.worker} on host b joined as rank 1",)
    now += LONGEST_PAUSE_S
    policy.host_lost(1, "silent", now)
    policy.departed(0, LOST, now)
    (begin,) = policy.decide(now)
    assert isinstance(begin, Begin)
    assert "tried again in 10 s" in begin.news[0]


def test_a_host_that_was_lost_and_taken_away_is_not_tried_again() -> None:
    policy = begun(Elastic(discovery_script=SCRIPT), {"a": 1, "b": 1})
    set_hosts(policy, {"a": 1})
    assert policy.decide(5) == [Update(0)]
    policy.host_lost(1, "silent", now=10)
    policy.departed(0, LOST, now=10)
    begin, release = policy.decide(10)
    assert isinstance(begin, Begin)
    assert begin.news == ("host b was lost: silent", "worker 1 on host b was lost with its host")
    assert release == Release(1)
    assert policy.decide(10 + LONGEST_PAUSE_S) == []


def test_too_few_ranks_end_the_job_where_no_others_can_come() -> None:
    policy = begun(Elastic(min_ranks=2, max_ranks=2), {"a": 1, "b": 1})
    policy.exited(1, 1, now=10)
    policy.departed(0, LOST, now=10)
    for worker in range(2, 2 + HOST_FAILURES):
        assert Start(worker, 1, 0) in policy.decide(10)
        policy.exited(worker, 1, now=10)
    assert policy.decide(10) == [
        End((1, 2, 3, 4), "1 of at least 2 ranks can continue, and no host is left for others")
    ]


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("script", [None, SCRIPT])
def test_too_few_ranks_wait_for_a_lost_host(script: Path | None, comes_back: bool) -> None:
    policy = begun(Elastic(min_ranks=2, max_ranks=2, discovery_script=script), {"a": 1, "b": 1})
    policy.host_lost(1, "by ssh: no route", now=10)
    policy.departed(0, LOST, now=10)
    (said,) = policy.decide(10)
    assert isinstance(said, Say)
    assert policy.decide(10 + LOST_PAUSE_S) == [Start(2, 1, 0)]
    if comes_back:
        policy.arrived(2)
        assert workers_of(policy.decide(11 + LOST_PAUSE_S)) == (0, 2)
    else:
        policy.host_lost(1, "by ssh: no route", now=10 + LOST_PAUSE_S)
        late = f"no generation could begin within {Elastic.timeout_s} s: 1 of at least 2 ranks found"
        assert policy.decide(10 + Elastic.timeout_s) == [End((1, 2), late)]


def test_a_host_that_is_lost_before_the_first_generation_ends_a_job_that_needs_it() -> None:
    policy = fresh(Elastic(min_ranks=2, max_ranks=2), {"a": 1, "b": 1})
    assert policy.decide(0) == [Start(0, 0, 0), Start(1, 1, 0)]
    policy.arrived(0)
    policy.host_lost(1, "no route", now=1)
    (end,) = policy.decide(1)
    assert end == End((1,), "1 of at least 2 ranks can continue, and no host is left for others")


def test_the_first_generation_does_not_wait_for_ever_for_all() -> None:
    policy = fresh(Elastic(min_ranks=2, ranks=3, max_ranks=3), {"a": 3})
    assert policy.decide(0) == [Start(0, 0, 0), Start(1, 0, 1), Start(2, 0, 2)]
    policy.arrived(0)
    assert policy.decide(START_S) == []
    policy.arrived(2)
    assert policy.decide(START_S - 1) == []
    assert workers_of(policy.decide(START_S)) == (0, 2)


def test_nobody_replaces_what_fails_before_any_has_arrived() -> None:
    policy = fresh(Elastic(ranks=2, max_ranks=2), {"a": 2})
    assert len(policy.decide(0)) == 2
    policy.exited(0, 1, now=2)
    assert policy.decide(2) == []
    policy.exited(1, 1, now=3)
    assert policy.decide(3) == [End((0, 1), "")]


def test_one_that_has_finished_waits_for_the_others() -> None:
    policy = begun(Elastic(), {"a": 2})
    policy.exited(0, 0, now=10)
    assert policy.decide(1000) == []
    policy.exited(1, 0, now=1000)
    assert policy.decide(1000) == [End((), "")]

    policy = begun(Elastic(), {"a": 3})
    policy.exited(0, 0, now=10)
    policy.exited(1, 3, now=11)
    assert policy.decide(11 + GRACE_S - 0.01) == []
    assert policy.decide(11 + GRACE_S) == [End((1,), "not all ranks have finished")]


def test_as_many_changes_as_are_allowed() -> None:
    policy = begun(Elastic(reset_limit=0), {"a": 2, "b": 1})
    set_hosts(policy, {"a": 2, "b": 1, "c": 4})
    assert policy.decide(5) == []
    policy.exited(2, -9, now=10)
    policy.departed(0, LOST, now=10)
    policy.departed(1, LOST, now=10)
    assert policy.decide(10) == [End((2,), "generation 0 is the last one that --reset-limit allows")]


@pytest.mark.parametrize("trains", [False, True])
def test_ranks_that_cannot_begin_to_train_end_the_job(trains: bool) -> None:
    policy = begun(Elastic(), {"a": 2})
    for number in range(1, VAIN_GENERATIONS + 1):
        if trains:
            policy.resumed(0)
        policy.departed(0, replace(LOST, reason="no route"), now=number)
        policy.departed(1, LOST, now=number)
        (action,) = policy.decide(number)
        if number == VAIN_GENERATIONS and not trains:
            assert action == End((), "the ranks cannot begin to train; worker 0: no route; worker 1: PeerLost")
        else:
            assert isinstance(action, Begin)
            assert action.news == (() if trains else ("before, worker 0: no route",))


class Jobs(RuleBasedStateMachine):
    """A job to which anything happens, and what must be so nevertheless."""

    names = st.sampled_from("abc")
    slots = st.dictionaries(names, st.integers(1, 2))

    @initialize(
        least=st.integers(1, 3),
        more=st.none() | st.integers(0, 2),
        limit=st.none() | st.integers(0, 2),
        hosts=slots,
        comes_and_goes=st.booleans(),
        starts=st.integers(0, 4),
    )
    def begin(
        self, least: int, more: int | None, limit: int | None, hosts: dict[str, int], comes_and_goes: bool, starts: int
    ) -> None:
        most = None if more is None else least + more
        script = SCRIPT if comes_and_goes else None
        self.wanted = Elastic(least, most, most, script, limit)
        self.policy = JobPolicy(self.wanted, START_S)
        self.now = 0.0
        self.slots: dict[int, tuple[int, int]] = {}
        self.running: set[int] = set()
        self.arrived: set[int] = set()
        self.given_up: set[int] = set()
        self.lost_at: dict[int, float] = {}
        self.generation: Generation | None = None
        self.departed: set[int] = set()
        self.asked = self.has_finished = self.was_struck = False
        self.new_starts = self.commit = 0
        self.end: End | None = None
        set_hosts(self.policy, hosts if sum(hosts.values()) >= least else {"a": least})
        self.decide()
        if starts:
            self.all_arrive()

    def decide(self) -> None:
        for action in self.policy.decide(self.now):
            assert self.end is None
            match action:
                case Start(worker, node, slot):
                    assert worker not in self.slots
                    assert not self.has_finished
                    assert (node, slot) not in [self.slots[each] for each in self.running]
                    assert slot < self.policy.workers.hosts[node].slots
                    assert self.now >= self.lost_at.get(node, -LOST_PAUSE_S) + LOST_PAUSE_S
                    self.slots[worker] = node, slot
                    self.running.add(worker)
                case Kill(worker):
                    assert worker in self.staying
                    self.given_up.add(worker)
                    self.was_struck = True
                case Stop(worker):
                    assert worker in self.running
                    assert worker not in self.members
                    self.given_up.add(worker)
                case Update(number):
                    assert self.generation is not None
                    assert (number, self.asked) == (self.generation.number, False)
                    self.asked = True
                case Begin(generation):
                    self.check(generation)
                    self.generation, self.departed, self.asked, self.was_struck = generation, set(), False, False
                case End():
                    self.end = action

    def check(self, generation: Generation) -> None:
        workers, before = generation.workers, self.members
        assert not self.has_finished
        assert not self.staying
        assert len(set(workers)) == len(workers) >= self.wanted.min_ranks
        assert set(workers) <= self.running & self.arrived - self.given_up
        assert generation.nodes == tuple(self.slots[worker][0] for worker in workers)
        runs = [node for rank, node in enumerate(generation.nodes) if rank == 0 or node != generation.nodes[rank - 1]]
        assert len(set(runs)) == len(runs)
        assert self.wanted.reset_limit is None or generation.number <= self.wanted.reset_limit
        welcome = [worker for worker in workers if self.policy.workers.of[worker].is_welcome]
        assert self.wanted.max_ranks is None or len(welcome) <= self.wanted.max_ranks
        if self.generation is None:
            assert generation.number == 0
            return
        assert generation.number == self.generation.number + 1
        kept = [worker for worker in before if worker in workers]
        self.new_starts = 0 if kept else self.new_starts + 1
        assert self.new_starts <= self.was_struck * NEW_STARTS
        assert kept == [worker for worker in workers if worker in before]
        if sorted(generation.nodes) == sorted(self.generation.nodes):
            assert [before.index(worker) for worker in kept] == [workers.index(worker) for worker in kept]

    @property
    def members(self) -> tuple[int, ...]:
        return () if self.generation is None else self.generation.workers

    @property
    def staying(self) -> list[int]:
        return sorted(set(self.members) & self.running - self.departed - self.given_up)

    def exit(self, worker: int, code: int) -> None:
        self.running.remove(worker)
        self.was_struck |= code < 0 and worker in self.members
        self.has_finished |= (
            code == 0 and worker not in self.given_up and (self.generation is None or worker in self.members)
        )
        self.policy.exited(worker, code, self.now)
        self.decide()

    def depart(self, worker: int, departure: Departure) -> None:
        self.departed.add(worker)
        self.policy.departed(worker, departure, self.now)
        self.decide()

    def arrive(self, worker: int) -> None:
        self.arrived.add(worker)
        self.policy.arrived(worker)
        self.decide()

    @property
    def coming(self) -> list[int]:
        return sorted(self.running - self.arrived - self.given_up)

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def one_arrives(self, data: st.DataObject) -> None:
        self.arrive(data.draw(st.sampled_from(self.coming)))

    @precondition(lambda self: self.coming)
    @rule()
    def all_arrive(self) -> None:
        for worker in self.coming:
            if worker in self.coming:  # still
                self.arrive(worker)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), code=st.sampled_from([-9, 1]))
    def one_fails(self, data: st.DataObject, code: int) -> None:
        self.exit(data.draw(st.sampled_from(sorted(self.running))), code)

    @precondition(lambda self: self.staying)
    @rule(data=st.data(), seldom=st.integers(0, 9))
    def one_finishes(self, data: st.DataObject, seldom: int) -> None:
        if seldom == 0:
            self.exit(data.draw(st.sampled_from(self.staying)), 0)

    @precondition(lambda self: self.staying)
    @rule(data=st.data(), blames=st.booleans())
    def one_departs(self, data: st.DataObject, blames: bool) -> None:
        blamed = data.draw(st.sampled_from(self.members))
        self.depart(data.draw(st.sampled_from(self.staying)), replace(LOST, blamed=(blamed,) * blames))

    @precondition(lambda self: self.asked or self.departed)
    @rule()
    def all_depart(self) -> None:
        for worker in self.staying:
            self.depart(worker, UPDATE if self.asked else LOST)

    @rule()
    def things_go_well(self) -> None:
        for worker in sorted(self.running & self.given_up):
            self.exit(worker, -9)
        self.all_arrive()
        if self.departed or self.asked or set(self.members) - self.running:
            self.all_depart()

    @precondition(lambda self: self.generation is not None)
    @rule(commit=st.integers(0, 3))
    def training_resumes(self, commit: int) -> None:
        if commit > self.commit:
            self.commit, self.new_starts = commit, 0
        self.policy.resumed(commit)

    @rule(seconds=st.sampled_from([0.1, BLAMED_S, TOGETHER_S, START_S, LONGEST_PAUSE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.decide()

    @precondition(lambda self: self.wanted.discovery_script is not None)
    @rule(hosts=slots)
    def hosts_change(self, hosts: dict[str, int]) -> None:
        set_hosts(self.policy, hosts)
        self.decide()

    @rule(data=st.data())
    def a_host_is_lost(self, data: st.DataObject) -> None:
        nodes = sorted({self.slots[worker][0] for worker in self.running})
        if nodes:
            node = data.draw(st.sampled_from(nodes))
            lost = {worker for worker in self.running if self.slots[worker][0] == node}
            self.running -= lost
            self.was_struck |= not lost.isdisjoint(self.members)
            self.lost_at[node] = self.now
            self.policy.host_lost(node, "it fell silent", self.now)
            self.decide()

    @invariant()
    def hosts_that_were_lost_are_used_again(self) -> None:
        """Where ranks are trained, and there may be more of them."""
        is_training = self.generation is not None and self.end is None and not self.has_finished
        if not is_training or self.generation.number == self.wanted.reset_limit:
            return
        welcome = [worker for worker in self.policy.workers.of.values() if worker.is_welcome]
        if self.wanted.max_ranks is None or len(welcome) < self.wanted.max_ranks:
            for node, lost_at in self.lost_at.items():
                host = self.policy.workers.hosts[node]
                if self.now >= lost_at + LONGEST_PAUSE_S and not (host.is_failed or host.is_released):
                    assert sum(self.slots[worker][0] == node for worker in self.running) >= host.slots

    @invariant()
    def an_end_is_told(self) -> None:
        if self.end is not None:
            assert self.policy.is_over
            assert self.end.reason or self.end.failed or self.has_finished

    def teardown(self) -> None:
        """Let everything go well from here on: the job ends, and well where no rank is missing."""
        for _ in range(1000):
            if self.end is not None:
                return
            self.things_go_well()
            if self.generation is not None and not (self.departed or self.asked or set(self.members) - self.running):
                for worker in self.staying:
                    self.exit(worker, 0)
                assert self.end == End((), "")
            self.now += 1
            self.decide()
        raise AssertionError("the job does not end")


TestJobs = Jobs.TestCase
TestJobs.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
