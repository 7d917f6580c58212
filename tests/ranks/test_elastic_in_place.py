"""Ranks that lose another one go on in the same processes, and so do those to which others come."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire as hvd
from gradwire.collectives import CollectiveError, Communicator, ReplicasDiffer
from gradwire.collectives.transports import Membership
from gradwire.trainer.elastic import watcher
from gradwire.trainer.world import meeting
from gradwire.trainer.world.generations import WORKER, Departure
from gradwire.trainer.world.joined import World
from tests.elastic_job import Job, await_permission
from tests.harness import RUN_TIMEOUT_S, Worlds, segments, wait_until, wide
from tests.ranks.training import assert_equal, copies

SAMPLES, GLOBAL_BATCH, EPOCHS = 96, 12, 3


def train_epochs(send: Callable[[Any], None]) -> None:
    """Train a small model, and send each step of this rank: epoch, samples, size, and how many segments are mapped. Wait in the
    last step of the first epoch until the world has the right size."""
    hvd.init()
    torch.manual_seed(1 + hvd.rank())
    data = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(data, seed=2)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    def keep_global_batch() -> None:
        optimizer.set_backward_passes_per_step(GLOBAL_BATCH // hvd.size())

    keep_global_batch()
    state.register_reset_callbacks([keep_global_batch])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < EPOCHS:
            for number in range(len(sampler) * hvd.size() // GLOBAL_BATCH):
                optimizer.zero_grad()
                chosen = sampler.get_indices(number, GLOBAL_BATCH // hvd.size())
                for index in chosen:
                    model(data[index]).square().sum().backward()
                optimizer.step()
                sampler.record_batch(number, GLOBAL_BATCH // hvd.size())
                state.commit()
                send((state.epoch, hvd.size(), optimizer.backward_passes_per_step, chosen, segments()))
                time.sleep(0.01)
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    send([os.getpid(), *copies(model.parameters())])
    hvd.shutdown()


def results_of(job: Job, worker: int) -> tuple[list[Any], Any]:
    """Return the steps of a worker that it has not sent before, and what it sends at the end."""
    steps = []
    while isinstance(sent := job.take(worker), tuple):
        steps.append(sent)
    return steps, sent


@pytest.mark.parametrize("lost", [0, *wide(2)])
def test_survivors_go_on_and_a_new_process_joins(lost: int) -> None:
    with Job(train_epochs) as job:
        job.start(0, 1, 2, 3)
        job.begin(0, 1, 2, 3)
        for worker in range(4):
            *_, size, passes, _, maps = job.take(worker)
            assert (size, passes) == (4, 3)
        job.kill(lost)
        survivors = [worker for worker in range(4) if worker != lost]
        wait_until(lambda: all(job.departure(worker) for worker in survivors))
        assert {job.departure(worker).blamed for worker in survivors} == {(lost,)}  # type: ignore[union-attr]
        job.start(4)
        wait_until(lambda: job.generations.has_arrived(4))
        job.begin(*survivors)
        early = {worker: [job.take(worker)] for worker in survivors}
        for worker, theirs in early.items():
            while theirs[-1][1] != 3:  # the update may be agreed at the commit of the next step already
                theirs.append(job.take(worker))
        job.generations.want_update(job.generation.number)
        wait_until(lambda: all(job.departure(worker) for worker in survivors))
        assert {job.departure(worker) for worker in survivors} == {Departure(is_update=True)}
        job.begin(*survivors, 4)
        steps: dict[int, list[Any]] = {}
        weights = []
        for worker in (*survivors, 4):
            steps[worker], (pid, *theirs) = results_of(job, worker)
            steps[worker] = early.get(worker, []) + steps[worker]
            assert pid == job.pid(worker)
            weights.append(theirs)
        for theirs in weights[1:]:
            assert_equal(theirs, weights[0])
        for worker in survivors:
            sizes = [size for _, size, *_ in steps[worker]]
            assert {3, 4} <= set(sizes)
            assert sizes == sorted(sizes[: sizes.index(3)], reverse=True) + sorted(sizes[sizes.index(3) :])
            held = [maps for *_, maps in steps[worker]]
            assert held[-1] < 2 * maps  # what the two worlds before held is gone
        everyone = [step for theirs in steps.values() for step in theirs]
        last = sorted(sample for epoch, _, _, chosen, _ in everyone if epoch == EPOCHS - 1 for sample in chosen)
        assert last == list(range(SAMPLES))


def test_survivors_go_on_without_a_host() -> None:
    with Job(train_epochs) as job:
        job.start(0, 1)
        job.start(2, 3, host=1)
        job.begin(0, 1, 2, 3)
        for worker in range(4):
            job.take(worker)
        job.kill(2)
        job.kill(3)
        job.begin(0, 1, leave=[0, 1])
        everyone = [results_of(job, worker)[0] for worker in (0, 1)]
        last = sorted(step[3] for steps in everyone for step in steps if step[:2] == (EPOCHS - 1, 2))
        assert sorted(sample for chosen in last for sample in chosen) == list(range(SAMPLES))


STEPS, LOST_AFTER = 12, 6

KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    ),
    "adamw": lambda model: hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01)),
    "int8 with error feedback": lambda model: hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        model.named_parameters(),
        policy={"*": hvd.ErrorFeedback("int8")},
    ),
    "local updates": lambda model: hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        rule=hvd.rules.LocalUpdates(
            every=4,
            outer=torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True),
            warmup_steps=1,
            fragments=2,
            delay=1,
        ),
    ),
    "sharded": lambda model: hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), rule=hvd.rules.Sharded()
    ),
    "next_forward": lambda model: hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), rule=hvd.rules.NextForward(model), bucket_bytes=200
    ),
}


#: Of these, those whose kinds of state others have, too.
ALIKE = ("sgd", "adamw", "local updates", "next_forward")


def train_steps(kind: str, send: Callable[[Any], None]) -> None:
    """Train, and send the weights. Worker 1 stops after a step."""
    hvd.init()
    torch.manual_seed(1 + hvd.rank())
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = KINDS[kind](model)
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            generator = torch.Generator().manual_seed(100 * state.step + hvd.rank())
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            if os.environ.get(WORKER) == "1" and state.step == LOST_AFTER:
                state.commits.settle()
                send("settled")
                await_permission("nothing")

    train(state)
    if isinstance(optimizer, hvd.DistributedOptimizer):
        optimizer.settle()
    send(copies(model.parameters()))
    hvd.shutdown()


def train_whole(kind: str) -> Any:
    sent: list[Any] = []
    train_steps(kind, sent.append)
    return sent.pop()


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind not in ALIKE), *wide(*ALIKE)])
def test_a_lost_rank_that_is_replaced_costs_no_bit(ranks: Worlds, kind: str) -> None:
    expected = ranks(3).run(train_whole, kind)
    with Job(train_steps, kind) as job:
        job.start(0, 1, 2)
        job.begin(0, 1, 2)
        assert job.take(1) == "settled"
        job.kill(1)
        job.start(3)
        job.begin(0, 3, 2, leave=[0, 2])
        for worker, weights in zip((0, 3, 2), expected, strict=True):
            assert_equal(job.take(worker), weights)


def compute_long(send: Callable[[Any], None]) -> None:
    """Send the size of each world in which this rank comes to the end. Worker 2 computes until the test allows it to go on."""
    meeting._GENERATION_S = 2 * RUN_TIMEOUT_S  # so that only the launcher's note ends a wait for a worker that has died
    hvd.init()
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.commit()
        if hvd.size() == 3:
            send("begun")
            if os.environ[WORKER] == "2":
                await_permission("compute no longer")
        hvd.allreduce(torch.ones(2))

    train(state)
    send(hvd.size())
    hvd.shutdown()


def test_a_rank_that_leaves_is_not_blamed_by_one_that_computes() -> None:
    with Job(compute_long) as job:
        job.start(0, 1, 2)
        job.begin(0, 1, 2)
        assert [job.take(worker) for worker in range(3)] == ["begun"] * 3
        job.kill(1)
        wait_until(lambda: job.departure(0))  # which waits for nobody
        job.allow("compute no longer")
        wait_until(lambda: job.departure(2))
        assert {job.departure(worker).blamed for worker in (0, 2)} == {(1,)}  # type: ignore[union-attr]
        job.begin(2, 0)
        assert [job.take(worker) for worker in (0, 2)] == [2, 2]


@pytest.mark.parametrize("place", [0, *wide(1)])
def test_a_worker_that_dies_before_it_takes_its_place_is_not_waited_for(place: int) -> None:
    """As rank 0 it would have kept the coordinator, at which the others meet."""
    with Job(compute_long) as job:
        job.start(0, 1, 2, 3)
        job.begin(0, 1, 2)
        assert [job.take(worker) for worker in range(3)] == ["begun"] * 3
        job.kill(1)
        job.allow("compute no longer")
        wait_until(lambda: job.generations.has_arrived(3))
        job.kill(3)
        workers = [0, 2]
        workers.insert(place, 3)
        job.begin(*workers, leave=[0, 2])
        job.generations.lose(job.generation.number, (3,))
        wait_until(lambda: job.departure(0) and job.departure(2))
        assert {job.departure(worker).blamed for worker in (0, 2)} == {(3,)}  # type: ignore[union-attr]
        job.begin(0, 2)
        assert [job.take(worker) for worker in (0, 2)] == [2, 2]


PLACES: dict[str, tuple[object, str]] = {
    "before torch's group": (dist, "init_process_group"),
    "after torch's group": (Membership, "everyones"),
    "before the process sets": (World, "add"),
}


def join_without_one(place: str, send: Callable[[Any], None]) -> None:
    """Send the size of the world that this rank joins. Worker 2 dies in init(), when the others have come as far as it has."""
    if os.environ[WORKER] == "2":

        def die(*_: Any, **__: Any) -> None:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(*PLACES[place], die)
    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        send(hvd.size())

    train(hvd.elastic.ObjectState(step=0))
    hvd.shutdown()


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_dies_in_init_costs_no_other(place: str) -> None:
    with Job(join_without_one, place) as job:
        job.start(0, 1, 2)
        job.begin(0, 1, 2)
        wait_until(lambda: job.departure(0) and job.departure(1))
        assert {job.departure(worker).blamed for worker in (0, 1)} == {(2,)}  # type: ignore[union-attr]
        job.start(3)  # with which the survivors connect, though torch has counted a group more on them
        job.begin(0, 1, 3)
        assert [job.take(worker) for worker in (0, 1, 3)] == [3, 3, 3]


def look_for_updates(send: Callable[[Any], None]) -> None:
    """Send the steps from which this rank goes on. Worker 1 hears of two updates: one is looked for, one found by commits."""
    hvd.init()
    state = hvd.elastic.ObjectState(step=0)
    heard_at = [2, 5] if os.environ[WORKER] == "1" else []

    @hvd.elastic.run
    def train(state: Any) -> None:
        send(state.step)
        while state.step < 9:
            state.step += 1
            if state.step in heard_at[:1]:
                heard_at.pop(0)
                state.commits.settle()  # or the commit before would find it, or not
                state.on_hosts_updated()
            if state.step < 4:
                state.check_host_updates()
            state.commit()

    train(state)
    hvd.shutdown()


def test_all_ranks_stop_after_the_same_step_where_one_hears_of_an_update() -> None:
    with Job(look_for_updates) as job:
        job.start(0, 1)
        job.begin(0, 1)
        steps = {worker: [job.take(worker)] for worker in (0, 1)}
        for _ in range(2):
            wait_until(lambda: job.departure(0) and job.departure(1))
            assert job.departure(0) == job.departure(1) == Departure(is_update=True)
            job.begin(1, 0)
            for worker in (0, 1):
                steps[worker].append(job.take(worker))
        for worker in (0, 1):
            assert steps[worker] == [0, 1, 6]  # step 2 is not committed; step 6 is, after commit 5 has found the update


class LostWhileRestoring(hvd.elastic.ObjectState):
    """A state of a generation in which a rank is lost before training begins. That is the second generation of the process."""

    generations = 0

    def begin(self, *arguments: Any) -> None:
        super().begin(*arguments)
        LostWhileRestoring.generations += 1
        if LostWhileRestoring.generations == 2:
            raise CollectiveError(f"early, of rank {hvd.rank()}")


def fail_each_time(send: Callable[[Any], None]) -> None:
    hvd.init()
    is_updated = False

    @hvd.elastic.run(max_failures=2)
    def train(state: Any) -> None:
        nonlocal is_updated
        send("begun")
        if not is_updated:
            is_updated = True
            raise hvd.elastic.HostsUpdatedInterrupt("hosts were added")
        raise CollectiveError(f"late, of rank {hvd.rank()}")

    try:
        train(LostWhileRestoring(step=0))
    except hvd.elastic.GaveUp as error:
        send(str(error))


def test_ranks_that_get_no_further_give_up_and_end_the_job() -> None:
    """An update is no failure, an error before training is one, and all ranks hear the reason of each rank."""
    with Job(fail_each_time) as job:
        job.start(0, 1)
        job.begin(0, 1)
        for is_lost_early in (True, False):
            assert [job.take(worker) for worker in (0, 1)] == ["begun"] * 2
            for _ in range(1 + is_lost_early):
                job.begin(0, 1, leave=[0, 1])
        for worker in (0, 1):
            said = job.take(worker)
            assert "have failed 2 times since commit 1, and are not started again: " in said
            assert all(f"late, of rank {rank}" in said for rank in (0, 1))
            assert "early" not in said
        with pytest.raises(RuntimeError, match="the job has ended: ranks have failed 2 times"):
            job.generations.await_generation(0, job.generation.number, time.monotonic() + 10)


def find_that_replicas_differ(send: Callable[[Any], None]) -> None:
    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        raise ReplicasDiffer("weight", [1, 2], 1, rank=hvd.rank(), operation="check")

    try:
        train(hvd.elastic.ObjectState(step=0))
    except ReplicasDiffer as error:
        send(str(error))


def test_replicas_that_differ_end_the_job() -> None:
    """A commit holds a part of each replica, so that nothing later would find that they differ."""
    with Job(find_that_replicas_differ) as job:
        job.start(0, 1)
        job.begin(0, 1)
        for worker in (0, 1):
            assert "weight" in job.take(worker)
        with pytest.raises(RuntimeError, match=r"the job has ended: rank [01]: check: .*weight"):
            job.generations.await_generation(0, job.generation.number, time.monotonic() + 10)


def lose_all_commits(send: Callable[[Any], None]) -> None:
    hvd.init()
    torch.manual_seed(int(os.environ[WORKER]))
    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, sampler=hvd.elastic.ElasticSampler(range(8)), step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        moments = [each["exp_avg"].clone() for each in optimizer.state.values()]
        send([state.step, state.sampler.epoch, *copies(model.parameters()), *moments])
        if state.step == 0:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.step = 5
            state.sampler.set_epoch(3)
            moments = [each["exp_avg"].clone() for each in optimizer.state.values()]
            send([state.step, state.sampler.epoch, *copies(model.parameters()), *moments])
            state.commits.settle()
            watcher.remove(state.memory.path("").name)
            raise CollectiveError("as when a host is lost, and the one with its copies")

    train(state)
    hvd.shutdown()


def test_without_commits_the_state_is_that_of_a_rank_that_has_trained() -> None:
    with Job(lose_all_commits) as job:
        job.start(0)
        job.begin(0)
        assert job.take(0)[0] == 0
        step, epoch, *tensors = job.take(0)
        assert (step, epoch, len(tensors)) == (5, 3, 4)
        job.start(1)
        job.begin(1, 0, leave=[0])  # the new one is rank 0
        for worker in (0, 1):
            taken = job.take(worker)
            assert taken[:2] == [5, 3]
            assert_equal(taken[2:], tensors)


def use_a_communicator_of_two(send: Callable[[Any], None]) -> None:
    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        Communicator().close()  # which is not one that has failed
        two = dist.new_group([1, 2])
        communicator = Communicator(two) if hvd.rank() > 0 else None
        send("begun")
        if communicator is not None and hvd.rank() == 1:
            communicator.barrier()
        await_permission("go on")

    train(hvd.elastic.ObjectState(step=0))


def test_an_error_in_the_scripts_own_communicator_blames_nobody() -> None:
    """Its ranks have other numbers in the world."""
    with Job(use_a_communicator_of_two) as job:
        job.start(0, 1, 2)
        job.begin(0, 1, 2)
        assert [job.take(worker) for worker in range(3)] == ["begun"] * 3
        job.kill(2)
        wait_until(lambda: job.departure(1))
        assert job.departure(1).blamed == ()  # type: ignore[union-attr]


def offer_what_is_bound(send: Callable[[Any], None]) -> None:
    hvd.init()
    world = Communicator()

    def optimizer(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), **options)

    @hvd.elastic.run
    def train(state: Any) -> None:
        send("called")

    bound: list[Callable[[], Any]] = [
        lambda: nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))),
        lambda: optimizer(process_set=world),
        lambda: optimizer(rule=hvd.rules.LocalUpdates(every=2, inner=hvd.global_process_set)),
    ]
    for make in bound:
        made = make()
        try:
            train(hvd.elastic.ObjectState(made=made))
        except ValueError as error:
            send(str(error))
        if hasattr(made, "close"):
            made.close()
        del made
        gc.collect()
    kept = optimizer(process_set=world)
    try:
        train(hvd.elastic.ObjectState(step=0))
    except ValueError as error:
        send(str(error))
    kept.close()
    hvd.shutdown()


def test_what_cannot_go_on_with_other_ranks_is_refused_at_the_first_call() -> None:
    with Job(offer_what_is_bound) as job:
        job.start(7)
        job.begin(7)
        for what in ("DistributedDataParallel", "DistributedOptimizer of some", "DistributedOptimizer of some"):
            said = job.take(7)
            assert f"'made' is a {what}" in said
            assert "torchrun --max-restarts" in said
        assert "there is a DistributedOptimizer of some" in job.take(7)
