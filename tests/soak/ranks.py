"""What a rank does in a soak, and what it reports: a session of drawn operations, or a world in which one rank fails."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from gradwire import QuorumLost
from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, Mismatch, PeerLost
from gradwire.collectives.plan.algorithms import PLANNERS
from tests.harness import EXCHANGE_TIMEOUT_S
from tests.ranks.exact import Checks, on_host
from tests.soak.exchange import Exchange, Started, digest
from tests.soak.faults import (
    BURST,
    CLOSES,
    DISAGREES,
    EXIT_CODES,
    FLAPS,
    IDLE,
    IDLE_S,
    KILLED,
    MIDDLE,
    NETWORK_KINDS,
    SILENT,
    STOPPED,
    STRANGERS,
    Fault,
)
from tests.soak.network import Network
from tests.soak.operations import SESSION_OPERATIONS, Operation, Session, draw_operations

POLL_S = 0.01
_APART = re.compile(r"(?:between ranks|nothing that rank) (\d+) (?:and|sends reaches rank) (\d+)")
TOGETHER_S = (
    30.0  # for which a rank that has reported waits for the others, so that no survivor is gone before all have spoken
)


@dataclass(frozen=True)
class Witness:
    """An error that a rank got. blamed: the ranks that it names as lost or silent; calls: what it says that each called; apart:
    pairs of ranks between which it says that a connection fails, and blames neither.

    waited_since and raised: time.monotonic(), which is the same for all processes of a machine.
    """

    kind: str
    text: str
    blamed: tuple[int, ...]
    calls: tuple[int, ...]
    waited_since: float
    raised: float
    apart: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, error: Exception, members: tuple[int, ...], waited_since: float) -> Witness:
        """members: the ranks in the world of those that the error speaks of.

        Where an earlier operation broke the Communicator, that one's error counts: an asynchronous one may fail unwaited for.
        """
        while type(error) is CollectiveError and isinstance(error.__cause__, CollectiveError):
            error = error.__cause__
        blamed = error.ranks if isinstance(error, CollectiveError) else ()
        calls = tuple(error.calls) if isinstance(error, Mismatch) else ()
        tells = isinstance(error, PeerLost | QuorumLost | CollectiveTimeout | Mismatch)
        text = str(error) if tells else "".join(traceback.format_exception(error))
        return cls(
            type(error).__name__,
            text,
            tuple(members[rank] for rank in blamed),
            tuple(members[rank] for rank in calls),
            waited_since,
            time.monotonic(),
            tuple((members[int(one)], members[int(other)]) for one, other in _APART.findall(str(error))),
        )


@dataclass
class Report:
    """What a rank did and saw. digests: by position of an operation, of what all ranks must have alike. during: what it was
    doing when it got the error."""

    done: int = 0
    wrong: list[str] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    witness: Witness | None = None
    during: str = ""


class Diary:
    """A file that says what a rank is doing, for those who find it dead or hanging."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def note(self, text: str) -> None:
        """Replace what was noted before."""
        self._file.seek(0)
        self._file.write(text + "\n")
        self._file.truncate()
        self._file.flush()


def diary_file(directory: Path, rank: int) -> Path:
    return directory / f"diary-{rank}"


def report_file(directory: Path, rank: int) -> Path:
    return directory / f"report-{rank}"


def failed_at_file(directory: Path) -> Path:
    """The time.monotonic() of the fault."""
    return directory / "failed-at"


def leave(code: int = 0) -> NoReturn:
    """End the process as the end of a script does: exit handlers, destructors and all, which a fork's own end leaves out."""
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("Py_Exit came back")


def algorithms(comm: Communicator) -> dict[str, tuple[str, ...]]:
    return {collective: comm.algorithms(collective) for collective in PLANNERS}


def run_session(session: Session, count: int, directory: Path) -> Report:
    """The first `count` operations of a session on a fresh Communicator, each checked. A collective call of the whole world."""
    rank, report = dist.get_rank(), Report()
    diary = Diary(diary_file(directory, rank))
    diary.note("making a group")
    everyone = session.size == dist.get_world_size()
    group = None if everyone else dist.new_group(list(session.members))
    if rank not in session.members:
        report.done = count
        return report
    began = time.monotonic()
    try:
        diary.note("making a Communicator")
        at = session.members.index(rank)
        with on_host(session.host_of[at]) if session.host_of else nullcontext():
            comm = Communicator(group, timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=session.segment_bytes)
        with comm:
            _run_operations(session, draw_operations(session, count, algorithms(comm)), comm, report, diary)
            diary.note("closing")
        if group is not None:
            dist.destroy_process_group(group)
    except Exception as error:
        report.witness = Witness.of(error, session.members, began)
        report.during = diary_file(directory, rank).read_text().strip()
    return report


def _run_operations(
    session: Session, operations: list[Operation], comm: Communicator, report: Report, diary: Diary
) -> None:
    exchange = Exchange(session, comm)
    pending: dict[int, Started] = {}

    def finish(position: int) -> None:
        started, operation = pending.pop(position), operations[position]
        if started.work is not None:
            diary.note(f"operation {position}: waiting for {operation}")
            started.work.wait()
        check(started, position, operation, report)

    for position, operation in enumerate(operations):
        diary.note(f"operation {position}: {operation}")
        pending[position] = exchange.start(position, operation, asynchronous=operation.asynchronous)
        for waiting in operation.waits if operation.asynchronous else (position, *operation.waits):
            finish(waiting)
    for position in session.random("last").sample(list(pending), len(pending)):
        finish(position)


def check(started: Started, position: int, operation: Operation, report: Report) -> None:
    """Add what is wrong with a finished operation to the report."""
    checks = Checks()
    with checks.case(position=position, operation=operation):
        started.check(checks)
    report.wrong += checks.failures
    if started.replicas:
        report.digests[position] = digest(started.replicas)
    report.done += 1


# A world in which one rank fails


def suffer(fault: Fault, address: str, network: Network | None, directory: Path) -> NoReturn:
    """Exchange until the fault, and on until an error tells of it; then report, close or not, wait for the others, and leave.

    address: of rank 0. network: between simulated hosts.
    """
    if fault.kind == STRANGERS and dist.get_rank() == fault.victim:
        assert network is not None
        network.let_strangers_in(fault.hosts)  # sooner than the rest, as ranks listen only while they connect
    if fault.store_of_rank_0:
        meet_at_rank_0(address, directory)
    rank, session, report = dist.get_rank(), fault.session, Report()
    diary = Diary(diary_file(directory, rank))
    diary.note("making Communicators")
    with on_host(fault.host_of[rank]) if fault.host_of else nullcontext():
        comms = [
            Communicator(timeout_s=fault.timeout_s, segment_bytes=fault.segment_bytes)
            for _ in range(fault.communicators)
        ]
    dist.barrier()  # all have theirs, so that none is lost in the making
    operations = draw_operations(session, SESSION_OPERATIONS, algorithms(comms[0]))
    exchange = Exchange(session, comms[0])
    waited_since = time.monotonic()
    try:
        for position, operation in enumerate(operations):
            if position == fault.position:
                burst = _until_the_fault(fault, exchange, victim=rank == fault.victim)
                if rank == fault.victim:
                    diary.note(f"failing: {fault.kind}")
                    failed_at_file(directory).write_text(str(time.monotonic()))
                    waited_since = time.monotonic()
                    if fault.kind not in NETWORK_KINDS:
                        _fail(fault, comms)
                        break
                    _disturb(fault, network)
                waited_since = time.monotonic()
                for number, started in enumerate(burst):
                    diary.note(f"large operation before operation {position}: {fault.large}")
                    assert started.work is not None
                    started.work.wait()
                    check(
                        started, -1 - number, fault.large, report
                    )  # to compare with nothing but the same one elsewhere
            waited_since = time.monotonic()
            diary.note(f"operation {position}: {operation}")
            check(exchange.start(position, operation, asynchronous=False), position, operation, report)
    except Exception as error:
        report.witness = Witness.of(error, session.members, waited_since)
        report.during = diary_file(directory, rank).read_text().strip()
    if fault.survivors_close:
        diary.note("closing after the error")
        for comm in comms:
            comm.close()
    write(report_file(directory, rank), report)
    diary.note("waiting for the others to report")
    wait_for_reports(directory, fault.reporting)
    diary.note("leaving")
    leave()


def _until_the_fault(fault: Fault, exchange: Exchange, *, victim: bool) -> list[Started]:
    """What goes on when the victim fails; returns in it at the moment of the fault, in the others at once, or when they wake."""
    works = BURST if fault.phase == MIDDLE else 1 if fault.phase == IDLE else 0
    burst = [exchange.start(fault.position, fault.large, asynchronous=True) for _ in range(works)]
    if fault.phase == IDLE:
        for started in burst:
            assert started.work is not None
            started.work.wait()
        burst = []
        time.sleep(fault.after_s if victim else IDLE_S)
    elif victim:
        time.sleep(fault.after_s)
    return burst


def _fail(fault: Fault, comms: list[Communicator]) -> None:
    """Returns, or raises, only in a rank that lives on."""
    if fault.kind == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == STOPPED:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == DISAGREES:
        comms[0].allreduce(torch.ones(1009, dtype=torch.int16), "max")
        raise AssertionError("a call that no other rank made came to an end")
    if fault.kind == CLOSES or fault.in_a_block:
        for comm in comms:
            comm.close()
    if fault.kind != CLOSES:
        leave(EXIT_CODES[fault.kind])


def _disturb(fault: Fault, network: Network | None) -> None:
    """Do to the network of the victim's host what the fault says."""
    assert network is not None
    host = fault.hosts_of_ranks[fault.victim]
    if fault.kind in SILENT:
        network.cut(host, fault.way)
    elif fault.kind == FLAPS:
        network.flap(host, fault.way, fault.outages, fault.outage_s)


def meet_at_rank_0(address: str, directory: Path) -> None:
    """As torchrun's ranks do: the store is a thread of rank 0, and ends with it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    port = dist.FileStore(str(directory / "port"), size)
    dist.barrier()
    port.set(f"connected/{rank}", "")
    port.wait([f"connected/{each}" for each in range(size)])  # who closes sooner breaks what another still connects
    dist.destroy_process_group()
    store = None
    if rank == 0:
        store = dist.TCPStore(address, 0, size, is_master=True, wait_for_workers=False)
        port.set("port", str(store.port))
    store = store or dist.TCPStore(address, int(port.get("port")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def write(path: Path, report: Report) -> None:
    """All of it or nothing."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(report))
    unfinished.rename(path)


def wait_for_reports(directory: Path, ranks: tuple[int, ...]) -> None:
    deadline = time.monotonic() + TOGETHER_S
    while not all(report_file(directory, rank).exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
