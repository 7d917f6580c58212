"""The soak's own pieces: what it draws is the same every time, and whatever falls short is counted."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gradwire.collectives.engine.schedule_cache import legal_algorithms
from gradwire.collectives.errors import CollectiveError, CollectiveTimeout, Mismatch, PeerLost
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.servers import QuorumLost
from tests.harness import Outcome
from tests.ranks.exact import DTYPES, OPS, Checks
from tests.soak import __main__ as soak
from tests.soak.exchange import Exchange
from tests.soak.faults import (
    CLOSES,
    CUT,
    CUT_ONE_WAY,
    DISAGREES,
    EXITS,
    FLAPS,
    KILLED,
    KINDS,
    NETWORK_KINDS,
    PHASES,
    STOPPED,
    STRANGERS,
    WAYS,
    Fault,
    draw_fault,
)
from tests.soak.network import Network
from tests.soak.operations import Operation, Session, draw_operations, draw_session
from tests.soak.ranks import Report, Witness
from tests.soak.rules import (
    HOGWILD,
    KEYS,
    LOCAL,
    MOMENTS,
    RULES,
    SERVER,
    SYNCHRONOUS,
    TrainingFault,
    draw_training_fault,
)
from tests.soak.rules import KINDS as TRAINING_KINDS
from tests.soak.strangers import ports
from tests.soak.verdict import Kind, judge_fault, judge_session, news_s

ALGORITHMS = legal_algorithms(
    {verb: ("shared", "native") if verb in ("allreduce", "barrier") else ("native",) for verb in PLANNERS}
)
EVERYONE = (0, 1, 2)


def sessions(seed: int, count: int) -> list[tuple[Session, list[Operation]]]:
    drawn = [draw_session(seed, "sockets", index, 3, pretend_hosts=True) for index in range(count)]
    return [(session, draw_operations(session, 40, ALGORITHMS)) for session in drawn]


def test_all_ranks_draw_the_same() -> None:
    assert sessions(1, 20) == sessions(1, 20)
    assert sessions(1, 20) != sessions(2, 20)
    assert len({str(operations) for _, operations in sessions(1, 20)}) == 20, "each session has operations of its own"
    faults = [draw_fault(1, "sockets", index, on_hosts=False) for index in range(50)]
    assert faults == [draw_fault(1, "sockets", index, on_hosts=False) for index in range(50)]


def test_fewer_operations_are_the_first_of_more() -> None:
    session, operations = sessions(3, 1)[0]
    assert draw_operations(session, 7, ALGORITHMS) == operations[:7]


def test_everything_is_drawn() -> None:
    operations = [operation for _, drawn in sessions(1, 200) for operation in drawn]
    for collective, names in ALGORITHMS.items():
        assert {o.algorithm for o in operations if o.verb == collective} == {"auto", *names}
    assert {o.dtype for o in operations if o.verb == "reduce"} == set(DTYPES)
    assert {o.op for o in operations if o.verb == "allreduce"} == set(OPS)
    assert {0, 1, 2, 3, 4} <= {o.numel for o in operations}
    assert any(o.counts for o in operations)
    assert any(len(set(o.parts)) > 1 for o in operations)
    assert any(not o.asynchronous and o.waits for o in operations), "a synchronous one among asynchronous ones"
    faults = [draw_fault(1, "sockets", index, on_hosts=False) for index in range(300)]
    assert {(fault.kind, fault.phase) for fault in faults} == {(kind, phase) for kind in KINDS for phase in PHASES}


def test_the_network_fails_only_where_there_is_one() -> None:
    on_hosts = [draw_fault(1, "namespaces", index, on_hosts=True) for index in range(1000)]
    assert {(f.kind, f.phase) for f in on_hosts} == {
        (kind, phase) for kind in (*KINDS, *NETWORK_KINDS) for phase in PHASES
    }
    for kind, ways in WAYS.items():
        assert {(f.way, f.hosts_of_ranks[f.victim] == 0) for f in on_hosts if f.kind == kind} >= {
            (way, holds_the_store) for way in ways for holds_the_store in (True, False)
        }
    assert {f.timeout_s < 15 for f in on_hosts if f.kind == CUT} == {True, False}, "by the deadline, and by silence"
    assert {f.kind for f in (draw_fault(1, "sockets", i, on_hosts=False) for i in range(200))} == set(KINDS)


def test_who_is_cut_off_loses_the_others_and_they_lose_its_whole_host() -> None:
    drawn = (draw_fault(1, "namespaces", index, on_hosts=True) for index in range(1000))
    fault = next(f for f in drawn if f.kind == CUT and f.hosts_of_ranks == [0, 0, 1, 2] and f.victim == 1)
    assert [fault.culprits(rank) for rank in range(4)] == [{2, 3}, {2, 3}, {0, 1}, {0, 1}]


def test_a_link_is_cut_at_the_host_that_is_meant_and_mended_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts: list[str] = []
    monkeypatch.setattr("tests.soak.network._run", scripts.append)
    network = Network(switch=90, hosts=(100, 101, 102), rate="1gbit")
    network.cut(1, "what it sends is lost")
    network.mend(1)
    assert scripts[0] == "nsenter --target 101 --net tc qdisc replace dev eth0 root blackhole"
    assert "nsenter --target 90 --net ip link set port0.1 up\n" in scripts[1]
    assert "nsenter --target 101 --net tc qdisc replace dev eth0 root tbf rate 1gbit " in scripts[1]


def test_strangers_find_the_ports_on_which_somebody_listens() -> None:
    table = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 01004D0A:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 01004D0A:0050 02004D0A:1F91 01 00000000:00000000 00:00000000 00000000     0        0 2 1
   2: 00000000000000000000000000000000:BEEF 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 3 1
"""
    assert ports(table) == {0x1F90, 0xBEEF}


def test_what_is_asynchronous_is_waited_for_once() -> None:
    for _, operations in sessions(1, 50):
        waited = Counter(waiting for operation in operations for waiting in operation.waits)
        assert set(waited.values()) <= {1}
        assert all(operations[waiting].asynchronous for waiting in waited)


class Alone:
    """A Communicator of one rank, whose allreduce adds what it should not."""

    rank, size = 0, 1

    def __init__(self, planted: float) -> None:
        self._planted = planted

    def allreduce(self, tensor: torch.Tensor, op: str, **_: Any) -> None:
        tensor[..., -1:] += self._planted


@pytest.mark.parametrize("values", ["exact", "any"])
@pytest.mark.parametrize("layout", ["contiguous", "every second", "shifted", "columns"])
def test_a_planted_wrong_result_is_counted(values: str, layout: str) -> None:
    session = Session(1, "sockets", 0, (0,), "", None)
    operation = Operation("allreduce", numel=20, values=values, layout=layout)
    for planted in (0.0, 100.0):
        checks = Checks()
        exchange = Exchange(session, Alone(planted))  # type: ignore[arg-type]
        exchange.start(0, operation, asynchronous=False).check(checks)
        found = judge_session((0,), [Outcome(0, "returned", Report(wrong=checks.failures))])
        assert [finding.kind for finding in found] == ([Kind.WRONG] if planted else [])


class StandIn:
    """A World, and the Place that makes it, in which a planned thing happens."""

    transport, on_hosts = "sockets", False

    def __init__(self, directory: Path, outcomes: list[Outcome]) -> None:
        self._directory, self._outcomes = directory, outcomes

    def world(self, size: int, host_count: int) -> "tuple[StandIn, Path, None]":
        return self, self._directory, None

    def start(self, *_: object) -> None: ...

    def collect(self, deadline_s: float, **_: object) -> list[Outcome]:
        return self._outcomes

    def kill(self) -> None: ...


def test_a_planted_hang_is_counted_and_told_how_to_repeat(tmp_path: Path) -> None:
    outcomes = [Outcome(0, "returned", Report(done=40)), Outcome(1, "hung", detail="in allreduce")]
    said = io.StringIO()
    run = soak.Soak(StandIn(tmp_path, outcomes), 7, 2, Console(file=said))  # type: ignore[arg-type]
    run.run_operations(start=3, operations=40)
    assert run.tally.counts == {Kind.HANG: 1}
    assert "in allreduce" in said.getvalue()
    assert "--seed 7 --ranks 2 --transport sockets --start 3 --operations 40 --faults 0" in said.getvalue()


def lost(*ranks: int) -> PeerLost:
    return PeerLost(ranks, rank=0, operation="allreduce", has_left=False)


def late(*ranks: int) -> CollectiveTimeout:
    return CollectiveTimeout(3.0, ranks, rank=0, operation="allreduce")


def apart(one: int, other: int) -> CollectiveError:
    return CollectiveError(f"a connection between ranks {one} and {other} broke", rank=0, operation="allreduce")


def differing(*ranks: int) -> Mismatch:
    return Mismatch({rank: "allreduce" if rank else "barrier" for rank in ranks}, rank=0, operation="allreduce")


def told(error: Exception | None) -> Report:
    """Return the report of a rank that has seen this error, or none."""
    return Report(witness=None if error is None else Witness.of(error, EVERYONE, 0.0))


@pytest.mark.parametrize(
    ("outcomes", "counted"),
    [
        ([Outcome(0, "returned", Report()), Outcome(1, "died", detail="exit code -6", exit_code=-6)], [Kind.ABORT]),
        ([Outcome(r, "returned", Report(digests={4: "aa", 5: f"b{r}"})) for r in range(2)], [Kind.REPLICAS]),
        ([Outcome(r, "returned", told(None if r else lost(1))) for r in EVERYONE], [Kind.INNOCENT]),
        # blame of the rank that failed by itself is none of an innocent one
        ([Outcome(r, "returned", told(lost(2) if r < 2 else ValueError("its own"))) for r in EVERYONE], [Kind.WRONG]),
    ],
)
def test_what_ends_a_session_otherwise_is_counted(outcomes: list[Outcome], counted: list[Kind]) -> None:
    found = judge_session(range(len(outcomes)), outcomes)
    assert [finding.kind for finding in found] == counted
    assert counted != [Kind.REPLICAS] or "operation 5" in found[0].text


def test_the_error_that_broke_a_communicator_counts() -> None:
    broken = CollectiveError("broken since an earlier failure", rank=0, operation="allreduce")
    broken.__cause__ = lost(1)
    witness = Witness.of(broken, (4, 7), 0.0)
    assert (witness.kind, witness.blamed) == ("PeerLost", (7,))


def fault_of(kind: str) -> Fault:
    """Of rank 2, on a host of its own where there are hosts, in a world of 3."""
    on_hosts = kind in NETWORK_KINDS
    drawn = (draw_fault(1, "a transport", index, on_hosts=on_hosts) for index in range(1000))
    return next(fault for fault in drawn if fault.kind == kind and fault.size == 3 and fault.victim == 2)


@pytest.mark.parametrize(
    ("kind", "error", "counted"),
    [
        (KILLED, lost(2), []),
        (EXITS, lost(2), []),
        (CLOSES, lost(2), []),
        (STOPPED, late(2), []),
        (DISAGREES, differing(0, 1, 2), []),
        (KILLED, lost(1, 2), [Kind.INNOCENT]),
        (KILLED, lost(1), [Kind.INNOCENT, Kind.NO_CULPRIT]),
        (KILLED, late(), [Kind.NO_CULPRIT]),
        (KILLED, differing(0, 1, 2), [Kind.INNOCENT]),
        (KILLED, RuntimeError("of another kind"), [Kind.NO_CULPRIT]),
        (STOPPED, lost(2), [Kind.INNOCENT]),
        (STOPPED, late(1, 2), [Kind.INNOCENT]),
        (DISAGREES, late(2), [Kind.NO_CULPRIT]),
        (DISAGREES, differing(0, 1), [Kind.NO_CULPRIT]),
        (KILLED, None, [Kind.NO_CULPRIT]),
        (CUT, late(2), []),
        (CUT, lost(2), []),
        (CUT, late(1, 2), [Kind.INNOCENT]),
        (CUT, None, [Kind.NO_CULPRIT]),
        (CUT_ONE_WAY, late(1), [Kind.INNOCENT, Kind.NO_CULPRIT]),
        (CUT_ONE_WAY, apart(1, 2), []),
        (CUT_ONE_WAY, apart(0, 1), [Kind.INNOCENT, Kind.NO_CULPRIT]),
        (STOPPED, apart(1, 2), [Kind.NO_CULPRIT]),
        (FLAPS, None, []),
        (FLAPS, lost(2), [Kind.INNOCENT]),
        (STRANGERS, None, []),
        (STRANGERS, ConnectionError("of its own"), [Kind.WRONG]),
    ],
)
def test_whom_a_survivor_names_is_judged(kind: str, error: Exception | None, counted: list[Kind]) -> None:
    found = judge_fault(fault_of(kind), [], {0: told(error)}, failed_at=1e12)
    assert [finding.kind for finding in found] == counted


def test_an_error_before_the_fault_is_counted() -> None:
    found = judge_fault(fault_of(EXITS), [Outcome(2, "died", exit_code=0)], {0: told(lost(2))}, failed_at=None)
    assert [finding.kind for finding in found] == [Kind.WRONG]


def test_late_news_is_counted() -> None:
    witness = Witness.of(lost(2), EVERYONE, 0.0)
    found = judge_fault(fault_of(KILLED), [], {0: Report(witness=witness)}, failed_at=witness.raised - 15.0)
    assert [finding.kind for finding in found] == [Kind.LATE]


def training_faults() -> list[TrainingFault]:
    return [draw_training_fault(1, "shared_memory", index) for index in range(2000)]


def test_every_rule_meets_every_fault() -> None:
    faults = training_faults()
    assert faults == training_faults()
    assert {(fault.rule.name, fault.kind) for fault in faults} == {
        (rule, kind) for rule in RULES for kind in TRAINING_KINDS
    }
    assert {fault.moment for fault in faults} == set(MOMENTS)
    for rule, outlived in ((SERVER, {True, False}), (KEYS, {True, False}), (HOGWILD, {True})):
        assert {fault.is_outlived for fault in faults if fault.rule.name == rule} == outlived
    assert not any(fault.is_outlived for fault in faults if fault.rule.name in (SYNCHRONOUS, LOCAL))


def test_ranks_that_share_no_memory_draw_no_hogwild() -> None:
    faults = [draw_training_fault(1, "sockets", index) for index in range(200)]
    assert {fault.rule.name for fault in faults} == set(RULES) - {HOGWILD}


def training_fault(name: str, kind: str, *, is_outlived: bool = False) -> TrainingFault:
    """Of rank 2 in a world of 3."""
    return next(
        fault
        for fault in training_faults()
        if (fault.rule.name, fault.kind, fault.size, fault.victim) == (name, kind, 3, 2)
        and fault.is_outlived == is_outlived
    )


@pytest.mark.parametrize(
    ("name", "kind", "error", "counted"),
    [
        (SYNCHRONOUS, KILLED, lost(2), []),
        (LOCAL, STOPPED, late(2), []),
        (SERVER, KILLED, QuorumLost((2,), 3, rank=0, operation="step"), []),
        (SERVER, KILLED, QuorumLost((1, 2), 3, rank=0, operation="step"), [Kind.INNOCENT]),
        (LOCAL, EXITS, lost(1), [Kind.INNOCENT, Kind.NO_CULPRIT]),
        (SYNCHRONOUS, STOPPED, None, [Kind.NO_CULPRIT]),
        (SYNCHRONOUS, KILLED, ValueError("of its own"), [Kind.NO_CULPRIT]),
    ],
)
def test_whom_a_rank_that_trains_names_is_judged(
    name: str, kind: str, error: Exception | None, counted: list[Kind]
) -> None:
    found = judge_fault(training_fault(name, kind), [], {0: told(error)}, failed_at=1e12)
    assert [finding.kind for finding in found] == counted


def test_who_is_to_go_on_may_not_fail() -> None:
    fault = training_fault(SERVER, KILLED, is_outlived=True)
    assert judge_fault(fault, [], {0: Report()}, failed_at=1e12) == []
    assert [finding.kind for finding in judge_fault(fault, [], {0: told(lost(2))}, failed_at=1e12)] == [Kind.WRONG]


def test_how_many_were_told_soon_is_one_line() -> None:
    tally = soak.Tally("sockets")
    news: dict[tuple[str, str], list[float | None]] = {
        (SYNCHRONOUS, KILLED): [0.1, 0.3, 2.5],
        (LOCAL, EXITS): [0.2],
        (LOCAL, STOPPED): [6.5],
    }
    tally.news_s = {(soak.TRAINING, *row): times for row, times in news.items()} | {(soak.FAULTS, KILLED): [9.0]}
    tally.outlived = Counter({(soak.TRAINING, SERVER, KILLED): 2, (soak.FAULTS, FLAPS): 3})
    tally.counts[Kind.LATE] += 3
    tally.training_findings += 1
    assert (tally.faults(soak.TRAINING), tally.faults(soak.FAULTS)) == (7, 4)
    assert soak.training_line([tally]) == (
        "7 faults of training; 1 findings; 2 outlived; 3 of 4 lost ranks told within 2 s (75.0%; median 0.25, worst 2.50 s); "
        "1 of 1 stopped ranks told at a deadline of 6 s (median 6.50, worst 6.50 s)"
    )


def test_who_was_not_told_was_not_told_soon(tmp_path: Path) -> None:
    """Of a fault that never came, of one without a witness, of one with a survivor that wrote no report, and of one that all were
    told of."""
    fault = training_fault(SYNCHRONOUS, KILLED)
    witness = Witness.of(lost(2), EVERYONE, 0.0)
    seen, unseen = Report(witness=witness), Report()
    run = soak.Soak(StandIn(tmp_path, []), 7, 2, Console(file=io.StringIO()))  # type: ignore[arg-type]
    for reports, failed_at in (
        ({0: unseen, 1: unseen}, None),
        ({0: seen, 1: unseen}, witness.raised),
        ({0: seen}, witness.raised),
        ({0: seen, 1: seen}, witness.raised),
    ):
        run.judge(fault, [], reports, failed_at, tmp_path)
    assert run.tally.counts == {Kind.WRONG: 1, Kind.NO_CULPRIT: 1}
    assert soak.training_line([run.tally]) == (
        "4 faults of training; 2 findings; 0 outlived; 1 of 4 lost ranks told within 2 s (25.0%; median 0.00, worst 0.00 s, "
        "3 not told)"
    )
    alone = soak.Tally("sockets", news_s={(soak.TRAINING, LOCAL, STOPPED): [None]})
    assert soak.training_line([alone]).endswith("0 of 1 stopped ranks told at a deadline of 6 s (1 not told)")
    said = io.StringIO()
    news = {row: [None, 0.25, 0.5] for row in soak.ROWS}
    Console(file=said, width=110).print(soak.news_table([soak.Tally("sockets", news_s=news)]))
    assert said.getvalue().count("0.38  0.50, 1 not told") == len(soak.ROWS)


def test_who_closes_need_not_be_told() -> None:
    two = {0: told(lost(2)), 1: told(lost(2))}
    assert news_s(fault_of(CLOSES), {**two, 2: Report()}, failed_at=1e12) is not None
    assert news_s(fault_of(KILLED), two, failed_at=1e12) is not None
    assert news_s(fault_of(CUT), {**two, 2: Report()}, failed_at=1e12) is None
