"""Communicators over connections of their own: when they have them, whom they let in, and what a forked child keeps."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import CollectiveError, Communicator, PeerLost
from gradwire.collectives.environment import SHARED_MEMORY
from gradwire.collectives.kernels import cpu_sockets
from gradwire.collectives.transports.base import Transport
from gradwire.collectives.transports.process_group import ProcessGroupTransport
from gradwire.collectives.transports.routing import RoutingTransport
from gradwire.collectives.transports.tcp import TcpTransport
from tests.harness import EXCHANGE_TIMEOUT_S, World, Worlds, wait_until
from tests.ranks.exact import ALLREDUCES, SEVERAL_SEGMENTS, contribution, on_host, reduced
from tests.ranks.training import assert_survived, on_ranks

SMALL = 100


def parts(comm: Communicator) -> set[str]:
    """What the ranks talk through: near each other, far from each other, or all of them through gloo."""
    transport: Transport = comm._engine._transport
    if isinstance(transport, ProcessGroupTransport):
        return {"gloo"}
    assert isinstance(transport, RoutingTransport)
    far = "tcp" if isinstance(transport._far, TcpTransport) else "gloo"
    return {"memory", far} if transport._near is not None else {far}


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
    ("hosts", "memory", "near", "far"),
    [
        ("aaa", "1", [{"memory"}] * 3, "gloo"),
        ("abc", "1", [set()] * 3, "tcp"),
        ("aab", "1", [{"memory"}, {"memory"}, set()], "tcp"),
        ("aab", "0", [set()] * 3, "tcp"),
    ],
)
def test_ranks_that_share_no_memory_have_connections_of_their_own(
    ranks: Worlds, hosts: str, memory: str, near: list[set[str]], far: str
) -> None:
    """Where one rank cannot drive connections, all use gloo, and one of them says so, and why."""
    assert ranks(3).run(connect_by_itself, hosts, memory, None) == [(through | {far}, []) for through in near]
    found = ranks(3).run(connect_by_itself, hosts, memory, 1)
    assert [through for through, _ in found] == [through | {"gloo"} for through in near]
    warnings = [warning for _, warnings in found for warning in warnings]
    assert len(warnings) == (far == "tcp")
    assert all("ranks use gloo" in warning and "rank 1: not on this machine" in warning for warning in warnings)


def reduce_oddities(hosts: str) -> dict[tuple[str, str], list[int]]:
    """The bits of what comes of zeros of both signs, and of what is no number, by op and algorithm."""
    with on_host(hosts[dist.get_rank()]):
        comm = Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    bits = {}
    with comm:
        for op, algorithm in product(("sum", "min", "max", "product"), ("recursive_doubling", "direct")):
            tensor = torch.tensor([0.0, -0.0, -0.0, torch.nan, -torch.nan, torch.inf]).repeat(10).roll(comm.rank)
            comm.allreduce(tensor, op, algorithm=algorithm)
            bits[op, algorithm] = tensor.view(torch.int32).tolist()
    return bits


@pytest.mark.parametrize("hosts", ["aabc", "abcd"])
def test_all_ranks_have_the_same_bits_wherever_they_are(ranks: Worlds, hosts: str) -> None:
    found = ranks(4).run(reduce_oddities, hosts)
    assert found == [found[0]] * 4


@on_ranks(2, initialized=False)
def test_who_asks_for_connections_is_told_why_there_are_none() -> None:
    assert not isinstance(cpu_sockets(), str)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradwire.collectives.transports.tcp.cpu_sockets", lambda: "not on this machine")
        with pytest.raises(CollectiveError, match="link 'tcp': not on this machine") as caught:
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="tcp")
        assert caught.type is CollectiveError


def leave_a_child(directory: Path) -> str:
    """Rank 1 ends; a child that it forked stays until rank 0 has heard of that."""
    comm = Communicator(timeout_s=2 * EXCHANGE_TIMEOUT_S, link="tcp")
    comm.allreduce(torch.ones(SMALL))
    dist.barrier()
    if comm.rank == 1:
        transport = comm._engine._transport
        if os.fork() == 0:
            descriptors = [connection.fileno() for connection in transport._sockets.values()]
            (directory / "writing").write_text(str(descriptors))
            (directory / "writing").rename(directory / "descriptors")
            wait_until((directory / "heard").exists)
            os._exit(0)
        wait_until((directory / "descriptors").exists)
        os._exit(1)
    try:
        with pytest.raises(PeerLost) as caught:
            comm.allreduce(torch.ones(SMALL))
    finally:
        (directory / "heard").touch()
    assert caught.value.ranks == (1,)
    return (directory / "descriptors").read_text()


def test_a_forked_child_keeps_no_connection(failing_world: Callable[[int], World], tmp_path: Path) -> None:
    world = failing_world(2)
    world.start(leave_a_child, tmp_path)
    assert assert_survived(world, [1], EXCHANGE_TIMEOUT_S) == ["[-1]"]
