"""BatchShares divides global batches that do not change: by hand or by measured speed, with or without workers."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import gradwire as hvd
from tests.elastic_job import Job
from tests.harness import Worlds, wait_until
from tests.ranks.training import assert_same_on_all_ranks, in_world, on_ranks, perceptron


def made(**options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1), **options)


def step(optimizer: hvd.DistributedOptimizer, numbers: Any = (), seconds: float = 0.0) -> None:
    """Take a step. seconds: of each sample."""
    time.sleep(seconds * len(numbers))
    optimizer.zero_grad()
    optimizer.weigh(len(numbers) or 1)
    sum(parameter.square().sum() for group in optimizer.param_groups for parameter in group["params"]).backward()
    optimizer.step()


def batches(mine: list[list[int]]) -> list[list[int]]:
    """Return the global batches whose parts the ranks have, each sorted."""
    return [sorted(chain.from_iterable(parts)) for parts in zip(*hvd.allgather_object(mine), strict=True)]


def order(samples: int, epoch: int = 0, seed: int = 0) -> list[int]:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("samples", "drop_last", "sizes"),
    [
        (48, False, [12] * 4),
        (43, False, [12, 12, 12, 7]),
        (43, True, [12] * 3),
        (37, False, [12, 12, 13]),  # one sample cannot be divided
        (7, False, [7]),
        (7, True, []),
    ],
)
def test_every_sample_once(samples: int, drop_last: bool, sizes: list[int]) -> None:
    """In batches that do not depend on the shares, in two epochs."""
    for shares in ([1] * hvd.size(), list(range(3, 3 + hvd.size())), [1] * (hvd.size() - 1) + [1000]):
        sampler = hvd.BatchShares(range(samples), 12, shares=shares, seed=5, drop_last=drop_last)
        assert len(sampler) == len(sizes)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            mine = list(sampler)
            assert all(mine)
            if 12 in sizes:
                assert len(mine[0]) == sampler.shares[hvd.rank()]
            expected, all_samples = [], order(samples, epoch, 5)
            for size in sizes:
                expected.append(sorted(all_samples[:size]))
                del all_samples[:size]
            assert batches(mine) == expected


def loaded(sampler: hvd.BatchShares, workers: int) -> DataLoader[torch.Tensor]:
    """Return a loader of the sampler's batches."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # else it may have no workers
    how = {"num_workers": workers, "persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    return DataLoader(sampler.dataset, batch_sampler=sampler, **how)  # type: ignore[arg-type]


def ahead(sampler: hvd.BatchShares, count: int) -> Iterator[torch.Tensor]:
    """Yield the sampler's batches, each after so many further ones have been fetched."""
    batches = iter(sampler)
    fetched = list(islice(batches, 1 + count))
    while fetched:
        yield torch.tensor(fetched.pop(0))
        fetched += islice(batches, 1)


@in_world
def slowed(workers: int | None, epochs: int) -> list[list[int]]:
    """Train, with rank 1 four times slower. Return the parts of each batch. workers: None fetches other numbers of batches ahead
    on other ranks."""
    optimizer = made(rule=hvd.rules.Sharded() if workers is None else None)
    sampler = hvd.BatchShares(range(240), 20, optimizer=optimizer, every=8)
    loader = None if workers is None else loaded(sampler, workers)
    parts = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        mine = []
        for numbers in loader or ahead(sampler, 3 * hvd.rank()):
            step(optimizer, numbers, 0.004 if hvd.rank() == 1 else 0.001)
            mine.append(numbers.tolist())
        everyones = order(240, epoch)
        assert batches(mine) == [sorted(everyones[begin : begin + 20]) for begin in range(0, 240, 20)]
        parts += [len(each) for each in mine]
    assert sampler.state_dict()["shares"] == sampler.shares
    return list(map(list, zip(*hvd.allgather_object(parts), strict=True)))


@pytest.mark.parametrize(("size", "workers"), [(2, 0), (2, 2), (3, None)])
def test_a_slow_rank_gets_fewer_samples(ranks: Worlds, size: int, workers: int | None) -> None:
    parts, *others = ranks(size).run(slowed, workers, 3)
    assert all(each == parts for each in others)
    assert parts[0] == ([10, 10] if size == 2 else [7, 7, 6])
    assert all(sum(each) == 20 for each in parts)
    assert parts[-1][1] < 0.8 * parts[0][1]


@in_world
def interrupted(shares: list[float] | None) -> tuple[dict[str, Any], list[int]]:
    """Return the state after two of five batches, and the samples of these two."""
    optimizer = made()
    sampler = hvd.BatchShares(range(50), 10, optimizer=optimizer, shares=shares)
    sampler.set_epoch(3)
    seen: list[int] = []
    for numbers in ahead(sampler, 1 + hvd.rank()):
        seen += numbers.tolist()
        step(optimizer)
        if sampler.position == 2:
            break
    return sampler.state_dict(), seen


@in_world
def resumed(state: dict[str, Any], shares: list[float] | None) -> tuple[list[int], list[int]]:
    """Return the samples of the rest of the epoch, and the shares."""
    optimizer = made()
    sampler = hvd.BatchShares(range(50), 10, optimizer=optimizer, shares=shares)
    sampler.load_state_dict(state)
    sampler.set_epoch(state["epoch"])
    assert len(sampler) == 3
    rest = list(chain.from_iterable(sampler))
    assert len(sampler) == len(list(sampler)) == 5  # of an epoch from its beginning
    return rest, sampler.shares


@pytest.mark.parametrize(("shares", "after"), [([4, 1], [8, 2]), (None, [5, 5])])
def test_an_epoch_goes_on_from_a_checkpoint(ranks: Worlds, shares: list[float] | None, after: list[int]) -> None:
    states, seen = zip(*ranks(2).run(interrupted, shares), strict=True)
    assert states[0] == states[1]
    assert (states[0]["epoch"], states[0]["position"]) == (3, 2)
    for size in (2, 3):
        by_hand = shares and shares * size
        outcomes = ranks(size).run(resumed, states[0], by_hand and by_hand[:size])
        rest, found = zip(*outcomes, strict=True)
        assert sorted(chain(*seen, *rest)) == list(range(50))
        assert size == 3 or all(each == after for each in found)


@on_ranks(2)
def test_accumulation_uses_a_batch_for_each_backward() -> None:
    optimizer = made(backward_passes_per_step=2)
    sampler = hvd.BatchShares(range(40), 4, optimizer=optimizer)
    for number, _ in enumerate(sampler):
        step(optimizer) if number % 2 else None
        assert sampler.position == 2 * ((number + 1) // 2)


@on_ranks(2)
def test_a_joined_rank_is_not_measured_and_divides_alike_afterwards() -> None:
    optimizer = made()
    sampler = hvd.BatchShares(range(60), 12, optimizer=optimizer, every=4)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        mine = []
        for numbers in sampler:
            if (epoch, hvd.rank(), sampler.position) == (1, 1, 1):
                break  # in batches of which others then use more than this rank
            step(optimizer, numbers, 0.004 if hvd.rank() == 1 else 0.001)
            mine.append(numbers)
        if epoch == 1:
            hvd.join()
        elif epoch > 1:
            everyones = order(60, epoch)
            assert batches(mine) == [sorted(everyones[begin : begin + 12]) for begin in range(0, 60, 12)]
    assert sampler.shares[1] < 5


def updated(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@on_ranks(2, 3)
@pytest.mark.parametrize("most", [None, 4])
def test_weighed_shares_train_as_one_process_on_the_global_batch(most: int | None) -> None:
    """most: the samples of a pass, of which ranks take different numbers."""
    inputs, targets = torch.randn(43, 6, generator=torch.Generator().manual_seed(0)), torch.arange(43) % 3
    model, alone = perceptron(), perceptron()
    optimizer, plain = hvd.DistributedOptimizer(updated(model)), updated(alone)
    sampler = hvd.BatchShares(range(43), 12, shares=list(range(1, 2 * hvd.size(), 2)))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for mine in sampler:
            optimizer.zero_grad()
            *passes, last = torch.tensor(mine).split(most or len(mine))
            with optimizer.no_sync():
                for some in passes:
                    optimizer.weigh(len(some))
                    nn.functional.cross_entropy(model(inputs[some]), targets[some]).backward()
            optimizer.weigh(len(last))
            nn.functional.cross_entropy(model(inputs[last]), targets[last]).backward()
            optimizer.step()
        for everyones in torch.tensor(order(43, epoch)).split(12):
            plain.zero_grad()
            nn.functional.cross_entropy(alone(inputs[everyones]), targets[everyones]).backward()
            plain.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()
    assert_same_on_all_ranks(model.parameters())


def by_rank(*values: Any) -> Any:
    return values[hvd.rank()]


INVALID: dict[str, Callable[[], Any]] = {
    "fewer samples than ranks": lambda: hvd.BatchShares(range(9), 1, shares=[1, 1]),
    "a dataset of one sample": lambda: hvd.BatchShares(range(1), 2, shares=[1, 1]),
    "a share of zero": lambda: hvd.BatchShares(range(9), 4, shares=by_rank([1, 0], [1, 1])),
    "a share of NaN": lambda: hvd.BatchShares(range(9), 4, shares=[1, float("nan")]),
    "a share too many": lambda: hvd.BatchShares(range(9), 4, shares=[1, 1, 1]),
    "a lower bound": lambda: hvd.BatchShares(range(9), 4, shares=[1, 1], least=3),
    "an upper bound": lambda: hvd.BatchShares(range(9), 4, shares=[1, 1], most=1),
    "other shares": lambda: hvd.BatchShares(range(9), 4, shares=by_rank([1, 2], [2, 1])),
    "another seed": lambda: hvd.BatchShares(range(9), 4, shares=[1, 1], seed=by_rank(0, 1)),
    "another dataset": lambda: hvd.BatchShares(range(by_rank(9, 8)), 4, shares=[1, 1]),
    "shares that are no list": lambda: hvd.BatchShares(range(9), 4, shares=by_rank([1, 1], 1)),
    "no optimizer": lambda: hvd.BatchShares(range(9), 4),
    "no times": lambda: hvd.BatchShares(range(9), 4, optimizer=made(rule=hvd.rules.LocalUpdates(every=2))),
}


@on_ranks(2)
@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments_are_an_error_on_all_ranks(case: str) -> None:
    with pytest.raises(ValueError, match=f"rank {hvd.rank()}"):
        INVALID[case]()
    assert hvd.allgather_object(1) == [1, 1]


@on_ranks(2)
def test_ranks_at_different_batches_are_an_error_on_all_ranks() -> None:
    optimizer = made()
    sampler = hvd.BatchShares(range(9), 4, optimizer=optimizer, every=1)
    sampler.set_epoch(hvd.rank())
    next(iter(sampler))
    with pytest.raises(ValueError, match="different batches"):
        step(optimizer)


@on_ranks(2)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize(("shares", "sizes"), [([3, 1], [4, 5]), ([1, 1], [4, 5]), ([1, 1], [4, 4])])
def test_different_parts_that_are_averaged_without_weights_are_an_error_on_all_ranks(
    shares: list[int], sizes: list[int], op: str
) -> None:
    """A last batch of five samples has different parts, too."""
    optimizer = made(op=op)
    (parameter,) = optimizer.param_groups[0]["params"]
    sampler = hvd.BatchShares(range(sum(sizes)), 4, optimizer=optimizer, shares=shares)
    taken = 0
    for number, _ in enumerate(sampler):
        optimizer.zero_grad()
        parameter.square().sum().backward()
        if op == hvd.Average and sampler.position == number and (shares != [1, 1] or sizes[number] % 2):
            with pytest.raises(ValueError, match=rf"rank {hvd.rank()}: .*weigh"):
                optimizer.step()
        else:
            optimizer.step()
        taken += 1
    assert taken == 2


@on_ranks(2)
def test_states_that_do_not_fit_are_an_error_on_all_ranks() -> None:
    sampler = hvd.BatchShares(range(9), 4, shares=[1, 1], optimizer=made())
    state = sampler.state_dict()
    for change in (
        {"position": by_rank(1, 2)},
        {"position": -1},
        {"global_batch": 5},
        {"shares": by_rank(None, [1])},
        {"shares": [1, 1]},
        {"seed": by_rank(1, 0)},
    ):
        with pytest.raises(ValueError, match=f"rank {hvd.rank()}"):
            sampler.load_state_dict({**state, **change})
    with pytest.raises(RuntimeError, match="give optimizer="):
        hvd.BatchShares(range(9), 4, shares=[1, 1]).state_dict()


EPOCHS = 3


def train_elastic(send: Callable[[Any], None]) -> None:
    """Train, and send each step of this rank: epoch, number of ranks and samples. A process alone cannot hold a batch."""
    hvd.init()
    model = nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = hvd.BatchShares(range(90), 12, optimizer=optimizer, most=6, every=4)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < EPOCHS:
            sampler.set_epoch(state.epoch)
            for numbers in sampler:
                step(optimizer, numbers, 0.003)
                state.commit()
                send((state.epoch, hvd.size(), numbers))
            state.epoch += 1

    train(state)
    send(None)
    hvd.shutdown()


def test_the_global_batch_stays_when_ranks_leave_and_join() -> None:
    with Job(train_elastic) as job:
        job.start(0, 1, 2)
        job.begin(0, 1, 2)
        assert [job.take(worker)[1] for worker in range(3)] == [3] * 3
        job.kill(1)
        wait_until(lambda: job.departure(0) and job.departure(2))
        job.start(3)
        wait_until(lambda: job.generations.has_arrived(3))
        job.begin(0, 2)
        steps: dict[int, list[Any]] = {0: [], 2: [], 3: []}
        for worker in (0, 2):
            while not steps[worker] or steps[worker][-1][1] != 2:
                steps[worker].append(job.take(worker))
        job.generations.want_update(job.generation.number)
        wait_until(lambda: job.departure(0) and job.departure(2))
        job.begin(0, 2, 3)
        for worker, theirs in steps.items():
            while (sent := job.take(worker)) is not None:
                theirs.append(sent)
        last = [
            numbers for theirs in steps.values() for epoch, size, numbers in theirs if (epoch, size) == (EPOCHS - 1, 3)
        ]
        assert sorted(chain(*last)) == list(range(90))
        for theirs in steps.values():
            assert {2, 3} >= {size for _, size, _ in theirs} >= {3}
            assert all(len(numbers) <= 6 for _, _, numbers in theirs)
