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
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from gradwire.bench.hosts import HostsError
from tests.harness import GRACE_S, TRANSPORTS, Outcome, World
from tests.soak.faults import KINDS, NETWORK_KINDS, STOPPED, Fault, draw_fault
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

#: What ranks do when one of them fails: exchange, meet, or train. Each is the option that says how many such faults there are.
FAULTS, MEETINGS, TRAINING = "faults", "meetings", "training"
ARRIVED = {True: "after its arrival", False: "before its arrival"}  # of which the others only know at their deadline
ROWS: list[tuple[str, ...]] = [
    *product([FAULTS], (*KINDS, *NETWORK_KINDS)),
    *product([MEETINGS], MEETING_KINDS, ARRIVED.values()),
    *product([TRAINING], RULES, TRAINING_KINDS),
]

WORLD_SESSIONS = 25  # that a world lives for
SESSION_DEADLINE_S = 180.0
#: Of torch's optimizers: they take long to load and to end where cores are scarce.
DEADLINES_S = {FAULTS: 90.0, MEETINGS: 90.0, TRAINING: 300.0}
SOON_S = 2.0  # in which survivors of a lost rank are to be told
LEAVE_S = 30.0  # an interpreter that has loaded torch and Numba takes seconds to end where cores are scarce
PROGRESS_S = 15.0
STDERR_CHARACTERS = 1500
WIDTH = 110  # of the table, where nobody looks on


@dataclass
class Tally:
    """Counts what has been done on one transport, and what was found.

    news_s: by the row of a fault, how long each took to be heard of where the others were to be told, None where somebody did
    not hear of it; outlived: how many there were where they were to go on. counts: of all findings; training_findings: how many
    of them training had. limitation: why nothing could be.
    """

    transport: str
    operations: int = 0
    news_s: dict[tuple[str, ...], list[float | None]] = field(default_factory=dict)
    outlived: Counter[tuple[str, ...]] = field(default_factory=Counter)
    counts: Counter[Kind] = field(default_factory=Counter)
    training_findings: int = 0
    limitation: str = ""

    def faults(self, *options: str) -> int:
        """Return how many faults of some kinds there were."""
        counted = Counter({row: len(news) for row, news in self.news_s.items()}) + self.outlived
        return sum(count for row, count in counted.items() if row[0] in options)


@dataclass
class _Running:
    """A world with a fault, since a time.monotonic()."""

    option: str
    fault: Fault | MeetingFault | TrainingFault
    world: World
    directory: Path
    network: Network | None
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

    def run_faults(self, option: str, start: int, faults: int) -> None:
        """Draw faults of a kind, from the start-th on, begin their worlds, and judge them. worlds_at_a_time of the place live at
        the same time."""
        running: deque[_Running] = deque()
        before = self.tally.faults(option)
        for index in range(start, start + faults):
            running.append(self._begin(option, index))
            if len(running) == self._place.worlds_at_a_time:
                self._end_of(running.popleft())
            self._progress(f"{self.tally.faults(option) - before} of {faults} {option}")
        while running:
            self._end_of(running.popleft())

    def _begin(self, option: str, index: int) -> _Running:
        where = self._place
        fault: Fault | MeetingFault | TrainingFault
        if option == FAULTS:
            fault = draw_fault(self._seed, where.transport, index, on_hosts=where.on_hosts)
            world, directory, network = where.world(fault.size, fault.hosts)
            world.start(suffer, fault, where.address, network, directory)
        else:
            draw, live = (draw_meeting_fault, come_together) if option == MEETINGS else (draw_training_fault, train)
            fault = draw(self._seed, where.transport, index)
            world, directory, network = where.world(fault.size, 1)
            world.start(live, fault, directory)
        return _Running(option, fault, world, directory, network)

    def _end_of(self, running: _Running) -> None:
        """Wait for the end of a world with a fault, and judge it."""
        fault, world, directory = running.fault, running.world, running.directory
        left_s = max(0.0, running.started + DEADLINES_S[running.option] - time.monotonic())
        outcomes = world.collect(left_s, ranks=fault.survivors)
        if fault.kind != STOPPED:
            outcomes += world.collect(LEAVE_S, ranks=[fault.victim])
        world.kill()
        if isinstance(fault, Fault) and running.network is not None and fault.kind in NETWORK_KINDS:
            running.network.mend(fault.hosts_of_ranks[fault.victim])
        files = {rank: report_file(directory, rank) for rank in fault.everyone}
        reports = {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}
        failed_at = float(failed_at_file(directory).read_text()) if failed_at_file(directory).exists() else None
        self.judge(fault, outcomes, reports, failed_at, directory)

    def judge(
        self,
        fault: Fault | MeetingFault | TrainingFault,
        outcomes: Sequence[Outcome],
        reports: dict[int, Report],
        failed_at: float | None,
        directory: Path,
    ) -> None:
        """Count a fault, and what was found of it."""
        if isinstance(fault, MeetingFault):
            arrived = is_known_at_once(fault, directory)
            row: tuple[str, ...] = MEETINGS, fault.kind, ARRIVED[arrived]
            found = judge_meeting(fault, outcomes, reports, failed_at, arrived)
        else:
            row = (TRAINING, fault.rule.name, fault.kind) if isinstance(fault, TrainingFault) else (FAULTS, fault.kind)
            found = judge_fault(fault, outcomes, reports, failed_at)
        if fault.is_outlived:
            self.tally.outlived[row] += 1
        else:
            self.tally.news_s.setdefault(row, []).append(news_s(fault, reports, failed_at))
        if row[0] == TRAINING:
            self.tally.training_findings += len(found)
        self._tell(found, f"{row[0]} {fault.index}: {fault}", _again(fault.index, **{row[0]: 1}), directory)

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
    options = {"start": start, **dict.fromkeys(("operations", FAULTS, TRAINING, MEETINGS), 0), **counts}
    return " ".join(f"--{name} {value}" for name, value in options.items())


def table(tallies: Sequence[Tally]) -> Table:
    """A row for each transport."""
    drawn = Table(box=box.SIMPLE, padding=0)
    for heading in ("transport", "operations", "faults", *(kind.value for kind in Kind)):
        drawn.add_column(heading.replace(" ", "\n"), justify="left" if heading == "transport" else "right")
    for tally in tallies:
        name = f"{tally.transport} (not run: {tally.limitation})" if tally.limitation else tally.transport
        counts = [str(tally.counts[kind]) for kind in Kind]
        drawn.add_row(name, str(tally.operations), str(tally.faults(FAULTS, MEETINGS, TRAINING)), *counts)
    return drawn


def news_table(tallies: Sequence[Tally]) -> Table:
    """A row for each kind of fault: on each transport how many of them were to be told, the median and the slowest news of one,
    and of how many somebody was not told; and how many the others were to outlive."""
    drawn = Table(box=box.SIMPLE, padding=0)
    drawn.add_column("told, median and\nslowest news, s; outlived")
    for tally in tallies:
        drawn.add_column(tally.transport, justify="right")
    for row in ROWS:
        drawn.add_row(", ".join(row), *(_cell(tally.news_s.get(row, []), tally.outlived[row]) for tally in tallies))
    return drawn


def training_line(tallies: Sequence[Tally]) -> str:
    """Return, in words, how soon the survivors of all faults of training were told: of ranks that ended, and of those that
    stopped, whose silence is only known by the deadline of an operation."""
    lost: list[float | None] = []
    stopped: list[float | None] = []
    for tally in tallies:
        for (option, *_, kind), news in tally.news_s.items():
            if option == TRAINING:
                (stopped if kind == STOPPED else lost).extend(news)
    faults, findings = sum(t.faults(TRAINING) for t in tallies), sum(t.training_findings for t in tallies)
    outlived = sum(count for t in tallies for row, count in t.outlived.items() if row[0] == TRAINING)
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


def _cell(news: Sequence[float | None], outlived: int) -> str:
    """Return how many faults there were, the median and the slowest of their news, and how many somebody was not told of."""
    told = _told(news)
    numbers = f"{len(news)} " + (f" {median(told):5.2f} {max(told):5.2f}" if told else "")
    cell = ", ".join([numbers, *_untold(news)]) if news else ""
    return "; ".join(part for part in (cell, str(outlived) if outlived else "") if part)


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
        on_this_machine = len([name for name in transports if name in TRANSPORTS])
        with tempfile.TemporaryDirectory(prefix="gradwire-soak-", ignore_cleanup_errors=True) as directory:
            try:
                with place(transport, Path(directory)) as where:
                    soak = Soak(where, seed, chosen.ranks, console)
                    tallies.append(soak.tally)
                    soak.run_operations(chosen.start, chosen.operations)
                    soak.run_faults(FAULTS, chosen.start, _share(chosen.faults, len(transports), number))
                    if transport in TRANSPORTS:
                        for option in (MEETINGS, TRAINING):
                            faults = _share(getattr(chosen, option), on_this_machine, number)
                            soak.run_faults(option, chosen.start, faults)
            except HostsError as error:
                tallies.append(Tally(transport, limitation=str(error)))
    console.print(table(tallies), news_table(tallies))
    console.print(training_line(tallies), markup=False, highlight=False, soft_wrap=True)
    return int(any(tally.counts for tally in tallies) or all(tally.limitation for tally in tallies))


def _share(total: int, parts: int, number: int) -> int:
    """How many of a total the part of a number gets."""
    return 0 if number >= parts else total // parts + (number < total % parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
