"""What every link must do, tried on each: messages in order, of any size and number, and waits that end."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import Communicator
from gradwire.collectives.control.attempt import membership_of
from gradwire.collectives.errors import CollectiveError, LinkError
from gradwire.collectives.schedules.topology import host_id
from gradwire.collectives.transports import Membership, Transport
from gradwire.collectives.transports.base import Message, Pending
from gradwire.collectives.transports.process_group import ProcessGroupTransport
from gradwire.collectives.transports.registry import LINKS, connect
from tests.harness import EXCHANGE_TIMEOUT_S, World, Worlds, assert_holds, held, meet, wait_until, wide
from tests.ranks.exact import DTYPES, SEVERAL_SEGMENTS, contribution, reduced
from tests.ranks.test_extending import examples
from tests.ranks.test_shared_memory import assert_adds, without_a_copy
from tests.ranks.training import assert_survived, on_ranks

SIZE = 3
SOON_S = 0.2
SMALL, LARGE, MANY = 5, 3_000_000, 100  # elements, elements (more than any ring or socket holds), messages


#: The names of links, by the names of the tests.
CONNECT = {
    "process_group": "process_group",
    "tcp": "tcp",
    "auto": "auto",  # all in shared memory, as the ranks are on one host
    "routed": "auto",  # shared memory between ranks 0 and 1, TCP to rank 2
    "files": "files",
}


def connected(name: str) -> Transport:
    assert dist.group.WORLD is not None
    if name == "files":
        examples()
    host = "aab"[dist.get_rank()] if name == "routed" else host_id()
    membership = membership_of(dist.group.WORLD, host, EXCHANGE_TIMEOUT_S)
    connection = connect(membership, CONNECT[name], "", EXCHANGE_TIMEOUT_S)
    membership.close()
    return connection.transport


def in_time() -> float:
    return time.monotonic() + EXCHANGE_TIMEOUT_S


def numbers(sender: int, receiver: int, which: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) % 1000 + 10_000 * (which + MANY * (sender + SIZE * receiver))


def exchange(transport: Transport, numels: list[int], tags: list[int]) -> None:
    """Everyone sends everyone messages of these lengths and tags, and waits for the last that it posted first."""
    rank, others = transport.rank, [peer for peer in range(transport.size) if peer != transport.rank]
    landed = {(peer, which): torch.empty(numel) for peer in others for which, numel in enumerate(numels)}
    pendings = []
    for which, (numel, tag) in enumerate(zip(numels, tags, strict=True)):
        sends = [(peer, numbers(rank, peer, which, numel)) for peer in others]
        receives = [(peer, landed[peer, which]) for peer in others]
        for started in transport.post(sends, receives, tag):
            pendings += started
    for pending in reversed(pendings):
        pending.wait(in_time())
    for (peer, which), tensor in landed.items():
        assert torch.equal(tensor, numbers(peer, rank, which, tensor.numel())), (peer, which)


def exchange_all_kinds(transport: Transport) -> None:
    assert (transport.rank, transport.size) == (dist.get_rank(), dist.get_world_size())
    exchange(transport, [SMALL] * 4, [7] * 4)
    exchange(transport, [0, SMALL, 0, 0, SMALL], [7, 7, 8, 7, 8])
    exchange(transport, [SMALL] * MANY, [2**30 - 1 + which % 5 for which in range(MANY)])
    exchange(transport, [LARGE, SMALL], [1, 2])
    assert transport.post([], [], 7) == ([], [])


def take_in_another_order(transport: Transport) -> None:
    """A message is told from the ones before it by its tag, which its receiver asks for first."""
    before, after = (transport.rank - 1) % SIZE, (transport.rank + 1) % SIZE
    sent = [transport.post([(after, torch.full((SMALL,), float(tag)))], [], tag)[0][0] for tag in (1, 2)]
    landed = {tag: torch.empty(SMALL) for tag in (2, 1)}
    received = [transport.post([], [(before, tensor)], tag)[1][0] for tag, tensor in landed.items()]
    for pending in (*received, *sent):
        pending.wait(in_time())
    assert all(torch.equal(tensor, torch.full((SMALL,), float(tag))) for tag, tensor in landed.items())


def miss_a_deadline(transport: Transport) -> None:
    after = (transport.rank + 1) % SIZE
    if transport.rank == 0:
        _, [pending] = transport.post([], [(after, torch.empty(SMALL))], 7)
        with pytest.raises(LinkError) as caught:
            pending.wait(time.monotonic() + SOON_S)
        assert caught.value.timed_out
        assert caught.value.awaited == {after}


def ended(transport: Transport, peer: int, begun: Callable[[], object]) -> LinkError:
    """The error of a wait for a message that does not come; begun is called before it."""

    def receive() -> None:
        [pending] = transport.post([], [(peer, torch.empty(SMALL))], 7)[1]  # raises where the peer is gone already
        begun()
        pending.wait(in_time())

    with pytest.raises(LinkError) as caught:
        receive()
    return caught.value


def abort_one(transport: Transport) -> None:
    """Rank 0 aborts while it waits for a rank, and the others wait for it."""
    if transport.rank == 0:
        posted = threading.Event()
        errors: list[LinkError] = []
        waiting = threading.Thread(target=lambda: errors.append(ended(transport, 1, posted.set)))
        waiting.start()
        assert posted.wait(EXCHANGE_TIMEOUT_S)
        dist.barrier()
        transport.abort()
        waiting.join(EXCHANGE_TIMEOUT_S)
    else:
        errors = [ended(transport, 0, dist.barrier)]
    assert [error.timed_out for error in errors] == [False]


def lose_one(name: str) -> None:
    transport = connected(name)
    transport.post([], [], 7)
    meet("connected")
    if transport.rank == 2:
        os._exit(0)
    error = ended(transport, 2, lambda: None)
    assert not error.timed_out
    assert 2 in error.awaited
    transport.abort()
    transport.close()


@pytest.mark.parametrize("name", CONNECT)
@on_ranks(SIZE, initialized=False)
def test_what_comes_and_goes_leaves_nothing_open(name: str) -> None:
    def once() -> None:
        transport = connected(name)
        exchange(transport, [SMALL], [7])
        dist.barrier()
        transport.close()
        transport.close()

    once()
    before = held()
    for _ in range(5):
        once()
    assert_holds(*before)


class Noting(ProcessGroupTransport):
    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        self.posted.add((len(sends), len(receives)))
        return super().post(sends, receives, tag)


@contextmanager
def claiming(**capabilities: Any) -> Iterator[list[Noting]]:
    """A link "claiming" that says this of itself; the list holds the transports that it has made."""

    def link(membership: Membership, timeout_s: float) -> Transport:
        transport = Noting(membership, timeout_s)
        transport.connect(time.monotonic() + timeout_s)
        transport.capabilities, transport.posted = replace(transport.capabilities, **capabilities), set()
        made.append(transport)
        return transport

    made: list[Noting] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LINKS, "claiming", link)
        yield made


def posted_in_a_ring(posts_together: tuple[str, ...]) -> set[tuple[int, int]]:
    """What is posted at once in a ring of several segments, over a link that says so of itself."""
    with (
        claiming(posts_together=posts_together) as made,
        Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="claiming", segment_bytes=200) as comm,
    ):
        for _ in range(2):  # with the first call, the ranks compare what they call
            made[0].posted.clear()
            tensor = contribution(comm.rank, comm.size, SEVERAL_SEGMENTS, torch.float32)
            comm.allreduce(tensor, algorithm="ring")
            assert torch.equal(tensor, reduced(comm.size, SEVERAL_SEGMENTS, torch.float32))
        return made[0].posted


@on_ranks(SIZE, initialized=False)
def test_names_that_a_link_cannot_offer() -> None:
    for verb, name in (("allreduce", "two_shot"), ("barrier", "auto"), ("reduce", "tree"), ("dance", "star")):
        with (
            claiming(algorithms={verb: (name,)}),
            pytest.raises(ValueError, match=f"a link cannot offer {verb} algorithms called {name}"),
        ):
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="claiming")


@on_ranks(SIZE, initialized=False)
def test_a_link_says_what_it_would_have_taken() -> None:
    with claiming(preferred={"allreduce": "native", "barrier": "native"}), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTIVES_BARRIER", "tree")
        with Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="claiming") as comm:
            assert {comm.chosen("allreduce", nbytes) for nbytes in (0, 1 << 30)} == {"native"}
            assert comm.chosen("barrier", 0) == "tree"
            assert comm.chosen("reduce", 0) == "tree"
            tensor = contribution(comm.rank, comm.size, SMALL, torch.float32)
            comm.allreduce(tensor)
            assert torch.equal(tensor, reduced(comm.size, SMALL, torch.float32))
    for preferred in ("preferred", "preferred_on_gpu"):
        with (
            claiming(**{preferred: {"allreduce": "nativ"}}),
            pytest.raises(ValueError, match=r"prefers allreduce's 'nativ'; it offers native"),
        ):
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link="claiming")


def test_a_link_says_whether_both_ends_are_posted_together(ranks: Worlds) -> None:
    assert ranks(SIZE).run(posted_in_a_ring, ("cpu",)) == [{(1, 1)}] * SIZE
    assert ranks(SIZE).run(posted_in_a_ring, ("cuda",)) != [{(1, 1)}] * SIZE


def make_tensors(transport: Transport) -> None:
    for shape in ((), (0,), (3, 0), (7,), (2, 3, 5)):
        for dtype in DTYPES:
            made = transport.empty(shape, dtype)
            assert (tuple(made.shape), made.dtype, made.device.type) == (shape, dtype, "cpu")
            assert made.is_contiguous()
            assert torch.equal(made.fill_(1), torch.ones(shape, dtype=dtype))


def post_after_abort(transport: Transport) -> None:
    """By the one that aborted: the post says so, or the wait."""
    dist.barrier()
    transport.abort()
    for peer in {0, 1, 2} - {transport.rank}:
        assert not ended(transport, peer, lambda: None).timed_out


def close_in_a_wait(transport: Transport) -> None:
    """A wait in another thread ends then, or by its own deadline; nothing is torn from under it."""
    errors: list[LinkError] = []
    posted = threading.Event()

    def wait() -> None:
        _, [pending] = transport.post([], [((transport.rank + 1) % SIZE, torch.empty(SMALL))], 7)
        posted.set()
        with pytest.raises(LinkError) as caught:
            pending.wait(time.monotonic() + SOON_S)
        errors.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert posted.wait(EXCHANGE_TIMEOUT_S)
    transport.close()
    waiting.join(EXCHANGE_TIMEOUT_S)
    assert len(errors) == 1


def look_without_waiting(transport: Transport) -> None:
    after, before = (transport.rank + 1) % SIZE, (transport.rank - 1) % SIZE
    landed = torch.empty(LARGE)
    _, [received] = transport.post([], [(before, landed)], 7)
    assert not received.is_done()
    dist.barrier()
    [sent], _ = transport.post([(after, numbers(transport.rank, after, 0, LARGE))], [], 7)
    wait_until(lambda: received.is_done() and sent.is_done())
    for pending in (received, sent):
        pending.wait(in_time())
    assert torch.equal(landed, numbers(before, transport.rank, 0, LARGE))


def hear_anyone(transport: Transport) -> None:
    """Rank 0 takes messages as they come, by their tag."""
    if not transport.capabilities.receives_from_any:
        return
    if transport.rank == 0:

        def heard(tag: int) -> tuple[Any, torch.Tensor]:
            landed = torch.empty(SMALL)
            return transport.post([], [(None, landed)], tag)[1][0], landed

        early, first = heard(7)
        assert not early.is_done()
        assert early.sender is None
        dist.barrier()
        counts = [0] * SIZE
        for which in range(2 * MANY):
            pending, landed = heard(7) if which else (early, first)
            pending.wait(in_time())
            assert torch.equal(landed, numbers(pending.sender, 0, counts[pending.sender], SMALL)), which
            counts[pending.sender] += 1
        assert counts == [0, MANY, MANY]
        late, _ = heard(7)
        with pytest.raises(LinkError) as caught:
            late.wait(time.monotonic() + SOON_S)
        assert caught.value.timed_out
        others = [heard(8)[0] for _ in range(2)]
        for pending in others:
            pending.wait(in_time())
        assert {pending.sender for pending in others} == {1, 2}
    else:
        dist.barrier()
        sent = []
        for which in range(MANY):
            sent += transport.post([(0, numbers(transport.rank, 0, which, SMALL))], [], 7)[0]
        for pending in (*sent, *transport.post([(0, torch.empty(SMALL))], [], 8)[0]):
            pending.wait(in_time())


def leave_one_waiting(transport: Transport) -> None:
    """A message that nobody sends for long holds up nothing, and comes in the end."""
    after, before = (transport.rank + 1) % SIZE, (transport.rank - 1) % SIZE
    last = [torch.empty(SMALL) for _ in range(2)]
    received = [transport.post([], [(before, tensor)], 9)[1][0] for tensor in last]
    for _ in range(4):
        exchange(transport, [SMALL] * MANY, [7] * MANY)
        assert not received[1].is_done()
    dist.barrier()
    sent = [transport.post([(after, torch.full((SMALL,), float(which)))], [], 9)[0][0] for which in range(2)]
    for pending in (*reversed(received), *sent):
        pending.wait(in_time())
    assert [tensor.tolist() for tensor in last] == [[float(which)] * SMALL for which in range(2)]


CHECKS = [
    exchange_all_kinds,
    take_in_another_order,
    miss_a_deadline,
    abort_one,
    make_tensors,
    post_after_abort,
    close_in_a_wait,
    look_without_waiting,
    hear_anyone,
    leave_one_waiting,
]


@pytest.mark.parametrize("name", ["process_group", "tcp", "auto", "routed", *wide("files")])
@pytest.mark.parametrize("check", CHECKS)
@on_ranks(SIZE, initialized=False)
def test_every_link(name: str, check: Callable[[Transport], None]) -> None:
    transport = connected(name)
    check(transport)
    dist.barrier()  # so that nobody closes while another still receives
    transport.close()


@pytest.mark.parametrize("name", CONNECT)
def test_a_rank_is_lost(failing_world: Callable[[int], World], name: str) -> None:
    world = failing_world(SIZE)
    world.start(lose_one, name)
    assert_survived(world, [2])


def leave(comm: Communicator, tensors: list[torch.Tensor]) -> None:
    """End a forked child that drops some of what it inherited, and calls and closes the rest."""
    try:
        del tensors[1]
        gc.collect()
        with pytest.raises(CollectiveError, match="fork"):
            comm.allreduce(tensors[0])
        comm.close()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("link", ["auto", "tcp"])
@on_ranks(2, initialized=False)
def test_a_forked_child_does_no_harm(link: str) -> None:
    """It takes nothing from its parent; what it calls is refused."""
    comm = Communicator(timeout_s=EXCHANGE_TIMEOUT_S, link=link)
    tensors = [comm.empty(5000), comm.empty(5000)]
    for turn in range(4):
        for tensor in tensors:
            assert_adds(comm, tensor)
        if turn in (1, 2) and comm.rank == 1:
            if (child := os.fork()) == 0:
                if turn == 1:
                    del tensor
                    leave(comm, tensors)
                del comm, tensor, tensors
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            time.sleep(0.5 * (turn - 1))  # in which the other rank looks several times whether this one is there
    assert link == "tcp" or without_a_copy(comm)
    comm.close()


@on_ranks(2, initialized=False)
def test_a_timeout_that_is_raised_later_reaches_gloo() -> None:
    """Rank 1 comes later than the first timeout allows, to a collective and to a message."""
    with Communicator(timeout_s=1.0, link="process_group") as comm:
        comm.allreduce(torch.ones(1), algorithm="native")
        comm.timeout_s = EXCHANGE_TIMEOUT_S
        message, tensor = torch.full((1,), float(comm.rank)), torch.full((100,), comm.rank + 1.0)
        received = comm.irecv(message, 1) if comm.rank == 0 else None
        time.sleep(1.5 * comm.rank)
        comm.allreduce(tensor, algorithm="native")
        assert tensor.eq(3).all()
        if received is None:
            comm.send(message, 0)
        else:
            received.wait()
        assert message.item() == 1.0
