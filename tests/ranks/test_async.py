"""Asynchronous operations: their order, their handles, and what other threads may do meanwhile."""

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, PeerLost, Work
from gradwire.collectives.communicator import close_all
from gradwire.collectives.environment import LINK
from tests.harness import EXCHANGE_TIMEOUT_S, ON_EVERY_TRANSPORT, wait_until
from tests.ranks.exact import SEVERAL_SEGMENTS, communicator, contribution, reduced
from tests.ranks.test_collectives import VERBS, Case, elements
from tests.ranks.training import on_ranks

pytestmark = ON_EVERY_TRANSPORT


def let_go(rank: int) -> None:
    """Tell a rank, past the Communicator, to go on."""
    dist.send(torch.ones(1), rank)


def held_back(*ranks: int) -> None:
    """Wait until all of these ranks have let this one go."""
    for rank in ranks:
        dist.recv(torch.ones(1), rank)


def in_threads(*functions: Callable[[], object]) -> None:
    """Call each in a thread of its own, and wait for all."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def assert_all(tensor: torch.Tensor, value: float) -> None:
    assert torch.equal(tensor, torch.full_like(tensor, value))


def assert_set(event: threading.Event) -> None:
    assert event.wait(EXCHANGE_TIMEOUT_S)


def begin(comm: Communicator, tensor: torch.Tensor, op: str = "sum") -> Work:
    return comm.allreduce(tensor, op, async_op=True)


@on_ranks(1, 3, initialized=False)
def test_many_in_flight() -> None:
    with communicator() as comm:
        ops = ("sum", "max", "min", "average", "product")
        numels = (1, 0, SEVERAL_SEGMENTS, comm.size, 100)
        cases = [(op, numel) for op in ops for numel in numels] * 4
        tensors = [contribution(comm.rank, comm.size, numel, torch.float32, op) for op, numel in cases]
        works = [begin(comm, tensor, op) for tensor, (op, _) in zip(tensors, cases, strict=True)]
        for work in reversed(works):
            work.wait()
        for work, tensor, (op, numel) in zip(works, tensors, cases, strict=True):
            assert work.is_completed()
            work.wait()
            assert torch.equal(tensor, reduced(comm.size, numel, torch.float32, op)), (op, numel)
        for _ in range(2):
            done = comm.allreduce(torch.ones(3))
            assert done.is_completed()
            done.wait(0.0)


#: What the owner of a tensor may do to it: what the operation was given stays what it works on.
CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "set_()": lambda tensor: tensor.set_(torch.empty(0)),  # type: ignore[call-overload]
    ".data =": lambda tensor: setattr(tensor, "data", torch.empty(0)),
    "resize_(0)": lambda tensor: tensor.resize_(0),
}
BEGUN = (
    *("allreduce", "compressed", "prepared", "broadcast", "reduce", "allgather", "reduce_scatter"),
    *("alltoall", "gather", "scatter", "messages"),
)
NUMEL = 3000


def begun(comm: Communicator, verb: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
    """Begin a verb on new tensors; return these, what they must come to be, and the works."""
    case = Case(comm, "auto", torch.float32, "sum", NUMEL, "ordinary", 0)
    mine, total = case.own(), [case.total()]
    if verb == "compressed":
        return [mine], total, [comm.allreduce(mine, compression="fp16", async_op=True)]
    if verb == "prepared":
        return [mine], total, [comm.prepare_allreduce(mine).start()]
    if verb == "messages":
        before, after, landed = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size, torch.zeros(NUMEL)
        works = [comm.isend(mine, after), comm.irecv(landed, before)]
        return [mine, landed], [case.own(), case.of(before)], works
    call, tensors, wanted = VERBS[verb][1](case)
    return tensors, wanted, [call(async_op=True)]


@on_ranks(3, initialized=False)
def test_works_on_what_it_was_given() -> None:
    """Rank 0 comes later, so that the operations of the others have not begun when their tensors change."""
    with communicator() as comm:
        for verb, (name, change) in itertools.product(BEGUN, CHANGES.items()):
            if comm.rank == 0:
                held_back(1)
            tensors, wanted, works = begun(comm, verb)
            memory = [tensor.detach() for tensor in tensors]
            for tensor in tensors:
                with pytest.raises(RuntimeError, match="not resizable"):
                    tensor.untyped_storage().resize_(0)
                with pytest.raises(RuntimeError, match="not resizable"):
                    tensor.detach().resize_(100 * tensor.numel())
                change(tensor)
            gc.collect()
            if comm.rank == 1:
                let_go(0)
            for work in works:
                work.wait()
            for found, expected in zip(memory, wanted, strict=True):
                assert torch.equal(elements(found), expected.reshape(-1)), (verb, name)


@on_ranks(1, 3, initialized=False)
def test_runs_in_the_order_issued() -> None:
    """Each operation takes the result of the one before, synchronous ones too. Closing twice is closing once."""
    with communicator() as comm:
        tensor = torch.full((SEVERAL_SEGMENTS,), float(comm.rank + 1))
        begin(comm, tensor)
        begin(comm, tensor, "max")
        comm.broadcast(tensor, comm.size - 1, async_op=True)
        before = begin(comm, tensor)
        comm.allreduce(tensor)
        assert before.is_completed()
        later = begin(comm, tensor)
        comm.barrier(async_op=True).wait()
        assert later.is_completed()
        assert_all(tensor, comm.size * (comm.size + 1) / 2 * comm.size**3)
        comm.close()
    with pytest.raises(CollectiveError, match="closed"):
        comm.allreduce(torch.ones(1))


@on_ranks(3, initialized=False)
def test_handle_of_an_operation_that_waits() -> None:
    """Rank 0 comes late: until then a wait with a timeout gives up, but not the operation."""
    with communicator() as comm:
        tensor = contribution(comm.rank, comm.size, SEVERAL_SEGMENTS, torch.float32)
        if comm.rank == 0:
            held_back(*range(1, comm.size))
            comm.allreduce(tensor)
        else:
            work = begin(comm, tensor)
            for timeout in (0.05, timedelta(seconds=0.05)):
                started = time.monotonic()
                with pytest.raises(CollectiveTimeout, match=r"allreduce.*0\.05"):
                    work.wait(timeout)
                assert time.monotonic() - started < EXCHANGE_TIMEOUT_S / 2
                assert not work.is_completed()
            let_go(0)
            work.wait(EXCHANGE_TIMEOUT_S)
            assert work.is_completed()
        assert torch.equal(tensor, reduced(comm.size, SEVERAL_SEGMENTS, torch.float32))
        comm.barrier()


@pytest.mark.parametrize("asynchronous", [True, False])
@on_ranks(3, initialized=False)
def test_another_thread_runs_during_wait(*, asynchronous: bool) -> None:
    """Rank 0 joins only when a Python thread of every other rank says so, while that rank's main thread waits."""
    with communicator() as comm:
        tensor = torch.ones(1)
        if comm.rank == 0:
            held_back(*range(1, comm.size))
            comm.allreduce(tensor)
        else:
            counted = []

            def count() -> None:
                for number in range(200_000):
                    counted.append(number)
                let_go(0)

            thread = threading.Thread(target=count)
            thread.start()
            if asynchronous:
                begin(comm, tensor).wait()
            else:
                comm.allreduce(tensor)
            assert len(counted) == 200_000
            thread.join()


@on_ranks(3, initialized=False)
def test_close_with_operations_in_flight() -> None:
    """Rank 0 never joins the operations of the others, which close, and then find their works failed."""
    comm = communicator()
    if comm.rank > 0:
        works = [begin(comm, torch.ones(SEVERAL_SEGMENTS)) for _ in range(3)]
        started = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gradwire.collectives.engine.closing.DRAIN_S", 0.5)
            comm.close()
        assert time.monotonic() - started < 5
        for work in works:
            with pytest.raises(CollectiveError):
                work.wait(10)
    dist.barrier()
    comm.close()


@on_ranks(1, 3, initialized=False)
def test_threads_may_share_it() -> None:
    """Which thread's call takes which turn does not matter where all calls are equal; two may wait for one handle."""
    with communicator() as comm:
        tensors = [[torch.ones(SEVERAL_SEGMENTS) for _ in range(50)] for _ in range(4)]

        def call(mine: list[torch.Tensor]) -> None:
            for number, tensor in enumerate(mine):
                if number % 3 == 0:
                    work = begin(comm, tensor)
                    in_threads(work.wait, work.wait)
                else:
                    comm.allreduce(tensor)

        in_threads(*(partial(call, mine) for mine in tensors))
        for tensor in itertools.chain(*tensors):
            assert_all(tensor, comm.size)


@on_ranks(1, 3, initialized=False)
def test_nothing_is_left_of_those_nobody_closed() -> None:
    def count() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def use_and_drop() -> None:
        comm = communicator()
        shared = comm.empty(SEVERAL_SEGMENTS)
        begin(comm, shared.fill_(1.0)).wait()
        comm.allreduce(torch.ones(SEVERAL_SEGMENTS), compression="int8")
        dist.barrier()  # nobody drops what another still receives from

    use_and_drop()  # what all processes keep, such as the kernels
    gc.collect()
    threads, files = count()
    for _ in range(5):
        use_and_drop()
    gc.collect()
    deadline = time.monotonic() + EXCHANGE_TIMEOUT_S
    while (now := count()) > (threads, files) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert now <= (threads, files), f"{now} threads and files instead of {(threads, files)}"


@on_ranks(3, initialized=False)
def test_a_function_that_does_not_return_ends_what_waits_for_it_on_all_ranks() -> None:
    """Rank 0's function blocks, so that its next operation never begins."""
    with communicator() as comm:
        comm.barrier()
        comm.timeout_s = 1.0
        may_end = threading.Event()
        if comm.rank == 0:
            work = begin(comm, torch.ones(1))
            work.when_done(partial(assert_set, may_end))
            let_go(1)
            let_go(2)
        else:
            held_back(0)
            comm.allreduce(torch.ones(1))
        with pytest.raises(CollectiveTimeout, match="barrier") as caught:
            comm.barrier()
        error = caught.value
        assert (error.rank, error.seconds) == (comm.rank, 1.0)
        assert error.ranks == (() if comm.rank == 0 else (0,))
        may_end.set()


@on_ranks(2, initialized=False)
def test_a_verb_in_a_signal_handler_is_an_error_at_once() -> None:
    """The operation that was interrupted goes on. An asynchronous call is right."""
    if os.environ.get(LINK):
        return  # gloo's waits run no handlers
    with communicator() as comm:
        comm.barrier()
        tensor, errors, works = torch.ones(1), list[CollectiveError](), list[Work]()
        if comm.rank == 1:
            held_back(0)
            comm.allreduce(tensor)
        else:

            def handler(number: int, frame: object) -> None:
                works.append(begin(comm, torch.ones(1)))
                for call in (comm.barrier, works[0].wait, partial(comm.send, torch.ones(1), 1)):
                    with pytest.raises(CollectiveError, match="signal handler") as caught:
                        call()
                    errors.append(caught.value)
                let_go(1)

            before = signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            comm.allreduce(tensor)
            signal.signal(signal.SIGALRM, before)
            assert len(errors) == 3
        assert_all(tensor, 2)
        (works[0] if works else begin(comm, torch.ones(1))).wait()
        comm.barrier()


@on_ranks(2, initialized=False)
def test_a_close_waits_for_functions_and_one_with_an_exception_is_known_where_they_would_have_called() -> None:
    """With an exception, rank 1's function calls too late. Rank 0 makes all calls."""
    for error in (None, ValueError("why")):
        comm, inner = communicator(), torch.ones(3)
        comm.barrier()

        def call(comm: Communicator = comm, inner: torch.Tensor = inner, leaves: bool = error is not None) -> None:
            if leaves and comm.rank == 1:
                wait_until(lambda: not comm._engine.operations.usable)
            comm.allreduce(inner)

        if comm.rank == 0:
            held_back(1)
        work = begin(comm, torch.ones(SEVERAL_SEGMENTS))
        work.when_done(call)
        if error is not None and comm.rank == 0:
            with pytest.raises(PeerLost, match="why"):  # by begin(), if rank 1 is quick
                begin(comm, torch.ones(7)).wait()
        else:
            last = begin(comm, torch.ones(7))
        if comm.rank == 1:
            let_go(0)
        close_all([comm], error)
        if error is None:
            last.wait()
            assert_all(inner, 2)
        dist.barrier()
