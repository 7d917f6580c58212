"""The harness itself: a failing or hanging rank is an error that says what every rank did."""

import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed

from tests import harness
from tests.harness import RanksFailedError, World, Worlds


def sum_of_ranks(offset: int) -> int:
    tensor = torch.tensor([torch.distributed.get_rank() + offset])
    torch.distributed.all_reduce(tensor)
    return int(tensor)


def process_id() -> int:
    return os.getpid()


def raise_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        raise KeyError("the reason")


def hang_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        threading.Event().wait()


def die_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def stop_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()  # what aborts it has to continue it too, and it must not leave in between


@pytest.mark.parametrize("size", [1, 3])
def test_results_come_back_by_rank(ranks: Worlds, size: int) -> None:
    assert ranks(size).run(sum_of_ranks, offset=1) == [size * (size + 1) // 2] * size


def test_processes_are_reused(ranks: Worlds) -> None:
    assert ranks(3).run(process_id) == ranks(3).run(process_id)


def test_every_rank_is_reported_when_one_raises(ranks: Worlds) -> None:
    before = ranks(3).run(process_id)
    with pytest.raises(RanksFailedError, match=r"(?s)rank 0 returned.*rank 1 raised.*KeyError: 'the reason'.*rank 2"):
        ranks(3).run(raise_on, 1)
    assert not set(before) & set(ranks(3).run(process_id)), "a world in which a rank raised must not be used again"


def test_a_rank_that_hangs_leaves_its_stacks(ranks: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RUN_TIMEOUT_S", 1.0)
    with pytest.raises(RanksFailedError, match=r"(?s)rank 0 returned.*rank 1 hung.*in hang_on"):
        ranks(2).run(hang_on, 1)


def test_a_rank_that_dies_is_reported(ranks: Worlds) -> None:
    ranks(2).run(process_id)  # it has started
    with pytest.raises(RanksFailedError, match=r"(?s)rank 0 raised.*rank 1 died\nexit code -9"):
        ranks(2).run(die_on, 1)


def test_a_stopped_rank_hangs(failing_world: Callable[[int], World]) -> None:
    world = failing_world(2)
    world.run(process_id)  # it has started
    world.start(stop_on, 0)
    stopped, running = world.collect(1.0)
    assert (stopped.status, running.status) == ("hung", "returned")
    assert "in stop_on" in stopped.detail
    world.kill()
    assert not world.is_alive()
