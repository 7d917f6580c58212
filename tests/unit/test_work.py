"""The queue of a Communicator's operations, and their handles."""

import threading
from collections.abc import Callable
from threading import get_ident

import pytest
import torch

from gradwire.collectives.errors import CollectiveError, CollectiveTimeout
from gradwire.collectives.run import work as work_module
from gradwire.collectives.run.work import Work, WorkQueue
from tests.harness import wait_until
from tests.unit.test_watch import DEADLINE_S


def test_a_collector_that_runs_in_the_queue_does_not_block_it() -> None:
    queue = WorkQueue("test")
    with queue._changed:
        queue.close(0.0)


class SealedOnTheWay(WorkQueue):
    """Is sealed by another thread, so to say, when a turn has been taken, before or after it is counted."""

    def __init__(self, *, is_counted: bool) -> None:
        self._is_counted = is_counted
        super().__init__("test")

    @property
    def number(self) -> int:
        return self._number

    @number.setter
    def number(self, value: int) -> None:
        if value == 0 and not self._is_counted:
            assert self.seal() == 0
        self._number = value
        if value == 0 and self._is_counted:
            assert self.seal() in (1, None)


def test_a_turn_goes_on_if_a_close_has_promised_it_to_the_others() -> None:
    queue, turn = SealedOnTheWay(is_counted=True), object()
    assert queue.enter(turn)
    queue.leave(turn, 0)
    assert not queue.enter(object())
    refusing = SealedOnTheWay(is_counted=False)
    assert not refusing.enter(object())
    assert (refusing.number, refusing.busy()) == (-1, False)


def test_a_queue_that_is_closed_takes_nothing_more() -> None:
    queue = WorkQueue("test")
    assert queue.seal() == 0
    assert queue.seal() is None
    assert not queue.enter(object())
    with pytest.raises(CollectiveError, match="rank 3: allreduce: the Communicator is closed"):
        queue.submit(Work(3, "allreduce", lambda: None))
    assert queue.close(0.0)


class WithoutThread(WorkQueue):
    """Has a thread that runs nothing, as if it had not woken up yet. Every turn begins an operation."""

    def __init__(self) -> None:
        super().__init__("test", lambda: self.number)

    def _serve(self) -> None:
        pass


def test_a_wait_runs_what_is_next_in_its_own_thread() -> None:
    queue, ran = WithoutThread(), []
    works = [
        Work(0, str(n), lambda n=n: ran.append((n, get_ident(), torch.is_inference_mode_enabled()))) for n in (0, 1)
    ]
    for work in works:
        queue.submit(work)
    with torch.inference_mode():
        works[0].wait()
    works[1].wait()
    assert ran == [(0, get_ident(), False), (1, get_ident(), False)]
    assert (queue.number, queue.busy()) == (1, False)


def test_a_wait_leaves_an_operation_to_the_queue() -> None:
    """With a timeout, with callbacks, behind another one, in another thread, and if none may run it."""
    queue = WithoutThread()
    first, work = (Work(0, "allreduce", lambda: pytest.fail("it was begun")) for _ in range(2))
    queue.submit(first)
    queue.submit(work)
    with pytest.raises(CollectiveTimeout):
        first.wait(0.01)
    waits = [threading.Thread(target=first.wait)]
    threading.Timer(0.01, work._done.set).start()
    work.wait()
    first.when_done(lambda: None)
    waits.append(threading.Thread(target=first._done.set))
    for each in waits:
        each.start()
    first.wait()
    for each in waits:
        each.join(DEADLINE_S)
    alone = WithoutThread()
    alone._last_begun = None
    last = Work(0, "allreduce", lambda: pytest.fail("it was begun"))
    alone.submit(last)
    threading.Timer(0.01, last._done.set).start()
    last.wait()


def test_an_interrupt_between_the_parts_of_a_work_completes_it() -> None:
    called: list[int] = []
    work = Work(0, "allreduce", lambda: None)
    work._run = None  # as if the interrupt had come right after it
    work.when_done(lambda: called.append(1))
    work.end()
    with pytest.raises(CollectiveError, match="interrupted"):
        work.wait()
    work.end()
    assert called == [1]


def test_a_queue_whose_works_were_awaited_at_once_finds_the_next_one_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is not woken up then, unless a caller waits with a timeout or for a callback. The thread looks by itself only
    while the last work is queued, for which no caller waits."""
    queue, ran = WorkQueue("test", lambda: -1), []

    def submitted() -> Work:
        work = Work(0, "allreduce", lambda: ran.append(get_ident()), counted=False)
        queue.submit(work)
        return work

    waits: list[Callable[[Work], object]] = [
        lambda work: work.wait(DEADLINE_S),
        lambda work: work.when_done(lambda: None),
        lambda work: None,
    ]
    for number, wait in enumerate(waits):
        monkeypatch.setattr(work_module, "_LOOK_S", 0.005 if number == 2 else DEADLINE_S)
        for _ in range(1000):  # the thread may be faster at times
            submitted().wait()
            if queue._at_once >= work_module._MANY:
                break
        assert queue._at_once >= work_module._MANY
        ran.clear()
        work = submitted()
        wait(work)
        wait_until(work.is_completed)
        assert ran == [queue._thread.ident]
        assert queue._at_once == 0
    assert queue.close(DEADLINE_S)
