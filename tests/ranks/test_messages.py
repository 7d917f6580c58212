"""Messages between two ranks, beside the operations of all: on every link, in order, from one rank or from any."""

import gc
import os
import random
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, Mismatch, PeerLost, Work
from gradwire.collectives.arguments import described
from gradwire.collectives.engine.point_to_point import MessageWork
from tests.harness import EXCHANGE_TIMEOUT_S, ON_EVERY_TRANSPORT, World, Worlds, wait_until
from tests.ranks.exact import on_host
from tests.ranks.training import assert_survived, on_ranks

pytestmark = ON_EVERY_TRANSPORT

SIZE = 3
LARGE = 3_000_000  # elements: more than any ring or socket holds
SHORT_S = 0.5


def communicator(timeout_s: float = EXCHANGE_TIMEOUT_S) -> Communicator:
    return Communicator(timeout_s=timeout_s)


def uses_gloo(comm: Communicator) -> bool:
    """Say whether some ranks talk through gloo, which takes messages of one known sender only, and of the expected length."""
    return any("gloo" in route for route in comm.routes)


def numbers(sender: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) % 1000 + 10_000 * sender


@on_ranks(2, initialized=False)
def test_a_message_that_was_waited_for_releases_its_tensor() -> None:
    with communicator() as comm:
        numbers = np.ones(1000, dtype=np.float32)
        tensor, gone = torch.from_numpy(numbers), weakref.ref(numbers)
        del numbers
        work = (comm.isend if comm.rank == 0 else comm.irecv)(tensor, 1 - comm.rank)
        work.wait()
        work.wait()
        del tensor
        gc.collect()
        assert gone() is None
        comm.barrier()


@on_ranks(SIZE, initialized=False)
@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_any_mixture_of_messages_and_operations(hosts: str) -> None:
    draw = random.Random(0)
    with on_host(hosts[dist.get_rank()]):
        comm = communicator()
    with comm:
        from_anyone = not uses_gloo(comm)
        begun: list[tuple[Work | MessageWork, torch.Tensor, torch.Tensor, int | None]] = []

        def finish(count: int) -> None:
            for work, tensor, expected, source in begun[:count]:
                work.wait(EXCHANGE_TIMEOUT_S)
                assert work.is_completed()
                assert torch.equal(tensor, expected)
                assert getattr(work, "sender", None) == source
            del begun[:count]

        for position in range(60):
            numel = draw.choice((0, 1, 100, 5000, 200_000) if position % 10 else (LARGE,))
            sender, receiver = draw.sample(range(SIZE), 2)
            is_message, anyone, awaited = draw.random() < 0.6, draw.random() < 0.4, draw.random() < 0.4
            expected = numbers(position, numel)
            tensor = expected.clone()
            if not is_message:
                expected = SIZE * expected
                begun.append((comm.allreduce(tensor, async_op=not awaited), tensor, expected, None))
            elif comm.rank == sender and awaited:
                comm.send(tensor, receiver, tag=position)
            elif comm.rank == sender:
                begun.append((comm.isend(tensor, receiver, tag=position), tensor, expected, None))
            elif comm.rank == receiver:
                tensor.zero_()
                source = None if anyone and from_anyone else sender
                if awaited:
                    assert comm.recv(tensor, source, tag=position) == sender
                    assert torch.equal(tensor, expected)
                else:
                    begun.append((comm.irecv(tensor, source, tag=position), tensor, expected, sender))
            finish(draw.randrange(3))
        finish(len(begun))


@on_ranks(SIZE, initialized=False)
def test_messages_between_two_hosts_move_on_while_one_inside_a_host_is_awaited() -> None:
    """The message inside the host depends on the one between them, which rank 0 has begun to send or to receive."""
    with on_host("aab"[dist.get_rank()]):
        comm = communicator()
    with comm:
        large, small = torch.ones(LARGE), torch.ones(5)
        if comm.rank == 0:
            comm.isend(large, 2)
            comm.recv(small.zero_(), 1)
        elif comm.rank == 1:
            comm.recv(small.zero_(), 2)
            comm.send(small, 0)
        else:
            comm.recv(large.zero_(), 0)
            comm.send(small, 1)
        assert torch.equal(large, torch.ones(LARGE))
        assert torch.equal(small, torch.ones(5))
        comm.barrier()
        if comm.rank == 0:  # the other way round, and what goes on is received
            received = comm.irecv(large.zero_(), 1)
            comm.recv(small.zero_(), 2)
            received.wait()
        elif comm.rank == 1:
            comm.send(large, 0)
            comm.send(small, 2)
        else:
            comm.recv(small.zero_(), 1)
            comm.send(small, 0)
        assert torch.equal(large, torch.ones(LARGE))
        assert torch.equal(small, torch.ones(5))


def send_odd_tensors(comm: Communicator) -> None:
    values = torch.arange(12).view(3, 4)
    for dtype in (torch.bool, torch.bfloat16, torch.int16, torch.float64):
        expected = values.to(dtype)
        if comm.rank == 0:
            comm.send(expected.t().contiguous().t(), 1)
        elif comm.rank == 1:
            landed = torch.zeros(3, 8, dtype=dtype)
            comm.recv(landed[:, ::2], 0)
            assert torch.equal(landed[:, ::2], expected)
            assert not landed[:, 1::2].any()


def hear_anyone(comm: Communicator) -> None:
    """Rank 0 answers whoever asks, as often as each asks."""
    if uses_gloo(comm):
        with pytest.raises(ValueError, match="needs src="):
            comm.recv(torch.empty(1))
        return
    asked = 20
    if comm.rank == 0:
        counts = dict.fromkeys(range(1, SIZE), 0)
        for turn in range(asked * (SIZE - 1)):
            question = torch.empty(2)
            if turn % 2:
                sender = comm.recv(question)
            else:
                received = comm.irecv(question)
                received.wait()
                assert received.sender is not None
                sender = received.sender
            assert question[0] == sender
            comm.isend(question * 2, sender)
            counts[sender] += 1
        assert counts == dict.fromkeys(range(1, SIZE), asked)
    else:
        for turn in range(asked):
            answer = torch.empty(2)
            comm.send(torch.tensor([float(comm.rank), float(turn)]), 0)
            comm.recv(answer, 0)
            assert answer.tolist() == [2.0 * comm.rank, 2.0 * turn]
    comm.barrier()


def take_turns(comm: Communicator) -> None:
    """Ranks whose messages lie there are heard one after the other, however many messages each has sent."""
    if uses_gloo(comm):
        return
    if comm.rank == 0:
        time.sleep(SHORT_S)
        senders = [comm.recv(torch.empty(1)) for _ in range(4)]
        assert senders[0] != senders[1]
        assert sorted(senders) == [1, 1, 2, 2]
    else:
        works = [comm.isend(torch.zeros(1), 0) for _ in range(2)]
        for work in works:
            work.wait()
    comm.barrier()


def look_without_waiting(comm: Communicator) -> None:
    landed = torch.empty(2)
    if comm.rank == 0:
        received = comm.irecv(landed, 1)
        assert not received.is_completed()
        with pytest.raises(CollectiveTimeout):
            received.wait(0.05)
    dist.barrier()
    if comm.rank == 0:
        wait_until(received.is_completed)
        received.wait()
        assert landed.tolist() == [1.0, 2.0]
    elif comm.rank == 1:
        comm.send(torch.tensor([1.0, 2.0]), 0)
    comm.barrier()


@on_ranks(SIZE, initialized=False)
def test_a_message_that_does_not_come_breaks_the_communicator_at_the_deadline() -> None:
    comm = communicator(SHORT_S if dist.get_rank() == 0 else EXCHANGE_TIMEOUT_S)
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match="waiting for rank 1") as caught:
            comm.recv(torch.empty(1), 1)
        assert caught.value.waiting_for == (1,)
        with pytest.raises(CollectiveError, match="broken since"):
            comm.send(torch.empty(1), 1)
    dist.barrier()
    comm.close()


def leave_after_sending(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.isend(torch.ones(LARGE), 0)
    elif comm.rank == 0:
        time.sleep(SHORT_S / 2)
        landed = torch.empty(LARGE)
        comm.recv(landed, 1)
        assert torch.equal(landed, torch.ones(LARGE))


def lose_one(*, dies: bool) -> None:
    """Rank 2 is not concerned, so that it can go on with rank 0 after rank 1 has left."""
    comm, landed = communicator(), torch.empty(1)
    if comm.rank == 0:
        if not dies:
            time.sleep(SHORT_S)  # for rank 1 to leave
            comm.recv(landed, 2)
        with pytest.raises(PeerLost) as caught:
            comm.recv(landed, 1)
        assert caught.value.ranks == (1,)
        assert dies or "left" in str(caught.value)
    elif comm.rank == 1 and dies:
        time.sleep(SHORT_S / 2)
        os._exit(0)
    elif comm.rank == 2 and not dies:
        comm.send(landed, 0)
    comm.close()


def test_a_sender_that_dies_or_leaves_is_named(ranks: Worlds, failing_world: Callable[[int], World]) -> None:
    ranks(SIZE).run(lose_one, dies=False)
    world = failing_world(SIZE)
    world.start(lose_one, dies=True)
    assert_survived(world, [1])


def receive_something_else(sent: torch.Tensor, received: torch.Tensor, from_anyone: bool) -> None:
    """Rank 2 is not concerned, and learns of it with its next operation, as the sender does where its message is through."""
    comm = communicator()
    from_anyone = from_anyone and not uses_gloo(comm)

    def talk() -> None:
        if comm.rank == 1:
            comm.send(sent, 0)
        elif comm.rank == 0:
            comm.recv(received, None if from_anyone else 1)
        comm.barrier()

    with pytest.raises(Mismatch) as caught:
        talk()
    calls = caught.value.calls
    assert calls.keys() == {0, 1}
    assert calls[0].startswith(f"recv({described(received)}, src=")
    assert calls[1] == f"send({described(sent)})"
    comm.close()


@pytest.mark.parametrize("from_anyone", [False, True])
def test_a_message_of_another_dtype_is_refused(ranks: Worlds, from_anyone: bool) -> None:
    ranks(SIZE).run(receive_something_else, torch.ones(2, dtype=torch.float64), torch.empty(4), from_anyone)
    booleans, numbers_of_a_byte = torch.ones(5, dtype=torch.bool), torch.empty(5, dtype=torch.uint8)
    ranks(SIZE).run(receive_something_else, booleans, numbers_of_a_byte, from_anyone)


def receive_another_length(comm: Communicator) -> None:
    if not uses_gloo(comm):  # which ends the process
        receive_something_else(torch.ones(4), torch.empty(3), from_anyone=False)


@pytest.mark.parametrize(
    "check",
    [
        send_odd_tensors,
        hear_anyone,
        take_turns,
        look_without_waiting,
        leave_after_sending,
        receive_another_length,
    ],
)
@on_ranks(SIZE, initialized=False)
def test_messages(check: Callable[[Communicator], None]) -> None:
    with communicator() as comm:
        check(comm)
