"""The queue of a Communicator's operations, and their handles."""

import threading
from collections.abc import Callable
from threading import get_ident

import pytest
import torch

from gradwire.collectives.engine import queue as queue_module
from gradwire.collectives.engine.queue import WorkQueue
from gradwire.collectives.engine.work import Work
from gradwire.collectives.errors import CollectiveError, CollectiveTimeout
from tests.harness import wait_until
from tests.unit.test_monitor import DEADLINE_S


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
    queue, turn = SealedOnTheWay(is_counted=True), (get_ident(),)
    assert queue.enter(turn)
    queue.leave(turn, 0)
    assert not queue.enter((get_ident(),))
    refusing = SealedOnTheWay(is_counted=False)
    assert not refusing.enter((get_ident(),))
    assert (refusing.number, refusing.busy()) == (-1, False)


def test_a_queue_that_is_closed_takes_nothing_more() -> None:
    queue = WorkQueue("test")
    assert queue.seal() == 0
    assert queue.seal() is None
    assert not queue.enter((get_ident(),))
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
    """With a timeout, behind another one, in another thread, and if none may run it."""
    queue = WithoutThread()
    first, work = (Work(0, "allreduce", lambda: pytest.fail("it was begun")) for _ in range(2))
    queue.submit(first)
    queue.submit(work)
    with pytest.raises(CollectiveTimeout):
        first.wait(0.01)
    waits = [threading.Thread(target=first.wait), threading.Timer(0.01, work._done.set)]
    for each in waits:
        each.start()
    work.wait()
    first._done.set()
    for each in waits:
        each.join(DEADLINE_S)
    alone = WithoutThread()
    alone._last_begun = None
    last = Work(0, "allreduce", lambda: pytest.fail("it was begun"))
    alone.submit(last)
    threading.Timer(0.01, last._done.set).start()
    last.wait()


def test_an_interrupt_between_the_parts_of_a_work_completes_it() -> None:
    work = Work(0, "allreduce", lambda: None)
    work._run = None  # as if the interrupt had come right after it
    work.end()
    with pytest.raises(CollectiveError, match="interrupted"):
        work.wait()


@pytest.mark.parametrize(
    "end", [Work.begin, lambda work: work.wait(DEADLINE_S), lambda work: work.queue.close(DEADLINE_S)]
)
def test_awaited_works_run_in_the_thread_that_waits_and_start_no_thread(end: Callable[[Work], object]) -> None:
    """begin(), a wait with a timeout and close() start the queue's thread, which runs what is left."""
    before, queue, ran = set(threading.enumerate()), WorkQueue("test", lambda: -1), list[int]()
    works = [Work(0, "allreduce", lambda: ran.append(get_ident()), counted=False) for _ in range(3)]
    for work in works:
        queue.submit(work, awaited=True)
    works[0].wait()
    assert ran == [get_ident()]
    assert set(threading.enumerate()) == before
    end(works[2])
    wait_until(works[2].is_completed)
    assert len(ran) == 3
    assert get_ident() not in ran[1:]
    assert queue.close(DEADLINE_S)
    wait_until(lambda: set(threading.enumerate()) <= before)


class Refusals(dict[str, tuple[int]]):
    """A turn that tells when a thread has found it taken."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = threading.Event()

    def setdefault(self, key: str, turn: tuple[int]) -> tuple[int]:  # type: ignore[override]
        taken = super().setdefault(key, turn)
        if taken is not turn:
            self.refused.set()
        return taken


@pytest.mark.parametrize("begin", [Work.begin, Work.wait])
def test_an_awaited_work_that_has_found_a_turn_taken_runs_after_it(begin: Callable[[Work], None]) -> None:
    """The queue's thread, which another thread has woken up, sleeps until then."""
    queue, work = WorkQueue("test"), Work(0, "allreduce", lambda: None)
    queue._turn = turns = Refusals()
    turn = (get_ident(),)
    assert queue.enter(turn)
    queue.submit(work, awaited=True)
    waiting = threading.Thread(target=begin, args=[work], daemon=True)
    waiting.start()
    assert turns.refused.wait(DEADLINE_S)
    queue.leave(turn, 0)
    wait_until(work.is_completed)
    waiting.join(DEADLINE_S)
    assert queue.close(DEADLINE_S)


class Recorder:
    """Submits works that note their names in the order in which they run, and the threads that run them."""

    def __init__(self) -> None:
        self.queue, self.ran, self.threads = WorkQueue("test"), "", dict[str, int]()

    def work(self, name: str, timeout_s: float = DEADLINE_S) -> Work:
        work = Work(0, name, lambda: self.note(name), timeout_s=timeout_s)
        self.queue.submit(work)
        return work

    def note(self, name: str) -> None:
        self.ran += name
        self.threads[name] = get_ident()


def test_a_function_may_submit_works_and_wait_for_them() -> None:
    """They run at once, before the works that were submitted after the function, also before one for which the function does
    not wait. Neither the turn nor the queue's thread is taken meanwhile. It ends with the queue."""
    recorder, may_go_on, before = Recorder(), threading.Event(), set(threading.enumerate())

    def wait() -> None:
        assert may_go_on.wait(DEADLINE_S)

    slow = Work(0, "slow", wait)
    recorder.queue.submit(slow)
    found: list[object] = []

    def function() -> None:
        recorder.note("f")
        inner = recorder.work("i")
        found.extend([inner.is_completed(), recorder.queue.enter(turn := (get_ident(),))])
        recorder.queue.leave(turn, recorder.queue.number)
        inner.when_done(lambda: recorder.note("n"))
        earlier.wait()
        raise ValueError("which is logged, and ends nothing")

    slow.when_done(function)
    earlier, last = recorder.work("e"), recorder.work("l")
    assert not recorder.queue.enter((get_ident(),))
    assert recorder.ran == ""
    may_go_on.set()
    last.wait(DEADLINE_S)
    last.when_done(lambda: recorder.note("d"))
    assert recorder.ran == "fineld"
    assert found == [True, True]
    assert recorder.threads["f"] == recorder.threads["i"] == recorder.threads["e"] != recorder.threads["l"]
    assert recorder.threads["d"] == get_ident()
    assert recorder.queue.number == 4  # of five turns; the one that enter() took began nothing
    assert recorder.queue.close(DEADLINE_S)
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_function_that_does_not_return_delays_a_work_for_its_timeout() -> None:
    """The works then run, and functions that are given later are called."""
    recorder, blocked = Recorder(), threading.Event()

    def block() -> None:
        blocked.wait(DEADLINE_S)

    first = recorder.work("a")
    recorder.queue._changed.acquire()  # so that the function comes before the end of the work
    late = Work(0, "late", lambda: None)
    recorder.queue.submit(late)
    late.when_done(block)
    works = [recorder.work("b", timeout_s=0.05), recorder.work("c", timeout_s=100.0)]
    called = threading.Event()
    works[1].when_done(called.set)
    recorder.queue._changed.release()
    for work in (first, *works):
        work.wait(DEADLINE_S)
    assert recorder.queue.overdue
    assert called.wait(DEADLINE_S)
    assert recorder.ran == "abc"
    blocked.set()
    assert recorder.queue.close(DEADLINE_S)


def test_what_is_refused_where_a_wait_could_never_end() -> None:
    """In a thread that has a turn, in the queue's thread, and where the thread is inside the queue."""
    queue, errors = WorkQueue("test"), list[CollectiveError]()

    def refused() -> None:
        with pytest.raises(CollectiveError, match="rank 2: barrier: called in a signal handler") as caught:
            queue.check_may_wait(2, "barrier")
        errors.append(caught.value)

    turn = (get_ident(),)
    assert queue.enter(turn)
    refused()
    waiting = Work(2, "barrier", lambda: None)
    queue.submit(waiting)
    with pytest.raises(CollectiveError, match="rank 2: barrier: called in a signal handler"):
        waiting.wait()
    queue.leave(turn, queue.number)
    waiting.wait()
    work = Work(0, "allreduce", refused)
    queue.submit(work)
    work.wait()
    with queue._changed:
        refused()
    queue.check_may_wait(2, "barrier")
    assert len(errors) == 3
    assert queue.close(DEADLINE_S)


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
        monkeypatch.setattr(queue_module, "_LOOK_S", 0.005 if number == 2 else DEADLINE_S)
        for _ in range(1000):  # the thread may be faster at times
            submitted().wait()
            if queue._at_once >= queue_module._MANY:
                break
        assert queue._at_once >= queue_module._MANY
        ran.clear()
        work = submitted()
        wait(work)
        wait_until(work.is_completed)
        assert ran == [queue._thread.ident]
        assert queue._at_once == 0
    assert queue.close(DEADLINE_S)
