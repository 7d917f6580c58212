"""Hashes, clocks that are put right, and the file of a timeline, without processes."""

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.collectives import ReplicasDiffer
from gradwire.collectives.diagnostics.journal import OperationTally
from gradwire.collectives.diagnostics.timeline import (
    ROUNDS,
    Offset,
    Recording,
    Timeline,
    offsets,
    trace_of,
    write_trace,
)
from gradwire.collectives.kernels.reference import memory as reference
from gradwire.rules import LocalReport
from gradwire.trainer.reducer.replicas import hash_of
from gradwire.trainer.reducer.times import ExchangeTime
from gradwire.trainer.reports.metrics import BucketChoice, StepMetrics, WantedReports
from gradwire.trainer.reports.stragglers import Stragglers, StragglerWatch
from tests.pages import ROOT

compiled = pytest.importorskip("gradwire.collectives.kernels.cpu.entries")


# Hashes


@pytest.mark.parametrize("count", [0, 1, 2, 1000, (1 << 20) + 3])
def test_the_compiled_hash_is_that_of_torch_and_of_the_formula(count: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(count))
    assert compiled.hash_words(words) == reference.hash_words(words)
    split = sum(compiled.hash_words(piece, place) for piece, place in ((words[:700], 1), (words[700:], 701)))
    assert split % 2**64 == reference.hash_words(words)
    total = 0
    for place, word in enumerate(words[:1000].tolist(), 1):
        x = (word % 2**64) ^ (place * 0x9E3779B97F4A7C15 % 2**64)
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        total += x ^ (x >> 31)
    assert compiled.hash_words(words[:1000]) == total % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("numel", [1, 7, 8, 9, 65])
def test_every_bit_counts(dtype: torch.dtype, numel: int) -> None:
    tensor = torch.zeros(numel, dtype=dtype)
    seen = {hash_of(tensor)}
    bits = tensor.view(torch.uint8)
    for byte in range(bits.numel()):
        for bit in range(8 if dtype is not torch.bool else 1):
            bits[byte] ^= 1 << bit
            seen.add(hash_of(tensor))
            bits[byte] ^= 1 << bit
    assert len(seen) == 1 + bits.numel() * (8 if dtype is not torch.bool else 1)


def test_places_signs_payloads_and_kinds_count() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    for one, other in (
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([1.0, 0.0, 2.0, 0.0]), torch.tensor([2.0, 0.0, 1.0, 0.0])),
        (torch.zeros(4), -torch.zeros(4)),  # signs that change in pairs
        (nan[:1], nan[1:]),
        (0.0, -0.0),
        (1, True),
    ):
        assert hash_of(one) != hash_of(other)


def test_strides_and_addresses_do_not_count() -> None:
    tensor = torch.arange(35.0).view(5, 7)
    assert hash_of(tensor.t().contiguous().t()) == hash_of(torch.nn.Parameter(tensor)) == hash_of(tensor)
    for offset in range(1, 4):
        shifted = torch.empty(35 + offset)[offset:]
        shifted.copy_(tensor.view(-1))
        assert hash_of(shifted) == hash_of(tensor)
    assert hash_of(torch.tensor(3.0)) == hash_of(torch.tensor([3.0]))
    with pytest.raises(TypeError, match=r"torch\.sparse_coo"):
        hash_of(torch.eye(3).to_sparse())


def test_the_error_names_who_is_not_like_most() -> None:
    error = ReplicasDiffer("parameter 'a'", [7, 7, 8, None], 2, rank=0, operation="check of replicas")
    assert error.ranks == (2, 3)
    assert "the first of 2 values that differ" in str(error)
    assert "rank 2 has one with hash 0000000000000008; rank 3 has none" in str(error)
    assert ReplicasDiffer("b", [1, 2], 1, rank=1, operation="").ranks == (1,)


# Clocks


def test_clocks_are_put_right_within_the_error_that_is_told() -> None:
    """Of ranks whose messages take between 10 and 40 us, and which come up to 2 s late."""
    draw = random.Random(3)
    ahead = [0, 5_000_000_000, -3_000, 123]
    begins: list[list[int]] = [[] for _ in ahead]
    ends: list[list[int]] = [[] for _ in ahead]
    now = 10**12
    for _ in range(ROUNDS):
        entered = [now + draw.randrange(0, 2_000_000_000 if draw.random() < 0.3 else 1000) for _ in ahead]
        for rank, shift in enumerate(ahead):
            left = max(moment + draw.randrange(10_000, 40_000) for moment in entered)
            begins[rank].append(entered[rank] + shift)
            ends[rank].append(left + shift)
            now = max(now, left)
    for shift, found in zip(ahead, offsets(begins, ends), strict=True):
        assert abs(found.offset_ns + shift) <= found.error_ns
        assert found.error_ns <= 40_000
    assert offsets(begins, ends)[0] == Offset(0, 0)


# Timelines


def test_a_timeline_keeps_the_last_events_and_counts_the_others() -> None:
    timeline = Timeline(most_events=3)
    lane = timeline.lane("one")
    assert timeline.lane("one") is lane
    for number in range(5):
        lane.mark(f"event {number}")
    with timeline.lane("two").during("inside", bytes=3):
        pass
    recording = timeline.recording()
    assert [name for _, name, *_ in recording.events] == ["event 3", "event 4", "inside"]
    assert recording.dropped == 3
    assert recording.lanes == ["one", "two"]
    assert Recording.from_record(json.loads(json.dumps(recording.to_record()))) == recording


def test_a_trace_has_all_ranks_on_one_clock(tmp_path: Path) -> None:
    first = Recording(["work"], [(0, "b", 2_000_000, 500, {"bytes": 1}), (0, "a", 1_500_000, None, None)], host="here")
    second = Recording(["work", "more"], [(1, "c", 1_000, 3_000, None)], dropped=7, host="there")
    trace = trace_of({0: first, 1: second}, [Offset(0, 0), Offset(1_400_000, 250)])
    write_trace(tmp_path / "trace.json", trace)
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.json"]
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = {event["name"]: event for event in trace["traceEvents"] if event["ph"] != "M"}
    assert events["c"] == {"name": "c", "pid": 1, "tid": 1, "ts": 0.0, "ph": "X", "dur": 3.0}
    assert events["a"] == {"name": "a", "pid": 0, "tid": 0, "ts": 99.0, "ph": "i", "s": "t"}
    assert events["b"] == {"name": "b", "pid": 0, "tid": 0, "ts": 599.0, "ph": "X", "dur": 0.5, "args": {"bytes": 1}}
    named = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert named == ["rank 0 on here", "rank 1 on there"]
    assert trace["otherData"]["rank 1"] == {"clock_error_us": 0.25, "events_dropped": 7}


# Stragglers


class Ranks:
    """Stands for the Communicators of all ranks: what one posts all see."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0
        self.bodies: dict[int, object] = {}

    def post(self, topic: str, record: object) -> None:
        self.bodies[self.rank] = json.loads(json.dumps(record))

    def posted(self, topic: str) -> dict[int, object]:
        return dict(self.bodies)


class Kept:
    def __init__(self) -> None:
        self.last: list[ExchangeTime] = []

    def keep(self, count: int) -> None:
        pass


def reported(
    waits: list[list[float]], every: int, step_s: float = 1.0, *, weighs: bool = False
) -> tuple[Stragglers | None, list[StragglerWatch]]:
    """waits[step][rank], in seconds."""
    ranks, moments = Ranks(len(waits[0])), [Kept() for _ in waits[0]]
    watches = [StragglerWatch(ranks, of_rank, every, lambda: weighs) for of_rank in moments]  # type: ignore[arg-type]
    for number, of_step in enumerate(waits):
        for rank, waited_s in enumerate(of_step):
            ranks.rank = rank
            moments[rank].last.append(ExchangeTime(number, int(waited_s * 1e9), 0, int(step_s * 1e9)))
            watches[rank].after_step()
    ranks.rank = 0
    return watches[0].report(), watches


def test_who_waits_least_is_who_was_waited_for() -> None:
    first = [[9.0, 0.0, 9.0, 9.0]]  # in which kernels are compiled
    report, watches = reported([*first, *[[0.5, 0.5, 0.25, 0.5]] * 3, [0.125, 0.5, 0.5, 0.5]], every=5)
    assert report is not None
    assert (report.steps, report.last, report.step_s) == (4, 4, 1.0)
    assert report.cost_s == (0.375 / 4, 0.0, 0.75 / 4, 0.0)
    assert report.worst_s == (0.375, 0.0, 0.25, 0.0)
    assert report.slowest == 2
    assert watches[0].report() is report  # computed once for each post
    assert report.share == 0.75 / 4
    assert report.waited_s[1] == (0.375 / 4, 0.0, 0.75 / 4, 0.0)
    assert report.waited_s[2] == (0.375 / 4, 0.0, 0.0, 0.0)
    assert report.waited_s[0] == (0.0, 0.0, 0.75 / 4, 0.0)
    assert "the others waited 0.188 s a step for rank 2 (19% of 1.000 s; at most 0.250 s)" in str(report)


def test_the_shares_that_make_ranks_equal_come_from_their_own_computing() -> None:
    report, _ = reported([[0.0] * 3, *[[0.75, 0.5, 0.0]] * 4], every=4)  # which takes 0.25, 0.5 and 1 s
    assert report is not None
    assert report.batch_shares == pytest.approx((4 / 7, 2 / 7, 1 / 7))
    assert "a share of 0.14 instead of 0.33 makes rank 2 equal" in str(report)


def test_weighed_batches_may_differ_and_no_shares_are_advised() -> None:
    report, _ = reported([[0.0] * 3, *[[0.75, 0.5, 0.0]] * 4], every=4, weighs=True)
    assert report is not None
    assert report.batch_shares is None
    assert "BatchShares" not in str(report)


def test_two_that_are_slow_alike_are_both_told_once_all_have_reported() -> None:
    report, _ = reported([[0.0] * 4, *[[0.5, 0.0, 0.5, 0.0]] * 4], every=5)
    assert report is not None
    assert report.cost_s == (0.0, 0.5, 0.0, 0.5)
    assert reported([[0.0, 1.0]] * 3, every=5)[0] is None


EQUAL, SLOW = [0.5, 0.5], [0.5, 0.3]


def test_the_log_has_the_begin_and_the_end_of_a_slow_rank(caplog: pytest.LogCaptureFixture) -> None:
    reported([*[EQUAL] * 20, *[SLOW] * 40, *[EQUAL] * 5, *[SLOW] * 10, *[EQUAL] * 40], every=5)
    begun, ended = caplog.messages
    assert "for rank 1 (20% of 1.000 s" in begun
    assert "up to exchange 34 " in begun
    assert "the others no longer wait for rank 1, as of exchange 89" in ended


@pytest.mark.parametrize(
    ("waits", "step_s"),
    [
        ([[0.5, 0.45]] * 60, 1.0),  # a small share
        ([[0.004, 0.0]] * 60, 0.005),  # a large share of next to nothing
        ([*[[0.5, 0.0]] * 5, *[[0.0, 0.5]] * 5] * 6, 1.0),  # now one rank, now the other
        ([*[SLOW] * 10, *[EQUAL] * 5] * 4, 1.0),  # now and then
    ],
)
def test_what_does_not_matter_is_not_logged(
    waits: list[list[float]], step_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    reported(waits, every=5, step_s=step_s)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("cost_s", "is_clear"),
    [
        ((0.02, 0.0), True),
        ((0.02, 0.019), False),
        ((0.0, 0.0), False),
        ((2e-6, 1e-6), False),
        ((0.01, 0.02, 0.012), True),
    ],
)
def test_a_rank_is_clearly_slow_only_if_it_costs_much_and_more_than_others(
    cost_s: tuple[float, ...], is_clear: bool
) -> None:
    assert Stragglers(9, 9, 0.1, cost_s, cost_s, (), ()).is_clear == is_clear


def test_operations_are_added_up_and_the_best_rate_is_kept(tmp_path: Path) -> None:
    tally = OperationTally(tmp_path, 0, 2, [])
    for duration_ns in (2_000, 1_000, 4_000):
        tally.add("allreduce", duration_ns, {"bytes": 1000, "algorithm": "ring"})
    tally.write()
    (path,) = tmp_path.iterdir()
    (row,) = json.loads(path.read_text().splitlines()[-1])
    assert row == ["allreduce", "none", "ring", "cpu", 10, 3, 3000, pytest.approx(7e-6), pytest.approx(1e9)]


# The adapters in the guide


@pytest.mark.parametrize("number", [0, 1])
def test_the_adapters_of_the_guide(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For TensorBoard, and for Weights & Biases, which would drop what is logged for an earlier step: log() takes none."""
    numbers = {"seconds": 0.5, "wait_s": 0.25, "exchange_s": 0.375, "bytes_sent": 100, "busbw_gb_s": 2.5}
    choices = (BucketChoice(400, "two_shot", "int8"),)
    metrics = StepMetrics(
        step=7, **numbers, bytes_uncompressed=400, buckets=choices, compression_error=None, slowest_rank=1
    )  # type: ignore[arg-type]
    written: dict[str, float] = {}
    axes: dict[str, str] = {}
    writer = SimpleNamespace(add_scalar=lambda tag, value, step: written.update({tag: value, "step": step}))
    board = SimpleNamespace(SummaryWriter=lambda: writer)
    wandb = SimpleNamespace(
        log=written.update, define_metric=lambda name, step_metric: axes.update({name: step_metric})
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    text = (ROOT / "docs" / "guides" / "reports.md").read_text()
    fragments = re.findall(r'^```python title="fragment"\n(.*?)^```$', text, flags=re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(fragments[number], namespace)
    namespace[("to_tensorboard", "to_wandb")[number]](metrics)
    tagged = {f"exchange/{name}": value for name, value in numbers.items()}
    if number == 0:
        del tagged["exchange/exchange_s"]
        assert written == {**tagged, "step": 7}
    else:
        assert written == {**tagged, "exchange/step": 7, "exchange/bytes_uncompressed": 400, "exchange/slowest_rank": 1}
        assert axes == {"exchange/*": "exchange/step"}


# Local updates


def test_a_report_says_plainly_which_bytes_are_which() -> None:
    report = LocalReport(
        steps=60,
        warmup_bytes_per_step=20e3,
        bytes_per_step=500,
        inner_bytes_per_step=4e3,
        bytes_sent=580_000,
        bytes_saved=2,
        wait_share=0.25,
        batch_per_rank=8,
        global_batch=32,
    )
    assert str(report) == (
        "60 steps: 20.0 KB a step of the warm-up, then 0.5 KB a step, 2.0 times fewer than uncompressed, and 4.0 KB to inner "
        "ranks; 0.580 MB in all; 25.0% of the time waiting; a batch of 8 a rank, 32 in all"
    )
    plain = replace(report, warmup_bytes_per_step=0, inner_bytes_per_step=0, bytes_saved=1.0, batch_per_rank=None)
    assert str(plain) == "60 steps: 0.5 KB a step, uncompressed; 0.580 MB in all; 25.0% of the time waiting"


# Arguments


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"on_step": 3}, TypeError),
        ({"check_replicas_every": -1}, ValueError),
        ({"check_replicas_every": 1.5}, ValueError),
        ({"straggler_report_every": 0}, ValueError),
        ({"straggler_report_every": None}, ValueError),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, object], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(given))):
        WantedReports(**given)  # type: ignore[arg-type]
