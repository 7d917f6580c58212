"""Ranks wait for one that does not come: they say which, and in what file and line it is instead."""

import inspect
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import CollectiveTimeout, Communicator, PeerLost
from gradwire.collectives.engine.prepared import PreparedCall
from tests.harness import ON_EVERY_TRANSPORT, World
from tests.ranks.training import on_ranks

WARNING_S = 0.2
TIMEOUT_S = 50.0
DEADLINE_S = 40.0  # for what takes a second on a machine with nothing else to do
SILENT = r"rank 1 does not answer"


class Heard(logging.Handler):
    """Keeps the warnings of this rank, and makes a file once one is what it waits for: every rank has it in `directory`."""

    def __init__(self, wanted: str, path: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._wanted = wanted
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if re.search(self._wanted, self.texts[-1], re.DOTALL):
            self._path.touch()


@contextmanager
def heard(wanted: str, path: Path) -> Iterator[list[str]]:
    logger, handler = logging.getLogger("gradwire"), Heard(wanted, path)
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


def sleep_until(paths: list[Path]) -> None:
    """Sleep, in the line that the others are to tell."""
    give_up = time.monotonic() + DEADLINE_S
    while not all(path.exists() for path in paths) and time.monotonic() < give_up:
        time.sleep(0.01)


def asleep() -> str:
    """Return what the others are to say of a rank in sleep_until, as a pattern."""
    lines, first = inspect.getsourcelines(sleep_until)
    (at,) = (first + n for n, line in enumerate(lines) if "time.sleep" in line)
    return rf"test_stall\.py:({at - 1}|{at}), sleep_until"


def in_the_background(comm: Communicator) -> None:
    comm.allreduce(torch.ones(3), async_op=True).wait()


CALLS: dict[str, Callable[[Communicator], object]] = {
    "allreduce": lambda comm: comm.allreduce(torch.ones(5)),
    "allreduce again": lambda comm: comm.allreduce(torch.ones(3)),
    "allreduce asynchronously": in_the_background,
    "allreduce prepared": lambda comm: comm.prepare_allreduce(torch.ones(7))(),
    "allgather": lambda comm: comm.allgather(torch.ones(comm.size), torch.ones(1)),
    "barrier": lambda comm: comm.barrier(),
}


@ON_EVERY_TRANSPORT
@on_ranks(3, initialized=False)
def test_all_who_wait_say_where_the_one_is_that_sleeps(tmp_path: Path) -> None:
    """Rank 1 comes late to one call after the other: until every other rank has told where it is."""
    with Communicator(timeout_s=TIMEOUT_S, stall_warning_s=WARNING_S) as comm:
        comm.allreduce(torch.ones(3))
        comm.allreduce(torch.ones(3))
        for number, (name, call) in enumerate(CALLS.items(), 2):
            paths = [tmp_path / f"{number} {rank}" for rank in range(comm.size) if rank != 1]
            if comm.rank == 1:
                sleep_until(paths)
                call(comm)
                continue
            wanted = rf"rank {comm.rank} has waited .* in operation {number}, {name.split()[0]}\(.*, for rank 1\n"
            wanted += rf" *rank 1 is at [^\n]*{asleep()}; the last operation that it finished is {number - 1}, "
            with heard(wanted, tmp_path / f"{number} {comm.rank}") as texts:
                call(comm)
            assert (tmp_path / f"{number} {comm.rank}").exists(), (name, texts)


@on_ranks(2, initialized=False)
def test_a_rank_waits_in_another_communicator_and_for_a_message(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait for each other, in two Communicators, and rank 1 for a message of rank 0's at last."""
    where = "test_a_rank_waits_in_another_communicator_and_for_a_message"
    first, second = (Communicator(timeout_s=TIMEOUT_S, stall_warning_s=WARNING_S) for _ in range(2))
    if first.rank == 0:
        wanted = (
            rf"for rank 1\n *rank 1 is at .*{where}.*waits in operation 0, barrier\(.* of another Communicator .*join"
        )
        with heard(wanted, tmp_path / "elsewhere"):
            first.barrier(async_op=True)
            sleep_until([tmp_path / "elsewhere"])
            second.barrier()
        sleep_until([tmp_path / "message"])
        first.send(torch.ones(1), 1)
    else:
        second.barrier()
        first.barrier()
        with heard(rf"in recv\(.*\n *rank 0 is at .*{asleep()}; the last operation", tmp_path / "message"):
            first.recv(torch.ones(1), 0)
    assert (tmp_path / "elsewhere").exists()
    assert (tmp_path / "message").exists()
    first.close()
    second.close()


def wait_for_one_that_is_stopped(directory: Path) -> list[str]:
    with Communicator(timeout_s=TIMEOUT_S, stall_warning_s=WARNING_S) as comm:
        dist.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with heard(SILENT, directory / str(comm.rank)) as texts:
            comm.barrier()
        return texts


def test_a_rank_that_is_stopped_does_not_answer(failing_world: Callable[[int], World], tmp_path: Path) -> None:
    world = failing_world(3)
    world.start(wait_for_one_that_is_stopped, tmp_path)
    sleep_until([tmp_path / "0", tmp_path / "2"])
    world.signal(1, signal.SIGCONT)
    for outcome in world.collect(DEADLINE_S):
        assert outcome.status == "returned", str(outcome)
        assert outcome.rank == 1 or re.search(SILENT, "".join(outcome.value)), outcome.value


@on_ranks(3, initialized=False)
def test_a_wait_that_is_too_long_is_an_error_that_says_where_the_rank_is(tmp_path: Path) -> None:
    comm = Communicator(timeout_s=TIMEOUT_S, stall_warning_s=WARNING_S, stall_shutdown_s=3.0)
    paths = [tmp_path / str(rank) for rank in range(comm.size) if rank != 1]
    if comm.rank == 1:
        sleep_until(paths)
    else:
        with pytest.raises(CollectiveTimeout, match=asleep()) as caught:
            comm.allreduce(torch.ones(3))
        assert (caught.value.seconds, caught.value.waiting_for) == (3.0, (1,))
        (tmp_path / str(comm.rank)).touch()
    comm.close()


@on_ranks(2, initialized=False)
def test_times_are_positive() -> None:
    for name in ("stall_warning_s", "stall_shutdown_s"):
        for seconds in (0, -1.0, float("inf"), float("nan")):
            wrong: dict[str, Any] = {name: seconds}
            with pytest.raises(ValueError, match=rf"rank {dist.get_rank()}: {name}={seconds} must be positive"):
                Communicator(**wrong)
    with Communicator(stall_warning_s=None) as comm:
        comm.barrier()


def fails(*given: object) -> None:
    raise ValueError("a batch\nof " + "nothing " * 100)


@on_ranks(3, initialized=False)
@ON_EVERY_TRANSPORT
@pytest.mark.parametrize("how", ["in its block", "in an operation"])
def test_the_others_hear_what_a_rank_raised(how: str) -> None:
    """Rank 1 does, in its `with` block, or in the middle of an operation."""
    comm = Communicator(timeout_s=TIMEOUT_S)
    comm.barrier()
    if comm.rank == 1:
        with pytest.raises(ValueError, match="a batch"), comm:
            comm._engine.run(
                PreparedCall("a meeting", "a meeting", fails), None, None
            ) if how == "in an operation" else fails()
        return
    with pytest.raises(PeerLost) as caught:
        comm._engine.run(
            PreparedCall("a meeting", "a meeting", lambda *given: comm._engine.meet(*given[2:])), None, None
        )
    said = r"rank 1 raised ValueError: a batch of nothing .{200,300}\.\.\. at .*test_stall\.py:\d+, fails"
    assert re.search(rf"lost rank 1: {said}$", str(caught.value)), str(caught.value)
    assert caught.value.ranks == (1,)
    comm.close()
