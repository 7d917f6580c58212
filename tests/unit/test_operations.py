"""The operations of a Communicator over a link that does nothing until it is aborted."""

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.control.neighbour import Neighbour
from gradwire.collectives.engine.buffers import Buffer
from gradwire.collectives.engine.closing import Closing, close_all
from gradwire.collectives.engine.operations import Operations
from gradwire.collectives.engine.point_to_point import Messages
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.engine.queue import WorkQueue
from gradwire.collectives.engine.work import Work
from gradwire.collectives.errors import CollectiveError, CollectiveTimeout, LinkError, PeerLost
from gradwire.collectives.torch_backend.work import GradwireWork, Mover
from gradwire.collectives.transports.base import Capabilities
from tests.harness import wait_until
from tests.unit.test_monitor import DEADLINE_S, channels, end_abruptly

SOON_S = 0.3  # in which nothing is to happen


class StuckTransport:
    """Of rank 0; a wait in it ends with abort() only, as gloo's do at times after a peer was killed."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.capabilities = 0, size, Capabilities(interruptible=True)
        self._aborted = threading.Event()

    def wait(self) -> None:
        assert self._aborted.wait(DEADLINE_S), "nobody ended the wait"
        raise LinkError(None, timed_out=False, detail="aborted")

    def abort(self) -> None:
        self._aborted.set()

    def lossy_paths(self) -> dict[int, str]:
        return {}


def echo(channel: Channel) -> None:
    """Let a rank say at once that it calls what rank 0 says that it does."""

    def repeat() -> None:
        said = channel.posts.get("calls", {})
        if said and said.get(channel.rank) != said[0]:
            channel.post("calls", said[0])

    channel.on_news(repeat)


@contextmanager
def operations(size: int) -> Iterator[tuple[Operations, StuckTransport, list[Channel]]]:
    """Rank 0's, its transport, and the watches of all ranks."""
    with channels(size) as all_watches:
        transport = StuckTransport(size)
        for channel in all_watches[1:]:
            echo(channel)
        yield Operations(transport, all_watches[0], timeout_s=300.0), transport, all_watches  # type: ignore[arg-type]


SEND = PreparedCall("send", "send", lambda *given: None, digest=0)


def closing_of(mine: Operations, transport: StuckTransport, channel: Channel) -> Closing:
    return Closing(mine, Messages(transport, mine), transport, channel)  # type: ignore[arg-type]


def nothing(number: int, deadline: float) -> None:
    pass


def submit(
    mine: Operations,
    body: Callable[[int, float], object] = nothing,
    text: str = "allreduce",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Work:
    """Run body(number, deadline) as an operation."""

    def run(source: None, destination: None, tag: int, deadline: float) -> None:
        body(mine.monitor.running, deadline)

    return mine.run(PreparedCall(text, text, run), run, None, None, async_op=async_op, timeout_s=timeout_s)


def waits(transport: StuckTransport, began: threading.Event) -> Callable[[int, float], None]:
    def body(number: int, deadline: float) -> None:
        began.set()
        transport.wait()

    return body


def leaves(channel: Channel) -> None:
    channel.report_leaving(0)


def test_messages_are_not_counted_and_wait_for_their_turn() -> None:
    """The number of an operation is what ranks agree on, whoever of them exchanges messages in between."""
    with operations(2) as (mine, _, _):
        numbers: list[int] = []
        go_on = threading.Event()

        def operation(number: int, deadline: float) -> None:
            numbers.append(number)

        def slow(number: int, deadline: float) -> None:
            assert go_on.wait(DEADLINE_S)

        def message(deadline: float) -> None:
            numbers.append(-1)

        submit(mine, operation)
        assert mine.run_message(SEND, frozenset({1}), message, async_op=True) is None
        submit(mine, slow, async_op=True)
        assert not mine.try_message(SEND, frozenset({1}), message)
        queued = mine.run_message(SEND, frozenset({1}), message, async_op=True)
        assert queued is not None
        last = submit(mine, operation, async_op=True)
        assert last is not None
        go_on.set()
        last.wait()
        assert queued.is_completed()
        assert numbers == [0, -1, -1, 2]
        submit(mine, operation)
        assert numbers[-1] == 3


def test_an_exception_in_a_message_ends_its_future_and_those_of_later_messages() -> None:
    """A link may raise other errors than LinkError."""

    class Broken:
        def is_done(self) -> bool:
            raise ZeroDivisionError("in the link")

    with operations(2) as (mine, transport, _):
        transport.post = lambda sends, receives, tag: ([], [Broken()])  # type: ignore[attr-defined]
        messages, mover = Messages(transport, mine), Mover()  # type: ignore[arg-type]
        buffer = Buffer([torch.empty(1)])
        works = [messages.transfer("irecv", buffer, 1, 0, sends=False, async_op=True) for _ in range(2)]
        for handle in [GradwireWork([], work, when_done=mover.add(work)) for work in works]:
            future = handle.get_future()
            wait_until(future.done)
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                future.wait()
        with mover.ending():
            pass


def test_an_operation_with_its_own_timeout_leaves_those_of_the_others_alone() -> None:
    """The others are queued before and after an operation with a timeout of its own."""
    with operations(2) as (mine, transport, _):
        given_s: list[float] = []
        go_on = threading.Event()

        def operation(number: int, deadline: float) -> None:
            assert go_on.wait(DEADLINE_S)
            given_s.append(round(deadline - time.monotonic(), -1))

        def late(number: int, deadline: float) -> None:
            transport.abort()
            raise LinkError(1, timed_out=True, detail="rank 1 is late")

        for timeout_s in (None, None, 100.0, None):
            submit(mine, operation, async_op=True, timeout_s=timeout_s)
        go_on.set()
        with pytest.raises(CollectiveTimeout, match="not done after 7 s waiting for rank 1"):
            submit(mine, late, "barrier", timeout_s=7.0)
        assert given_s[1:] == [300.0, 100.0, 300.0]  # the first one has waited for go_on itself
        assert mine.timeout_s == 300.0


@pytest.mark.parametrize("leaver", [1, 2])
def test_a_message_is_given_up_when_its_own_rank_has_left(leaver: int) -> None:
    with operations(3) as (mine, transport, all_watches):
        ended = threading.Event()
        began = threading.Event()
        errors: list[BaseException] = []

        def message(deadline: float) -> None:
            began.set()
            transport.wait()

        def call() -> None:
            try:
                mine.run_message(SEND, frozenset({1}), message, async_op=False)
            except CollectiveError as error:
                errors.append(error)
            ended.set()

        threading.Thread(target=call).start()
        assert began.wait(DEADLINE_S)
        all_watches[leaver].report_leaving(0)
        assert not ended.wait(SOON_S)  # it may still be sending
        all_watches[leaver].report_done()
        assert ended.wait(DEADLINE_S if leaver == 1 else SOON_S) == (leaver == 1)
        transport.abort()
        assert ended.wait(DEADLINE_S)
        if leaver == 1:
            assert isinstance(errors[0], PeerLost)
            assert errors[0].ranks == (1,)


@pytest.mark.parametrize("goes", [end_abruptly, leaves])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_wait_that_the_link_does_not_end_is_ended(goes: Callable[[Channel], None], async_op: bool) -> None:
    with operations(3) as (mine, transport, all_watches):
        began = threading.Event()
        threading.Thread(target=lambda: (began.wait(DEADLINE_S), goes(all_watches[2]))).start()

        def call() -> None:
            submit(mine, waits(transport, began), async_op=async_op).wait()

        with pytest.raises(PeerLost) as caught:
            call()
        assert caught.value.ranks == (2,)


@pytest.mark.parametrize("goes", [end_abruptly, leaves])
def test_what_is_known_to_be_in_vain_is_not_begun(goes: Callable[[Channel], None]) -> None:
    with operations(3) as (mine, _, all_watches):
        goes(all_watches[1])
        assert all_watches[0].wait_for(lambda: bool(all_watches[0].lost or all_watches[0].left), DEADLINE_S)
        with pytest.raises(PeerLost, match="lost rank 1"):
            submit(mine, lambda *_: pytest.fail("it was begun"))


def test_a_rank_that_leaves_later_does_not_disturb() -> None:
    with operations(2) as (mine, _, all_watches):
        all_watches[1].report_leaving(2)
        assert all_watches[0].wait_for(lambda: bool(all_watches[0].left), DEADLINE_S)
        for _ in range(2):
            submit(mine)
        with pytest.raises(PeerLost):
            submit(mine)


def test_a_rank_that_exits_has_taken_part_in_what_it_finished() -> None:
    with operations(2) as (mine, transport, all_watches):
        for _ in range(3):
            submit(mine)
        closing_of(mine, transport, all_watches[0]).exit()
        assert all_watches[1].wait_for(lambda: all_watches[1].left == {0: 3}, DEADLINE_S)


def test_turns_of_several_threads_have_numbers_of_their_own() -> None:
    with operations(1) as (mine, _, _):
        taken: list[int] = []

        def call() -> None:
            for number in range(200):
                body: Callable[[int, float], object] = lambda number, _: taken.append(number)  # noqa: E731
                submit(mine, body, async_op=number % 3 == 0).wait()

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        numbered = [number for number in taken if number >= 0]
        assert len(numbered) == 800
        assert numbered == sorted(set(numbered))


class Interrupting(dict[int, object]):
    """Raises Ctrl-C where something is kept: a turn does so before anything of it has begun."""

    def __setitem__(self, key: int, value: object) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_before_an_operation_has_begun_leaves_the_queue_usable_and_the_rank_not_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the way into the queue, and as its turn begins."""
    enter = WorkQueue.enter

    def interrupted(queue: WorkQueue, turn: tuple[int]) -> bool:
        enter(queue, turn)
        raise KeyboardInterrupt

    with operations(1) as (mine, _, _):
        submit(mine)  # by which it is known
        taken: list[int] = []
        for target, name, value in ((WorkQueue, "enter", interrupted), (mine.monitor, "calls", Interrupting())):
            with monkeypatch.context() as patched:
                patched.setattr(target, name, value)
                with pytest.raises(KeyboardInterrupt):
                    submit(mine)
            submit(mine)
        submit(mine, lambda number, _: taken.append(number))
        assert taken == [3]


def test_a_wait_that_ends_as_if_all_were_well_is_a_failure_all_the_same() -> None:
    with operations(2) as (mine, transport, all_watches):

        def body(number: int, deadline: float) -> None:
            leaves(all_watches[1])
            with pytest.raises(LinkError):
                transport.wait()

        with pytest.raises(PeerLost, match="lost rank 1"):
            submit(mine, body)


@pytest.mark.parametrize("patched", ["run", "calls", "body"])
def test_an_interrupt_in_a_wait_that_runs_an_operation(patched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the operation begins, it stays queued, or its number is used by the next one; afterwards, the Communicator is
    broken."""
    with operations(1) as (mine, _, _), monkeypatch.context() as interrupted:
        submit(mine)
        monkeypatch.setattr(WorkQueue, "_serve", lambda queue: None)
        taken: list[int] = []

        def body(number: int, deadline: float) -> None:
            if patched == "body":
                signal.raise_signal(signal.SIGINT)
            taken.append(number)

        work = submit(mine, body, async_op=True)
        if patched == "run":
            interrupted.setattr(Work, "run", mock.Mock(side_effect=KeyboardInterrupt))
        if patched == "calls":
            interrupted.setattr(mine.monitor, "calls", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        interrupted.undo()
        if patched == "run":
            work.wait()
            assert taken == [1]
        elif patched == "calls":
            submit(mine, body)
            assert taken == [1]
        else:
            assert mine.monitor.failure is not None


@pytest.mark.parametrize("async_op", [False, True])
def test_what_comes_as_another_thread_closes_is_refused(monkeypatch: pytest.MonkeyPatch, async_op: bool) -> None:
    with operations(2) as (mine, transport, all_watches):
        name = "submit" if async_op else "enter"
        reached, closing = getattr(WorkQueue, name), closing_of(mine, transport, all_watches[0])

        def late(queue: WorkQueue, argument: Any, **options: Any) -> Any:
            monkeypatch.undo()
            assert closing.announce()
            closing.drain(DEADLINE_S)
            return reached(queue, argument, **options)

        monkeypatch.setattr(WorkQueue, name, late)
        with pytest.raises(CollectiveError, match="the Communicator is closed"):
            submit(mine, lambda *_: pytest.fail("it was begun"), async_op=async_op)
        assert not closing.announce()
        assert all_watches[1].wait_for(lambda: all_watches[1].left == {0: 0}, DEADLINE_S)


def test_an_interrupted_operation_is_told_to_the_others() -> None:
    with operations(2) as (mine, _, all_watches):

        def body(number: int, deadline: float) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            submit(mine, body)
        assert all_watches[1].wait_for(lambda: all_watches[1].left == {0: 0}, DEADLINE_S)
        with pytest.raises(CollectiveError, match="broken"):
            submit(mine)


def test_the_queue_lets_go_of_what_it_has_run() -> None:
    with operations(1) as (mine, _, _):

        class Tensor:
            pass

        tensor = Tensor()
        gone = weakref.ref(tensor)
        body: Callable[[int, float], object] = lambda number, deadline, held=tensor: None  # noqa: E731
        submit(mine, body, async_op=True).wait()
        del tensor, body
        submit(mine)  # by when the queue's thread has put the first aside
        assert gone() is None


def test_a_thread_that_cannot_start_leaves_the_queue_as_it_was() -> None:
    with operations(1) as (mine, _, _):
        cannot = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
        with cannot, pytest.raises(RuntimeError, match="new thread"):
            submit(mine, nothing, async_op=True)
        submit(mine)
        submit(mine, nothing, async_op=True).wait(DEADLINE_S)


def test_what_nobody_uses_any_more_gives_its_threads_back() -> None:
    before = set(threading.enumerate())
    with channels(2) as all_watches:
        echo(all_watches[1])
        transport = StuckTransport(2)
        mine = Operations(transport, all_watches[0], timeout_s=300.0)  # type: ignore[arg-type]
        closing = closing_of(mine, transport, all_watches[0])
        submit(mine, nothing, async_op=True).wait()
        submit(mine)
        gone = weakref.ref(mine)
        gc.disable()  # nothing may depend on it
        try:
            del mine, closing
            wait_until(lambda: gone() is None)  # the thread that has run the first call may still be about to let go
        finally:
            gc.enable()
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


class _Steps:
    def __init__(self, name: str, steps: list[str]) -> None:
        self._name, self._steps = name, steps

    def announce(self, error: BaseException | None) -> bool:
        self._steps.append(f"announce {self._name}, {error}")
        return True

    def drain(self, deadline: float, *, is_failing: bool = False) -> None:
        self._steps.append(f"drain {self._name}")

    def part(self, deadline: float) -> None:
        self._steps.append(f"part {self._name}")

    def join(self) -> None:
        self._steps.append(f"join {self._name}")


def test_all_say_that_they_close_before_any_waits() -> None:
    steps: list[str] = []
    close_all([_Steps(name, steps) for name in "ab"], ValueError("why"))  # type: ignore[misc]
    assert steps == ["announce a, why", "announce b, why", "drain a", "drain b", "part a", "part b", "join a", "join b"]


@pytest.mark.parametrize("failed", [True, False], ids=["after an error", "out of reach"])
def test_nobody_waits_for_long_for_ranks_that_are_out_of_reach(failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for what they have queued nor for their last words, whether this Communicator has noticed or another one."""
    with operations(2) as (mine, transport, all_watches):
        channel, waited = all_watches[0], []
        monkeypatch.setattr(Neighbour, "is_unconfirmed", lambda _: True)
        monkeypatch.setattr(channel, "wait_for", lambda condition, timeout_s: waited.append(timeout_s))
        if failed:
            transport.abort()
            with pytest.raises(CollectiveError):
                submit(mine, lambda *_: transport.wait())
            waited.clear()
        closing = closing_of(mine, transport, channel)
        assert closing.announce()
        closing.drain(time.monotonic())
        closing.part(time.monotonic() + 60)
        assert sum(waited) < 1
        assert all_watches[1].wait_for(lambda: 0 in all_watches[1].done, DEADLINE_S)
