"""A soak: `python -m tests.soak` runs random operations and random faults, of collectives and of training, and ends with 1 where
anything fell short.

All ranks draw the same operations from one seed; a finding is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table

from gradwire.bench.hosts import HostsError
from tests.harness import GRACE_S, TRANSPORTS, Outcome, World
from tests.soak.faults import KINDS, NETWORK_KINDS, STOPPED, Fault, FaultOfOne, draw_fault
from tests.soak.meetings import KINDS as MEETING_KINDS
from tests.soak.meetings import MeetingFault, come_together, draw_meeting_fault, is_known_at_once
from tests.soak.network import Network
from tests.soak.operations import SESSION_OPERATIONS, draw_session
from tests.soak.places import NAMESPACES, Place, place
from tests.soak.ranks import Report, failed_at_file, leave, report_file, run_session, suffer
from tests.soak.rules import KINDS as TRAINING_KINDS
from tests.soak.rules import RULES, TIMEOUT_S, TrainingFault, draw_training_fault
from tests.soak.training import train
from tests.soak.verdict import Finding, Kind, judge_fault, judge_meeting, judge_session, news_s

WORLD_SESSIONS = 25  # that a world lives for
SESSION_DEADLINE_S = 180.0
FAULT_DEADLINE_S = 90.0
SOON_S = 2.0  # in which survivors of a lost rank are to be told
TRAINING_DEADLINE_S = 300.0  # torch's optimizers take long to load and to end where cores are scarce
LEAVE_S = 30.0  # an interpreter that has loaded torch and Numba takes seconds to end where cores are scarce
PROGRESS_S = 15.0
STDERR_CHARACTERS = 1500
WIDTH = 110  # of the table, where nobody looks on


@dataclass
class Tally:
    """Counts what has been done on one transport, and what was found.

    news_s: by the kind of a fault, how long each took to be heard of, None where somebody did not hear of it. training_s: the
    same of training, by rule and kind, where the others were to be told; outlived: where they were to go on. meeting_s: the same
    of ranks that failed while ranks met, by kind and whether they had arrived. counts: of all findings; training_findings: how
    many of them training had. limitation: why nothing could be.
    """

    transport: str
    operations: int = 0
    news_s: dict[str, list[float | None]] = field(default_factory=dict)
    training_s: dict[tuple[str, str], list[float | None]] = field(default_factory=dict)
    outlived: Counter[tuple[str, str]] = field(default_factory=Counter)
    meeting_s: dict[tuple[str, bool], list[float | None]] = field(default_factory=dict)
    counts: Counter[Kind] = field(default_factory=Counter)
    training_findings: int = 0
    limitation: str = ""

    @property
    def faults(self) -> int:
        in_meetings = sum(map(len, self.meeting_s.values()))
        return sum(map(len, self.news_s.values())) + self.faults_of_training + in_meetings

    @property
    def faults_of_training(self) -> int:
        return sum(map(len, self.training_s.values())) + self.outlived.total()


@dataclass
class _Running:
    """A world with a fault, since a time.monotonic(), for deadline_s at most. judge: told at its end of the fault, the outcomes,
    the reports, the time of the fault, and the directory."""

    fault: FaultOfOne
    world: World
    directory: Path
    deadline_s: float
    judge: Callable[..., None]
    started: float = field(default_factory=time.monotonic)


class Soak:
    """Runs sessions and faults in one place, and prints what it finds."""

    def __init__(self, where: Place, seed: int, ranks: int, console: Console) -> None:
        self.tally = Tally(where.transport)
        self._place, self._seed, self._ranks, self._console = where, seed, ranks, console
        self._printed = self._began = time.monotonic()

    def run_operations(self, start: int, operations: int) -> None:
        """start: the first session."""
        current: tuple[World, Path] | None = None
        sessions = -(-operations // SESSION_OPERATIONS)
        for index in range(start, start + sessions):
            if current is not None and index % WORLD_SESSIONS == 0:
                self._end(*current)
                current = None
            hosts = random.Random(f"{self._seed}/{index // WORLD_SESSIONS}").randint(2, max(2, self._ranks))
            current = current or self._place.world(self._ranks, hosts)[:2]
            world, directory = current
            count = min(SESSION_OPERATIONS, operations - (index - start) * SESSION_OPERATIONS)
            pretend = not self._place.on_hosts
            session = draw_session(self._seed, self._place.transport, index, self._ranks, pretend_hosts=pretend)
            world.start(run_session, session, count, directory)
            outcomes = world.collect(SESSION_DEADLINE_S, grace_s=GRACE_S)
            found = judge_session(session.members, outcomes)
            self.tally.operations += max((o.value.done for o in outcomes if isinstance(o.value, Report)), default=0)
            self._tell(found, f"session {index}: {session}", _again(index, operations=count), directory)
            if found:
                world.kill()
                current = None
            self._progress(f"{self.tally.operations} of {operations} operations")
        if current is not None:
            self._end(*current)

    def run_faults(self, start: int, faults: int) -> None:
        """start: the first fault."""

        def begin(fault: Fault) -> _Running:
            world, directory, network = self._place.world(fault.size, fault.hosts)
            world.start(suffer, fault, self._place.address, network, directory)
            return _Running(fault, world, directory, FAULT_DEADLINE_S, partial(self._judge, network))

        self._run(partial(draw_fault, on_hosts=self._place.on_hosts), begin, start, faults)

    def run_meetings(self, start: int, faults: int) -> None:
        """start: the first fault of ranks that meet."""
        self._run(
            draw_meeting_fault, self._on_one_host(come_together, FAULT_DEADLINE_S, self._judge_meeting), start, faults
        )

    def run_training(self, start: int, faults: int) -> None:
        """start: the first fault of training."""
        self._run(
            draw_training_fault, self._on_one_host(train, TRAINING_DEADLINE_S, self._judge_training), start, faults
        )

    def _on_one_host(
        self, function: Callable[[Any, Path], NoReturn], deadline_s: float, judge: Callable[..., None]
    ) -> Callable[[Any], _Running]:
        def begin(fault: Any) -> _Running:
            world, directory, _ = self._place.world(fault.size, 1)
            world.start(function, fault, directory)
            return _Running(fault, world, directory, deadline_s, judge)

        return begin

    def _run(self, draw: Callable[..., Any], begin: Callable[[Any], _Running], start: int, faults: int) -> None:
        """Draw faults, from the start-th on, begin their worlds, and judge them. worlds_at_a_time of the place live at the same
        time."""
        running: deque[_Running] = deque()
        before = self.tally.faults
        for index in range(start, start + faults):
            running.append(begin(draw(self._seed, self._place.transport, index)))
            if len(running) == self._place.worlds_at_a_time:
                self._end_of(running.popleft())
            self._progress(f"{self.tally.faults - before} of {faults} faults")
        while running:
            self._end_of(running.popleft())

    def _end_of(self, running: _Running) -> None:
        """Wait for the end of a world with a fault, and have it judged."""
        fault, world, directory = running.fault, running.world, running.directory
        left_s = max(0.0, running.started + running.deadline_s - time.monotonic())
        outcomes = world.collect(left_s, ranks=fault.survivors)
        if fault.kind != STOPPED:
            outcomes += world.collect(LEAVE_S, ranks=[fault.victim])
        world.kill()
        files = {rank: report_file(directory, rank) for rank in fault.everyone}
        reports = {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}
        failed_at = float(failed_at_file(directory).read_text()) if failed_at_file(directory).exists() else None
        running.judge(fault, outcomes, reports, failed_at, directory)

    def _judge(
        self,
        network: Network | None,
        fault: Fault,
        outcomes: Sequence[Outcome],
        reports: dict[int, Report],
        failed_at: float | None,
        directory: Path,
    ) -> None:
        if network is not None and fault.kind in NETWORK_KINDS:
            network.mend(fault.hosts_of_ranks[fault.victim])
        self.tally.news_s.setdefault(fault.kind, []).append(news_s(fault, reports, failed_at))
        self._tell_of(fault, judge_fault(fault, outcomes, reports, failed_at), directory, "", "faults")

    def _judge_meeting(
        self,
        fault: MeetingFault,
        outcomes: Sequence[Outcome],
        reports: dict[int, Report],
        failed_at: float | None,
        directory: Path,
    ) -> None:
        arrived = is_known_at_once(fault, directory)
        raised = [report.witness.raised for report in reports.values() if report.witness is not None]
        told = failed_at is not None and len(raised) == len(fault.survivors)
        news = max(raised) - failed_at if failed_at is not None and told else None
        self.tally.meeting_s.setdefault((fault.kind, arrived), []).append(news)
        found = judge_meeting(fault, outcomes, reports, failed_at, arrived)
        self._tell_of(fault, found, directory, " of meeting", "meetings")

    def _judge_training(
        self,
        fault: TrainingFault,
        outcomes: Sequence[Outcome],
        reports: dict[int, Report],
        failed_at: float | None,
        directory: Path,
    ) -> None:
        rule_and_kind = fault.rule.name, fault.kind
        if fault.is_outlived:
            self.tally.outlived[rule_and_kind] += 1
        else:
            self.tally.training_s.setdefault(rule_and_kind, []).append(news_s(fault, reports, failed_at))
        found = judge_fault(fault, outcomes, reports, failed_at)
        self.tally.training_findings += len(found)
        self._tell_of(fault, found, directory, " of training", "training")

    def _tell_of(self, fault: FaultOfOne, found: Sequence[Finding], directory: Path, of: str, option: str) -> None:
        """option: the one that says how many such faults there are."""
        self._tell(found, f"fault {fault.index}{of}: {fault}", _again(fault.index, **{option: 1}), directory)

    def _end(self, world: World, directory: Path) -> None:
        """Let the ranks of a world leave as scripts do."""
        world.start(leave)
        for outcome in world.collect(LEAVE_S):
            if outcome.exit_code != 0:
                kind = Kind.HANG if outcome.status == "hung" else Kind.ABORT
                found = [Finding(kind, f"leaving: {outcome}")]
                self._tell(found, f"the end of {directory.name}", "(all operations up to here)", directory)
        world.kill()

    def _tell(self, found: Sequence[Finding], what: str, again: str, directory: Path) -> None:
        """Count and print findings, if there are any. again: the options that repeat them, besides those of this run."""
        if not found:
            return
        self.tally.counts.update(finding.kind for finding in found)
        command = f"python -m tests.soak --seed {self._seed} --ranks {self._ranks} --transport {self._place.transport}"
        self._write(f"FOUND on {self._place.transport}, {what}\n  again: {command} {again}")
        for finding in found:
            self._write(f"  {finding.kind.value}: {finding.text}")
        if any(finding.kind in (Kind.HANG, Kind.ABORT) for finding in found):
            for path in sorted((*directory.glob("diary-*"), *directory.glob("stderr-*"))):
                lines = path.read_text(errors="replace").splitlines()
                if text := "\n".join(line for line in lines if line and not line.startswith("frame #")):
                    self._write(f"  {path.name}: {text[-STDERR_CHARACTERS:]}")

    def _write(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _progress(self, done: str) -> None:
        if time.monotonic() - self._printed > PROGRESS_S:
            self._printed = time.monotonic()
            findings = self.tally.counts.total()
            self._write(f"{self._place.transport}: {done}, {findings} findings, {self._printed - self._began:.0f} s")


def _again(start: int, **counts: int) -> str:
    """Return the options that repeat one session or fault. counts: by the option's name; of what is not named, none."""
    options = {"start": start, **dict.fromkeys(("operations", "faults", "training", "meetings"), 0), **counts}
    return " ".join(f"--{name} {value}" for name, value in options.items())


def table(tallies: Sequence[Tally]) -> Table:
    """A row for each transport."""
    drawn = Table(box=box.SIMPLE, padding=0)
    for heading in ("transport", "operations", "faults", *(kind.value for kind in Kind)):
        drawn.add_column(heading.replace(" ", "\n"), justify="left" if heading == "transport" else "right")
    for tally in tallies:
        name = f"{tally.transport} (not run: {tally.limitation})" if tally.limitation else tally.transport
        counts = [str(tally.counts[kind]) for kind in Kind]
        drawn.add_row(name, str(tally.operations), str(tally.faults), *counts)
    return drawn


def _table(heading: str, tallies: Sequence[Tally], names: dict[str, Any], cell: Callable[[Tally, Any], str]) -> Table:
    """Draw a table with a column for each transport. names: of the rows, with what a cell is told of each."""
    drawn = Table(box=box.SIMPLE, padding=0)
    drawn.add_column(heading)
    for tally in tallies:
        drawn.add_column(tally.transport, justify="right")
    for name, key in names.items():
        drawn.add_row(name, *(cell(tally, key) for tally in tallies))
    return drawn


def fault_table(tallies: Sequence[Tally]) -> Table:
    """A row for each kind of fault: on each transport how many there were, the slowest news of one, and of how many somebody was
    not told."""
    names = {kind: kind for kind in (*KINDS, *NETWORK_KINDS)}
    cell = lambda tally, kind: _cell(tally.news_s.get(kind, []), max)  # noqa: E731
    return _table("number, and\nslowest news, s", tallies, names, cell)


def training_table(tallies: Sequence[Tally]) -> Table:
    """A row for each rule and kind of fault: on each transport how many of them were to be told, the median and the slowest news
    of one, and of how many somebody was not told; and how many the others were to outlive."""

    def cell(tally: Tally, key: tuple[str, str]) -> str:
        news, outlived = _cell(tally.training_s.get(key, []), median, max), tally.outlived[key]
        return "; ".join(part for part in (news, str(outlived) if outlived else "") if part)

    names = {", ".join(key): key for key in product(RULES, TRAINING_KINDS)}
    return _table("told, median and\nslowest news, s; outlived", tallies, names, cell)


def meeting_table(tallies: Sequence[Tally]) -> Table:
    """A row for each kind of fault while ranks meet, of ranks that had arrived and of those that had not, of which the others
    only know at their deadline: how many, the median and the slowest news of one, and of how many somebody was not told."""
    keys = product(MEETING_KINDS, (True, False))
    names = {f"{kind}, {'after' if arrived else 'before'} its arrival": (kind, arrived) for kind, arrived in keys}
    cell = lambda tally, key: _cell(tally.meeting_s.get(key, []), median, max)  # noqa: E731
    return _table("while ranks meet:\nmedian and slowest news, s", tallies, names, cell)


def training_line(tallies: Sequence[Tally]) -> str:
    """Return, in words, how soon the survivors of all faults of training were told: of ranks that ended, and of those that
    stopped, whose silence is only known by the deadline of an operation."""
    lost: list[float | None] = []
    stopped: list[float | None] = []
    for tally in tallies:
        for (_, kind), news in tally.training_s.items():
            (stopped if kind == STOPPED else lost).extend(news)
    faults, findings, outlived = (
        sum(counts)
        for counts in zip(
            *((t.faults_of_training, t.training_findings, t.outlived.total()) for t in tallies), strict=True
        )
    )
    said = f"{faults} faults of training; {findings} findings; {outlived} outlived"
    if lost:
        soon = sum(news <= SOON_S for news in _told(lost))
        said += (
            f"; {soon} of {len(lost)} lost ranks told within {SOON_S:g} s ({soon / len(lost):.1%}; {_summary(lost)})"
        )
    if stopped:
        told = f"{len(_told(stopped))} of {len(stopped)} stopped ranks told at a deadline of {TIMEOUT_S:g} s"
        said += f"; {told} ({_summary(stopped)})"
    return said


def _told(news: Sequence[float | None]) -> list[float]:
    return [seconds for seconds in news if seconds is not None]


def _summary(news: Sequence[float | None]) -> str:
    """Return the median and the slowest of news, and how many faults somebody was not told of."""
    told = _told(news)
    times = [f"median {median(told):.2f}, worst {max(told):.2f} s"] if told else []
    return ", ".join(times + _untold(news))


def _cell(news: Sequence[float | None], *statistics: Callable[[list[float]], float]) -> str:
    """Return how many faults there were, statistics of their news, and how many somebody was not told of."""
    told = _told(news)
    numbers = f"{len(news)} " + "".join(f" {statistic(told):5.2f}" for statistic in statistics if told)
    return ", ".join([numbers, *_untold(news)]) if news else ""


def _untold(news: Sequence[float | None]) -> list[str]:
    untold = len(news) - len(_told(news))
    return [f"{untold} not told"] if untold else []


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seed", type=int, help="of everything that is drawn (default: another one each time)")
    for name, default, what in (
        ("operations", 20_000, "on each transport"),
        ("faults", 400, "on all transports together"),
        ("meetings", 100, "faults while ranks meet, on all transports together"),
        ("training", 200, "faults of ranks that train, on all transports together"),
        ("ranks", 3, "that exchange; faults have 2 to 4"),
        ("start", 0, "the first session, and the first fault"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--transport", choices=(*TRANSPORTS, NAMESPACES, "all"), default="all")
    chosen = parser.parse_args(arguments)
    if chosen.ranks < 1 or min(chosen.operations, chosen.faults, chosen.meetings, chosen.training, chosen.start) < 0:
        parser.error("--ranks must be positive; the others must not be negative")
    return chosen


def main(arguments: Sequence[str]) -> int:
    chosen = parse_arguments(arguments)
    seed = random.SystemRandom().getrandbits(32) if chosen.seed is None else chosen.seed
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(
        f"seed {seed}: {chosen.operations} operations on each transport, {chosen.faults} faults in all, {chosen.meetings} while "
        f"ranks meet, {chosen.training} of training"
    )
    transports = [*TRANSPORTS, NAMESPACES] if chosen.transport == "all" else [chosen.transport]
    tallies = []
    for number, transport in enumerate(transports):
        faults = _share(chosen.faults, len(transports), number)
        on_this_machine = len([name for name in transports if name in TRANSPORTS])
        training = _share(chosen.training, on_this_machine, number)
        meetings = _share(chosen.meetings, on_this_machine, number)
        with tempfile.TemporaryDirectory(prefix="gradwire-soak-", ignore_cleanup_errors=True) as directory:
            try:
                with place(transport, Path(directory)) as where:
                    soak = Soak(where, seed, chosen.ranks, console)
                    tallies.append(soak.tally)
                    soak.run_operations(chosen.start, chosen.operations)
                    soak.run_faults(chosen.start, faults)
                    if transport in TRANSPORTS:
                        soak.run_meetings(chosen.start, meetings)
                        soak.run_training(chosen.start, training)
            except HostsError as error:
                tallies.append(Tally(transport, limitation=str(error)))
    console.print(table(tallies), fault_table(tallies), meeting_table(tallies), training_table(tallies))
    console.print(training_line(tallies), markup=False, highlight=False, soft_wrap=True)
    return int(any(tally.counts for tally in tallies) or all(tally.limitation for tally in tallies))


def _share(total: int, parts: int, number: int) -> int:
    """How many of a total the part of a number gets."""
    return 0 if number >= parts else total // parts + (number < total % parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
