"""A rank that fails while ranks meet: in init(), or while they make a Communicator; drawn from a seed and an index alone."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.trainer.world import meeting
from tests.ports import unused_port
from tests.soak.faults import KILLED, STOPPED, FaultOfOne
from tests.soak.ranks import Life, failed_at_file, leave, meet_at_rank_0

INIT, COMMUNICATOR = PLACES = ("init()", "Communicator()")
NO_THREADS, NO_DESCRIPTORS = UNABLE = ("cannot start threads", "has no descriptors left")
RAISES = "raises an exception"
KINDS = (KILLED, STOPPED, RAISES, *UNABLE)

TIMEOUT_S = 3.0  # of what may run into it
FAR_S = 20.0  # of what must not
FEW_CALLS, MOST_CALLS = 150, 800  # that a rank makes of functions of ours until it has arrived, and until all have met
_PACKAGES = (f"{os.sep}collectives{os.sep}", f"{os.sep}trainer{os.sep}")


@dataclass(frozen=True)
class MeetingFault(FaultOfOne):
    """A fault of ranks that meet at a place, at one of the victim's own calls of a function of ours: the position-th. Where it
    makes fewer, it fails when the ranks have met."""

    place: str
    position: int

    @property
    def timeout_s(self) -> float:
        return TIMEOUT_S if self.kind == STOPPED else FAR_S

    @property
    def exit_code(self) -> int:
        return -9 if self.kind == KILLED else 1

    def __str__(self) -> str:
        return f"rank {self.victim} of {self.size} {self.kind} at call {self.position} of {self.place}"


def draw_meeting_fault(seed: int, transport: str, index: int) -> MeetingFault:
    """Draw a fault. Of few calls, early ones are drawn as often as of all together."""
    random = Random(f"{seed}/{transport}/meeting/{index}")
    size = random.randint(2, 4)
    return MeetingFault(
        seed=seed,
        transport=transport,
        index=index,
        size=size,
        victim=random.randrange(size),
        kind=random.choice((KILLED, KILLED, *KINDS)),
        place=random.choice(PLACES),
        position=random.randint(1, random.choice((FEW_CALLS, MOST_CALLS, MOST_CALLS))),
    )


def arrived_file(directory: Path) -> Path:
    """Return what is there if the victim had arrived before it failed."""
    return directory / "arrived"


def _reached_file(directory: Path, rank: int) -> Path:
    """Return what is there once a rank has reached the store of the meeting point."""
    return directory / f"reached-{rank}"


def is_known_at_once(fault: MeetingFault, directory: Path) -> bool:
    """Return whether the others could know at once that the victim failed: it had arrived, or cannot start threads and arrives to
    say so, or has begun to make a Communicator and raises an exception; and where the store and the coordinator ended with it,
    as those of rank 0 do, they had reached these before."""
    keeps_all = fault.place == INIT and fault.victim == 0
    reached = all(_reached_file(directory, rank).exists() for rank in fault.survivors)
    arrived = arrived_file(directory).exists() or fault.kind == NO_THREADS
    return arrived and (reached or not keeps_all)


def come_together(fault: MeetingFault, directory: Path) -> NoReturn:
    """Meet the others and exchange until the fault; then report, close, wait for the others' reports, and leave."""
    in_init, rank = fault.place == INIT, dist.get_rank()
    life = Life(directory, fault.everyone)
    if in_init:
        prepare_init(f"{fault.seed}/{fault.transport}/{fault.index}", rank, fault.size, directory)
    elif fault.index % 2:
        meet_at_rank_0("127.0.0.1", directory)
    is_victim = rank == fault.victim
    if is_victim:
        sys.setprofile(_Trap(fault, directory))
    elif in_init:
        _note_reaching(directory, rank)
    life.note(fault.place)
    life.wait()
    closing: list[Callable[[], None]] = [hvd.shutdown]
    with life.witnessing():
        if in_init:
            hvd.init(timeout_s=fault.timeout_s)
            barrier: Callable[[], object] = hvd.barrier
        else:
            communicator = Communicator(timeout_s=fault.timeout_s)
            closing.append(communicator.close)
            barrier = communicator.barrier
        if is_victim:
            sys.setprofile(None)
            _note(directory, arrived=True)
            _fail(fault, after_meeting=True)
        while True:
            barrier()
    if is_victim:
        leave(1)
    for close in closing:
        close()
    life.end(fault.survivors)


def _note_reaching(directory: Path, rank: int) -> None:
    connect = meeting._store

    def connect_and_note(*args: Any, **kwargs: Any) -> Any:
        store = connect(*args, **kwargs)
        _reached_file(directory, rank).touch()
        return store

    meeting._store = connect_and_note


class _Trap:
    """Counts calls of functions of ours, as sys.setprofile() reports them, and fails at one."""

    def __init__(self, fault: MeetingFault, directory: Path) -> None:
        self._fault = fault
        self._directory = directory
        self._calls = 0
        self._has_arrived = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not any(package in frame.f_code.co_filename for package in _PACKAGES):
            return
        arrivals = ("await_all", "_check_arguments") if self._fault.kind == RAISES else ("await_all",)
        self._has_arrived |= frame.f_code.co_name in arrivals
        self._calls += 1
        if self._calls == self._fault.position:
            sys.setprofile(None)
            _note(self._directory, self._has_arrived)
            _fail(self._fault, after_meeting=False)


def _note(directory: Path, arrived: bool) -> None:
    if not failed_at_file(directory).exists():
        failed_at_file(directory).write_text(str(time.monotonic()))
        if arrived:
            arrived_file(directory).touch()


def _fail(fault: MeetingFault, *, after_meeting: bool) -> None:
    if fault.kind == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == STOPPED:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif after_meeting:
        leave(1)
    elif fault.kind == RAISES:
        raise ArithmeticError("planted")
    elif fault.kind == NO_THREADS:
        threading.Thread.start = _cannot_start  # type: ignore[method-assign]
    else:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(map(int, os.listdir("/proc/self/fd"))), most))
        with suppress(OSError):
            while True:
                os.dup(2)


def _cannot_start(_: threading.Thread) -> NoReturn:
    raise RuntimeError("can't start new thread")


def prepare_init(run: str, rank: int, size: int, directory: Path) -> None:
    """Leave torch.distributed, and set what a launcher does. run: what it calls the job."""
    store = dist.FileStore(str(directory / "meeting-point"), size)
    if rank == 0:
        store.set("port", str(unused_port()))
    port = store.get("port").decode()
    store.set(f"ready/{rank}", "")
    store.wait([f"ready/{each}" for each in range(size)])
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": run}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
