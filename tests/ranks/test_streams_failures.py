"""What fails over NCCL, which has no deadlines of its own and reports no lost rank: errors are those of the CPU, on all ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, Mismatch, PeerLost
from tests.harness import EXCHANGE_TIMEOUT_S, World, Worlds, meet, wait_until
from tests.ranks import test_streams as paths
from tests.ranks.training import assert_survived
from tests.simulated_gpu import asynchronous, check

gpus = paths.gpus
pytestmark = pytest.mark.parametrize("gpus", ["nccl"], indirect=True)

SHORT_S = 1.0


@pytest.fixture
def failing(gpus: Worlds) -> Iterator[World]:
    world = gpus.fresh(2)
    yield world
    world.kill()


def numbers() -> torch.Tensor:
    return torch.ones(5, device="cuda")


def communicator(timeout_s: float = EXCHANGE_TIMEOUT_S) -> Communicator:
    """Return a Communicator whose ranks are connected by NCCL, and have called its allreduce before."""
    comm = Communicator(dist.new_group(), timeout_s=timeout_s)
    for _ in range(2):
        comm.allreduce(numbers())
    meet("connected")
    return comm


def is_raised(kind: type[CollectiveError], wait: Callable[..., Any], *args: Any) -> CollectiveError:
    """Return the error that a wait raises, which is of this kind and not of one derived from it."""
    with pytest.raises(kind) as error:
        wait(*args)
    assert type(error.value) is kind
    return error.value


def loses_a_rank() -> None:
    """Wait for operations that another rank never joins, since it is killed."""
    comm = communicator()
    if comm.rank == 1:
        meet("issued")
        os.kill(os.getpid(), signal.SIGKILL)
    with asynchronous():
        works = [comm.allreduce(numbers(), async_op=True) for _ in range(2)]
        works[0].wait()  # lets the stream wait
    check()
    meet("issued")
    wait_until(works[1].is_completed)
    errors = [is_raised(PeerLost, work.wait, 10) for work in works]
    assert [error.ranks for error in errors] == [(1,), (1,)]
    assert is_raised(PeerLost, comm.allreduce, numbers()).ranks == (1,)


def test_a_killed_rank(failing: World) -> None:
    failing.start(loses_a_rank)
    assert_survived(failing, [1])


def passes_a_deadline() -> None:
    """Wait for an operation that another rank does not join in time."""
    comm = communicator(SHORT_S)
    if comm.rank == 0:
        work = comm.allreduce(numbers(), async_op=True)
        wait_until(work.is_completed)
        assert is_raised(CollectiveTimeout, work.wait, 10).operation.startswith("allreduce")
    meet("passed")
    is_raised(CollectiveTimeout, comm.allreduce, numbers())


def test_a_deadline(failing: World) -> None:
    failing.run(passes_a_deadline)


def connects_too_late() -> None:
    """Begin with an operation for which NCCL must connect the ranks, of which one does not come."""
    comm = Communicator(dist.new_group(), timeout_s=SHORT_S)
    if comm.rank == 0:
        is_raised(CollectiveTimeout, comm.allreduce, numbers())
    meet("late")


def test_the_first_operation_has_a_deadline(failing: World) -> None:
    failing.run(connects_too_late)


def calls_another_verb() -> None:
    """Call verbs that no rank has called before."""
    comm, tensor = communicator(), torch.ones(7, device="cuda")
    is_raised(Mismatch, comm.allreduce if comm.rank == 0 else comm.broadcast, tensor)
    comm.allreduce(tensor)  # no message was in flight
    assert tensor.sum().item() == 14
    check()


def test_different_verbs(failing: World) -> None:
    failing.run(calls_another_verb)


def closes_in_flight() -> None:
    """Close a Communicator, whose operations another rank joins late."""
    comm = communicator()
    tensor = numbers()
    if comm.rank == 1:
        meet("issued")
    work = comm.allreduce(tensor, async_op=True)
    if comm.rank == 0:
        meet("issued")
    comm.close()
    work.wait()
    assert tensor.sum().item() == 10
    check()


def test_close_waits_for_what_is_in_flight(failing: World) -> None:
    failing.run(closes_in_flight)
