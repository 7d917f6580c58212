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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, Mismatch, PeerLost
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.servers import QuorumLost
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
_APART = re.compile(r"(?:between ranks|no message of rank) (\d+) (?:and|reaches rank) (\d+)")
#: For which a rank that has reported waits for the others, so that no survivor is gone before all have spoken.
TOGETHER_S = 30.0


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


class Life:
    """What a rank knows of itself in a soak: its report, since when it waits, and what it is doing, which a file has for those
    who find it dead or hanging. members: the ranks of the world that take part."""

    def __init__(self, directory: Path, members: tuple[int, ...]) -> None:
        self.rank, self.members, self.directory = dist.get_rank(), members, directory
        self.report, self.waited_since = Report(), time.monotonic()
        self._doing = ""
        self._diary = (directory / f"diary-{self.rank}").open("w")

    def note(self, doing: str) -> None:
        """Replace what was noted before."""
        self._doing = doing
        self._diary.seek(0)
        self._diary.write(doing + "\n")
        self._diary.truncate()
        self._diary.flush()

    def wait(self) -> None:
        """Note that what this rank waits for begins now."""
        self.waited_since = time.monotonic()

    @contextmanager
    def witnessing(self) -> Iterator[None]:
        """Report the error that ends what is done inside."""
        try:
            yield
        except Exception as error:
            self.report.witness = Witness.of(error, self.members, self.waited_since)
            self.report.during = self._doing

    def fail(self) -> None:
        """Note the time of the fault, as its victim."""
        failed_at_file(self.directory).write_text(str(time.monotonic()))

    def end(self, reporting: tuple[int, ...]) -> NoReturn:
        """Report, wait until all of these ranks have, and leave."""
        path = report_file(self.directory, self.rank)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(pickle.dumps(self.report))
        unfinished.rename(path)
        self.note("waiting for the others to report")
        deadline = time.monotonic() + TOGETHER_S
        while not all(report_file(self.directory, rank).exists() for rank in reporting) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.note("leaving")
        leave()


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
    life = Life(directory, session.members)
    life.note("making a group")
    everyone = session.size == dist.get_world_size()
    group = None if everyone else dist.new_group(list(session.members))
    if life.rank not in session.members:
        life.report.done = count
        return life.report
    with life.witnessing():
        life.note("making a Communicator")
        at = session.members.index(life.rank)
        with on_host(session.host_of[at]) if session.host_of else nullcontext():
            comm = Communicator(group, timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=session.segment_bytes)
        with comm:
            _run_operations(session, draw_operations(session, count, algorithms(comm)), comm, life)
            life.note("closing")
        if group is not None:
            dist.destroy_process_group(group)
    return life.report


def _run_operations(session: Session, operations: list[Operation], comm: Communicator, life: Life) -> None:
    exchange = Exchange(session, comm)
    pending: dict[int, Started] = {}

    def finish(position: int) -> None:
        started, operation = pending.pop(position), operations[position]
        life.note(f"operation {position}: waiting for {operation}")
        started.work.wait()
        check(started, position, operation, life.report)

    for position, operation in enumerate(operations):
        life.note(f"operation {position}: {operation}")
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
    life, session = Life(directory, fault.everyone), fault.session
    life.note("making Communicators")
    with on_host(fault.host_of[life.rank]) if fault.host_of else nullcontext():
        comms = [
            Communicator(timeout_s=fault.timeout_s, segment_bytes=fault.segment_bytes)
            for _ in range(fault.communicators)
        ]
    dist.barrier()  # all have theirs, so that none is lost in the making
    operations = draw_operations(session, SESSION_OPERATIONS, algorithms(comms[0]))
    exchange = Exchange(session, comms[0])
    life.wait()
    with life.witnessing():
        for position, operation in enumerate(operations):
            if position == fault.position:
                burst = _until_the_fault(fault, exchange, victim=life.rank == fault.victim)
                life.wait()
                if life.rank == fault.victim:
                    life.note(f"failing: {fault.kind}")
                    life.fail()
                    if fault.kind not in NETWORK_KINDS:
                        _fail(fault, comms)
                        break
                    _disturb(fault, network)
                    life.wait()
                for number, started in enumerate(burst, 1):
                    life.note(f"large operation before operation {position}: {fault.large}")
                    started.work.wait()
                    # At a negative position, to compare with nothing but the same one elsewhere.
                    check(started, -number, fault.large, life.report)
            life.wait()
            life.note(f"operation {position}: {operation}")
            check(exchange.start(position, operation, asynchronous=False), position, operation, life.report)
    if fault.survivors_close:
        life.note("closing after the error")
        for comm in comms:
            comm.close()
    life.end(fault.reporting)


def _until_the_fault(fault: Fault, exchange: Exchange, *, victim: bool) -> list[Started]:
    """What goes on when the victim fails; returns in it at the moment of the fault, in the others at once, or when they wake."""
    works = BURST if fault.phase == MIDDLE else 1 if fault.phase == IDLE else 0
    burst = [exchange.start(fault.position, fault.large, asynchronous=True) for _ in range(works)]
    if fault.phase == IDLE:
        for started in burst:
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
