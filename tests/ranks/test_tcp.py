"""Communicators over connections of their own: when they have them, whom they let in, and what a forked child keeps."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import Communicator, PeerLost
from gradwire.collectives.environment import SHARED_MEMORY
from gradwire.collectives.kernels import cpu_sockets
from gradwire.collectives.link.auto import RoutingTransport
from gradwire.collectives.link.base import Transport
from gradwire.collectives.link.handshake import CHALLENGE_BYTES, Listener
from gradwire.collectives.link.process_group import ProcessGroupTransport
from gradwire.collectives.link.tcp import TcpTransport
from tests.harness import EXCHANGE_TIMEOUT_S, World, Worlds
from tests.ranks.exact import ALLREDUCES, SEVERAL_SEGMENTS, contribution, on_host, reduced

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
            patch.setattr("gradwire.collectives.link.auto.cpu_sockets", lambda: "not on this machine")
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
        ("aaa", "0", [set()] * 3, "tcp"),
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
    assert all("through gloo" in warning and "rank 1: not on this machine" in warning for warning in warnings)


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


@pytest.mark.parametrize("hosts", ["aabc", "abcd", "aabb"])
def test_all_ranks_have_the_same_bits_wherever_they_are(ranks: Worlds, hosts: str) -> None:
    found = ranks(4).run(reduce_oddities, hosts)
    assert found == [found[0]] * 4


class Besieged(Listener):
    """Others come before those that it waits for, and stay."""

    strangers: tuple[socket.socket, ...] = ()

    def __init__(self, address: str) -> None:
        super().__init__(address)
        own_address, port = self.card.split()
        knocking = [socket.create_connection((own_address, int(port)), EXCHANGE_TIMEOUT_S) for _ in range(3)]
        for stranger, said in zip(knocking, (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(5000)), strict=True):
            stranger.sendall(said)
        Besieged.strangers = (*Besieged.strangers, *knocking)


def connect_among_strangers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradwire.collectives.link.tcp.Listener", Besieged)
        patch.setattr(Besieged, "strangers", ())
        with Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="tcp") as comm:
            assert_reduces(comm)
            assert len(Besieged.strangers) == 3
            for stranger in Besieged.strangers:
                with suppress(ConnectionResetError):
                    assert len(stranger.recv(CHALLENGE_BYTES)) in (0, CHALLENGE_BYTES)
                    assert stranger.recv(1) == b""
                stranger.close()


def test_strangers_do_not_keep_ranks_from_connecting(ranks: Worlds) -> None:
    ranks(3).run(connect_among_strangers)


def miss_kernels() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradwire.collectives.link.tcp.cpu_sockets", lambda: "not on this machine")
        with pytest.raises(Exception, match="link 'tcp': not on this machine") as caught:
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="tcp")
        return caught.type.__name__


def test_who_asks_for_connections_is_told_why_there_are_none(ranks: Worlds) -> None:
    assert not isinstance(cpu_sockets(), str)
    assert ranks(2).run(miss_kernels) == ["CollectiveError"] * 2


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + EXCHANGE_TIMEOUT_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


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
            wait_for(directory / "heard")
            os._exit(0)
        wait_for(directory / "descriptors")
        os._exit(1)
    try:
        with pytest.raises(PeerLost) as caught:
            comm.allreduce(torch.ones(SMALL))
    finally:
        (directory / "heard").touch()
    assert caught.value.ranks == (1,)
    return (directory / "descriptors").read_text()


def test_a_forked_child_keeps_no_connection(failing_world: Callable[[int], World], tmp_path: Path) -> None:
    """The others hear at once of the end of its parent."""
    world = failing_world(2)
    world.start(leave_a_child, tmp_path)
    [outcome] = world.collect(EXCHANGE_TIMEOUT_S, ranks=[0])
    assert (outcome.status, outcome.value) == ("returned", "[-1]"), str(outcome)


def fork_in_the_middle() -> None:
    """A child that closes what it inherited takes nothing from its parent."""
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="tcp") as comm:
        for _ in range(2):
            assert_reduces(comm)
            if comm.rank == 1 and (child := os.fork()) == 0:
                try:
                    comm.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            if comm.rank == 1:
                assert os.waitpid(child, 0)[1] == 0
        assert_reduces(comm)


def test_a_forked_child_does_no_harm(ranks: Worlds) -> None:
    ranks(2).run(fork_in_the_middle)
