"""Worlds of spawned ranks for tests: started once, reused, and a hang is an error with a traceback.

Three deadlines are nested, each long enough for the one inside it to speak first: an exchange (EXCHANGE_TIMEOUT_S, of
the torch.distributed group), a run of one function on all ranks (RUN_TIMEOUT_S), and pytest-timeout around the test.
Ranks meet through a FileStore, so that no test chooses a port. They are forked from a server process that has only
imported torch, gradwire and what the examples draw and learn with, which makes a fresh world cost tens of milliseconds.
After torch's MultiProcContinuousTest (torch/testing/_internal/common_distributed.py).
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed

from gradwire.collectives.environment import LINK, SHARED_MEMORY

EXCHANGE_TIMEOUT_S = 20.0
RUN_TIMEOUT_S = 60.0
GRACE_S = 5.0  # what a rank has for reporting or leaving, once another has failed or all is over

#: What the ranks of a host talk through, and what is set in their environment for it.
TRANSPORTS: dict[str, dict[str, str]] = {
    "shared_memory": {},
    "sockets": {SHARED_MEMORY: "0"},
    "process_group": {LINK: "process_group"},
}


def wide(*values: Any) -> list[Any]:
    """Return values of a parameter that widen a sweep without a new idea in it: only `make test-all` runs them."""
    return wide_rows(*((value,) for value in values))


def wide_rows(*rows: Sequence[Any]) -> list[Any]:
    """Return rows of values of several parameters, as wide() does."""
    return [pytest.param(*row, marks=pytest.mark.wide) for row in rows]


#: `pytestmark` of tests that are to hold for each of them. `make test` runs them on one, but faults, which each transport finds
#: in its own way, also over sockets.
ON_EVERY_TRANSPORT = pytest.mark.parametrize(
    "ranks", ["shared_memory", *wide("sockets", "process_group")], indirect=True
)


#: `pytestmark` of tests whose subject lies above the transports. Gloo's messages are what hosts without compiled kernels have.
ABOVE_TRANSPORTS = pytest.mark.parametrize("ranks", ["shared_memory", *wide("process_group")], indirect=True)


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch.distributed",
        "torch._dynamo",  # which every optimizer imports, for more than a second
        "gradwire",
        "gradwire.collectives.kernels.cpu.shared_memory",
        "gradwire.collectives.kernels.cpu.tcp",
        "matplotlib.figure",
        "sklearn.datasets",
        "pytest",
    ]
)


def connected(
    target: Callable[..., None], *args: Any, name: str
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """Start a process of the server, which ends with this one. Return it, and the other end of the connection that is its last
    argument."""
    ours, theirs = _context.Pipe()
    os.environ["OMP_NUM_THREADS"] = "1"
    process = _context.Process(target=target, args=(*args, theirs), name=name, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def wait_until(condition: Callable[[], object], within_s: float = EXCHANGE_TIMEOUT_S) -> None:
    """Look every millisecond whether a condition holds. Raises AssertionError where it does not within so many seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {within_s} s"
        time.sleep(0.001)


def segments() -> int:
    """How many segments of shared memory this process has mapped."""
    return sum("memfd:gradwire" in line for line in Path("/proc/self/maps").read_text().splitlines())


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in a segment of shared memory."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:gradwire" in line]
    ranges = [[int(each, 16) for each in line[0].split("-")] for line in lines]
    return any(begin <= tensor.data_ptr() < end for begin, end in ranges)


def held() -> tuple[int, int]:
    """The files that this process has open, and the segments that it has mapped, once garbage is collected."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), segments()


def assert_holds(descriptors: int, maps: int) -> None:
    """Of what held() returned before, nothing more is there than a file that something else may have opened."""
    after = held()
    assert after[0] <= descriptors + 1
    assert after[1] == maps


class RanksFailedError(AssertionError):
    """Some ranks raised, died or hung; the message holds what every rank reported."""


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: its result, or the traceback or exit code that explains why there is none."""

    rank: int
    status: Literal["returned", "raised", "died", "hung"]
    value: Any = None
    detail: str = ""
    exit_code: int | None = None  # of one that died

    def __str__(self) -> str:
        return f"rank {self.rank} {self.status}\n{self.detail}".rstrip()


class World:
    """`size` fresh processes with torch.distributed (gloo) initialised, waiting for functions to run.

    arrive: called in each process with its rank, before anything else.
    """

    def __init__(
        self,
        size: int,
        directory: Path,
        environment: Mapping[str, str],
        arrive: Callable[[int], None] | None = None,
    ) -> None:
        self.size = size
        self._directory = directory
        self._connections: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(size):
            arguments = (rank, size, directory, dict(environment), arrive)
            process, connection = connected(_serve, *arguments, name=f"rank {rank} of {size}")
            self._connections.append(connection)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call function(*args, **kwargs) on every rank; results by rank, or RanksFailedError with all tracebacks.

        The function is pickled by name, so it must stand at the top of an importable module. A failure ends the world.
        """
        try:
            self.start(function, *args, **kwargs)
            outcomes = self.collect(RUN_TIMEOUT_S, grace_s=GRACE_S)
            if any(outcome.status != "returned" for outcome in outcomes):
                raise RanksFailedError("\n".join(map(str, outcomes)))
        except BaseException:
            self.kill()
            raise
        return [outcome.value for outcome in outcomes]

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Begin function(*args, **kwargs) on every rank, without waiting."""
        task = pickle.dumps((function, args, kwargs))
        for connection in self._connections:
            connection.send_bytes(task)

    def collect(
        self, deadline_s: float, *, ranks: Iterable[int] | None = None, grace_s: float | None = None
    ) -> list[Outcome]:
        """What became of the given ranks (all of them unless told), in their order, within deadline_s seconds.

        With grace_s, a rank that raised or died shortens the deadline of the others to that many seconds from then.
        A rank past its deadline is aborted and leaves the stacks of its threads.
        """
        deadline = time.monotonic() + deadline_s
        outcomes: dict[int, Outcome] = {}
        ranks = list(range(self.size) if ranks is None else ranks)
        pending = {rank: self._connections[rank] for rank in ranks}
        while pending and (ready := wait(pending.values(), max(0.0, deadline - time.monotonic()))):
            for rank in [rank for rank, connection in pending.items() if connection in ready]:
                del pending[rank]
                outcomes[rank] = self._receive(rank)
                if grace_s is not None and outcomes[rank].status != "returned":
                    deadline = min(deadline, time.monotonic() + grace_s)
        for rank in pending:
            outcomes[rank] = self._abort(rank)
        return [outcomes[rank] for rank in ranks]

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        """Let every rank leave by itself; one that does not is killed, and RanksFailedError says so."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + GRACE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        exit_codes = {process.name: process.exitcode for process in self.processes}
        self.kill()
        if any(exit_code != 0 for exit_code in exit_codes.values()):
            raise RanksFailedError(f"exit codes within {GRACE_S} s of being told to leave: {exit_codes}")

    def kill(self) -> None:
        for process, connection in zip(self.processes, self._connections, strict=True):
            process.kill()
            connection.close()
        for process in self.processes:
            process.join()

    def _receive(self, rank: int) -> Outcome:
        try:
            status, value = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self.processes[rank]
            process.join(GRACE_S)
            detail = f"exit code {process.exitcode}\n{self._stacks(rank)}"
            return Outcome(rank, "died", detail=detail, exit_code=process.exitcode)
        return Outcome(rank, status, value) if status == "returned" else Outcome(rank, status, detail=value)

    def _abort(self, rank: int) -> Outcome:
        self.signal(rank, signal.SIGABRT)
        self.signal(rank, signal.SIGCONT)
        self.processes[rank].join(GRACE_S)
        return Outcome(rank, "hung", detail=self._stacks(rank))

    def _stacks(self, rank: int) -> str:
        return _stacks_file(self._directory, rank).read_text(errors="replace")


class Worlds:
    """worlds(size): a world shared by all who ask, started when first asked for and again after it has failed.

    environment: what is set in all their processes. arrive: what each of them calls first, with its rank and the world's folder.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        arrive: Callable[[int, Path], None] | None = None,
    ) -> None:
        self._directory = directory
        self._environment = environment
        self._arrive = arrive
        self._shared: dict[int, World] = {}
        self._made: list[World] = []

    def __call__(self, size: int) -> World:
        if size not in self._shared or not self._shared[size].is_alive():
            self._shared[size] = self.fresh(size)
        return self._shared[size]

    def fresh(self, size: int) -> World:
        """A world of its own, which the caller must kill or close."""
        directory = self._directory / f"world-{len(self._made) + 1}"
        directory.mkdir()
        arrive = self._arrive and partial(self._arrive, folder=directory)
        self._made.append(World(size, directory, self._environment, arrive))
        return self._made[-1]

    def close(self) -> None:
        """Close all shared worlds and raise RanksFailedError if a process of any world made here outlives that."""
        for world in self._shared.values():
            if world.is_alive():
                world.close()
        if left_over := [each for world in self._made for each in world.processes if each.is_alive()]:
            raise RanksFailedError(f"processes left over: {left_over}")


def _serve(
    rank: int,
    size: int,
    directory: Path,
    environment: dict[str, str],
    arrive: Callable[[int], None] | None,
    connection: Connection,
) -> None:
    """The life of a rank: run what comes down the connection until it is closed."""
    gc.freeze()  # what the server had imported; to look through it, at the latest in leaving, would copy all its pages
    os.environ.update(environment)
    if arrive is not None:
        arrive(rank)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with _stacks_file(directory, rank).open("w") as stacks:
        faulthandler.enable(stacks)
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(str(directory / "store"), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S),
        )
        try:
            while True:
                connection.send_bytes(_run(connection.recv_bytes()))
        except EOFError:
            torch.distributed.destroy_process_group()


def _run(task: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(task)
        torch.manual_seed(0)  # the models of all ranks start equal, whatever ran here before
        return pickle.dumps(("returned", function(*args, **kwargs)))
    except (Exception, pytest.fail.Exception):
        return pickle.dumps(("raised", traceback.format_exc()))


def _stacks_file(directory: Path, rank: int) -> Path:
    return directory / f"stacks-{rank}"


def meet(name: str, ranks: Iterable[int] | None = None) -> None:
    """Wait until all ranks, or the given ones, have come here, with a name that is used once in a world.

    It goes through the store, so that a rank may end as soon as it returns: gloo's barrier may still need it then.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"met/{name}/{torch.distributed.get_rank()}", "")
    awaited = range(torch.distributed.get_world_size()) if ranks is None else ranks
    store.wait([f"met/{name}/{rank}" for rank in awaited], timedelta(seconds=RUN_TIMEOUT_S))
