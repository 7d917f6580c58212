"""Nothing grows with the number of steps or of Communicators: no object, mapping, thread, descriptor or key of the store."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.trainer.reducer.compression import NAMES
from tests.harness import EXCHANGE_TIMEOUT_S, wide
from tests.ranks.training import on_ranks

Make = Callable[[nn.Module], Any]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def wrapped(module: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(module), module.named_parameters(), bucket_bytes=9000, **options)


MAKERS: dict[str, Make] = {codec: partial(wrapped, compression=codec) for codec in (*NAMES, "auto")} | {
    "adasum": partial(wrapped, op=hvd.Adasum),
    "shards": partial(wrapped, compression="randomk", rule=hvd.rules.Sharded("bf16")),
    "next_forward": lambda m: wrapped(m, rule=hvd.rules.NextForward(m), compression="randomk"),
    "checked": partial(wrapped, check_replicas_every=1),
    "local": lambda m: wrapped(m, rule=hvd.rules.LocalUpdates(every=2, outer=sgd(m), compression="randomk")),
    "late": lambda m: wrapped(m, rule=hvd.rules.LocalUpdates(every=4, delay=1, fragments=2)),
    "server": lambda m: hvd.servers.ParameterServer(sgd(m), compression="randomk", servers=[0]),
    "hogwild": lambda m: hvd.servers.Hogwild(sgd(m), m.named_parameters()),
}


def held() -> dict[str, int]:
    """Return how much this process has of what must not grow, once garbage is collected."""
    gc.collect()
    return {
        "blocks of Python's memory": sys.getallocatedblocks(),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def assert_bounded(run: Callable[[], None], first: int, times: int, blocks: float) -> None:
    """Run something, so that what has a bound reaches it, and then many times more: each run must leave fewer blocks than given
    (beside some that depend on no run). A mapping or a descriptor may be of something else, as of an allocator.

    What a process does once, such as its first line in a log, may leave blocks, too. A leak leaves as many in each measurement,
    so if a rank has too many, all measure again.
    """
    for _ in range(first):
        run()
    for is_last in (False, True):
        before = held()
        for _ in range(times):
            run()
        grown = {name: number - before[name] for name, number in held().items()}
        kept = grown.pop("blocks of Python's memory")
        is_bounded = kept < blocks * times + 100 and max(grown.values()) < max(2, times // 10)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, is_bounded)
        if all(everyones):
            return
        assert is_bounded or not is_last, (kept, grown)


@pytest.mark.parametrize("names", [["dgc", "shards", "local", "server"], *wide(*([name] for name in MAKERS))])
@on_ranks(2)
def test_steps_leave_nothing(names: list[str]) -> None:
    inputs = torch.randn(4, 64)
    for name in names:
        torch.manual_seed(0)  # replicas start equal
        optimizer = MAKERS[name](model := nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)))

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        try:
            assert_bounded(step, 500, 300, 1.5)  # what is kept for a step takes several
        except AssertionError as error:
            raise AssertionError(name) from error
        optimizer.close()


@on_ranks(2, initialized=False)
def test_communicators_leave_nothing() -> None:
    """Each attempt of the ranks to meet leaves one key: where they met."""
    tensor, store = torch.ones(1000), dist.distributed_c10d._get_default_store()

    def use() -> None:
        with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as communicator:
            communicator.allreduce(tensor)
            communicator.allreduce(tensor, compression="int8")

    use()
    dist.barrier()
    keys = store.num_keys()
    assert_bounded(use, 30, 30, 10)  # of the thousands that it takes
    dist.barrier()
    assert store.num_keys() - keys <= 60


@pytest.mark.parametrize("rule", [None, hvd.rules.NextForward])
@on_ranks(2)
def test_optimizers_that_are_dropped_leave_nothing(rule: Make | None) -> None:
    """The model stays, and keeps no hooks of them."""
    torch.manual_seed(0)  # replicas start equal
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(50)))

    def use() -> None:
        optimizer = hvd.DistributedOptimizer(sgd(model), rule=rule and rule(model))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.settle()

    assert_bounded(use, 5, 10, 100)
