"""Communicators over connections of their own: when they have them, whom they let in, and what a forked child keeps."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import CollectiveError, Communicator, PeerLost
from gradwire.collectives.environment import SHARED_MEMORY
from gradwire.collectives.kernels import cpu_sockets
from tests.harness import EXCHANGE_TIMEOUT_S, World, Worlds, wait_until
from tests.ranks.exact import ALLREDUCES, SEVERAL_SEGMENTS, contribution, on_host, reduced
from tests.ranks.training import assert_survived, on_ranks

SMALL = 100


def parts(comm: Communicator) -> set[str]:
    """What this rank talks through."""
    kinds = ("shared memory", "TCP", "gloo")
    return {kind for route in comm.routes for kind in kinds if kind in route}


def assert_reduces(comm: Communicator) -> None:
    for algorithm in ("auto", *ALLREDUCES):
        tensor = contribution(comm.rank, comm.size, SEVERAL_SEGMENTS, torch.float32)
        comm.allreduce(tensor, algorithm=algorithm)
        assert torch.equal(tensor, reduced(comm.size, SEVERAL_SEGMENTS, torch.float32)), algorithm


def connect_by_itself(hosts: str, memory: str, without_kernels: int | None) -> tuple[set[str], list[str]]:
    """What this rank talks through, and what it was warned of. hosts: a letter for each rank's."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if dist.get_rank() == without_kernels:
            patch.setattr("gradwire.collectives.transports.routing.cpu_sockets", lambda: "not on this machine")
        patch.setenv(SHARED_MEMORY, memory)
        stack.enter_context(on_host(hosts[dist.get_rank()]))
        logger = logging.getLogger("gradwire")
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        comm = stack.enter_context(Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=200))
        assert_reduces(comm)
        return parts(comm), warnings


@pytest.mark.parametrize(
    ("hosts", "memory", "expected"),
    [
        ("aaa", "1", [{"shared memory"}] * 3),
        ("abc", "1", [{"TCP"}] * 3),
        ("aab", "1", [{"shared memory", "TCP"}] * 2 + [{"TCP"}]),
        ("aab", "0", [{"TCP"}] * 3),
    ],
)
def test_ranks_that_share_no_memory_have_connections_of_their_own(
    ranks: Worlds, hosts: str, memory: str, expected: list[set[str]]
) -> None:
    """Where one rank cannot drive connections, all use gloo, and one of them says so, and why."""
    assert ranks(3).run(connect_by_itself, hosts, memory, None) == [(through, []) for through in expected]
    found = ranks(3).run(connect_by_itself, hosts, memory, 1)
    assert [through for through, _ in found] == [
        {"gloo" if kind == "TCP" else kind for kind in through} for through in expected
    ]
    warnings = [warning for _, warnings in found for warning in warnings]
    assert len(warnings) == ({"TCP"} in expected)
    assert all("ranks use gloo" in warning and "rank 1: not on this machine" in warning for warning in warnings)


@on_ranks(2, initialized=False)
def test_who_asks_for_connections_is_told_why_there_are_none() -> None:
    assert not isinstance(cpu_sockets(), str)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradwire.collectives.transports.tcp.cpu_sockets", lambda: "not on this machine")
        with pytest.raises(CollectiveError, match="link 'tcp': not on this machine") as caught:
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="tcp")
        assert caught.type is CollectiveError


def leave_a_child(directory: Path) -> None:
    """Rank 1 ends; a child that it forked stays until rank 0 has heard of that."""
    comm = Communicator(timeout_s=2 * EXCHANGE_TIMEOUT_S, link="tcp")
    comm.allreduce(torch.ones(SMALL))
    dist.barrier()
    if comm.rank == 1:
        if os.fork() == 0:
            (directory / "lives").touch()
            wait_until((directory / "heard").exists)
            os._exit(0)
        wait_until((directory / "lives").exists)
        os._exit(1)
    try:
        with pytest.raises(PeerLost) as caught:
            comm.allreduce(torch.ones(SMALL))
        assert caught.value.ranks == (1,)
    finally:
        (directory / "heard").touch()


def test_a_forked_child_keeps_no_connection(failing_world: Callable[[int], World], tmp_path: Path) -> None:
    world = failing_world(2)
    world.start(leave_a_child, tmp_path)
    assert_survived(world, [1], EXCHANGE_TIMEOUT_S)
