"""compression="auto" by links that are described, and its correction by steps that take what the test says: without processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.engine.schedule_cache import ScheduleCache, legal_algorithms
from gradwire.collectives.schedules.selection import default_table
from gradwire.collectives.schedules.topology import Topology
from gradwire.collectives.tuning.cost_model import CodecCost, Costs, LinkCost
from gradwire.collectives.tuning.prediction import predict_auto, predict_coded
from gradwire.trainer.reducer import steps
from gradwire.trainer.reducer.choice import COUNTED, WINDOW, Choice
from gradwire.trainer.reducer.compression import ALLOWED, Auto, Compression, ErrorFeedback, encoding_of, wanted
from gradwire.trainer.reducer.steps import SKIPPED

SIZE = (3_125_000, torch.float32)
HOSTS = ((0,), (1,))
CODEC_BYTE_S = {"int8": 1e-10, "int4": 4e-10}


class Described:
    """What a Choice asks of a Communicator: of two hosts with links of so many bytes a second. others: what more ranks record."""

    rank = 0

    def __init__(self, rate: float) -> None:
        link = LinkCost(5e-5, 1 / rate, 0.0, 0.0)
        self.costs = Costs(HOSTS, ("a host",) * 2, link, link, (1 / rate,) * 2, (), (1.0, 1.0), 0.0, 1e-10)
        self.others: list[list[float]] = []
        self.asked = 0
        self.mine: list[list[float]] = []

    def measure_codecs(self, codecs: Sequence[Codec], device: str) -> None:
        speeds = [CodecCost(each.identity, CODEC_BYTE_S[each.name], CODEC_BYTE_S[each.name]) for each in codecs]
        self.costs = replace(self.costs, codecs=tuple(speeds))

    def predict(self, numel: int, itemsize: int, codec: Codec | None) -> float:
        topology, names = Topology(0, HOSTS), legal_algorithms({})
        tables = {verb: default_table(verb, topology, quick=True) for verb in names}
        schedules = ScheduleCache(topology, names, tables, 96 << 10)
        if codec is None:
            return predict_auto(schedules, self.costs, numel * itemsize, itemsize)
        return predict_coded(schedules, self.costs, numel, codec)

    def allgather_record(self, record: Any) -> list[Any]:
        self.asked += 1
        self.mine.append(record)
        return [record, *self.others]


def chosen(communicator: Described, *allow: Any, in_shares: bool = False) -> Choice:
    auto = wanted("auto", allow)
    assert isinstance(auto, Auto)
    return Choice(SimpleNamespace(communicator=communicator, in_shares=in_shares), auto, "cpu")  # type: ignore[arg-type]


def test_a_cast_takes_the_time_of_its_exchange_and_of_its_coding() -> None:
    described, fp16 = Described(1e9), make_codec("fp16")
    numel = SIZE[0]

    def seconds(encode_byte_s: float, decode_byte_s: float) -> float:
        coding = (CodecCost(fp16.identity, encode_byte_s, decode_byte_s),)
        described.costs = replace(described.costs, codecs=coding)
        return described.predict(numel, 4, fp16)

    assert seconds(0.0, 0.0) == pytest.approx(described.predict(numel // 2, 4, None), rel=0.01)
    assert seconds(1e-9, 3e-9) - seconds(0.0, 0.0) == pytest.approx(4 * numel * 4e-9)


@pytest.mark.parametrize(("rate", "best"), [(1e7, "int4"), (2.5e8, "int8"), (1e10, "none")])
def test_the_slower_the_links_the_fewer_bytes(rate: float, best: str, caplog: pytest.LogCaptureFixture) -> None:
    both = chosen(Described(rate), "int8", "int4")
    assert both.choose(SIZE).name == best
    with caplog.at_level(logging.INFO, "gradwire"):
        both.follow(0, 0.0)
    assert len(caplog.messages) == 1
    assert f"bucket 0 (12.5 MB): {best}, " in caplog.messages[0]
    assert caplog.messages[0].count(" ms") == 3


def test_a_small_bucket_beside_a_large_one_may_travel_as_it_is() -> None:
    both = chosen(Described(2.5e8), "int8")
    assert [both.choose((numel, torch.float32)).name for numel in (300, 3_125_000)] == ["none", "int8"]
    assert chosen(Described(2e9), "int8").choose(SIZE).name == "int8"
    assert chosen(Described(2e9), "int8", in_shares=True).choose(SIZE).name == "none"  # of which only half is exchanged


def corrected(made: Choice, monkeypatch: pytest.MonkeyPatch, step_s: dict[str, float], exchange_s: float) -> list[str]:
    """Take steps, of so many seconds each by what is chosen, until all is settled; return what was chosen in each window."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    seen = []
    for step in range(4 * WINDOW):
        made.sizes.clear()
        seen.append(made.choose(SIZE).name)
        clock.now += step_s[seen[-1]]
        made.follow(step, exchange_s)
        made.follow(step, 1e9)  # a second look after the same step counts for nothing
    assert made.settled
    windows = seen[::WINDOW]
    assert seen == [name for name in windows for _ in range(WINDOW)]
    return windows


@pytest.mark.parametrize(
    ("rate", "step_s", "exchange_s", "windows", "said"),
    [
        (2.5e8, {"int8": 1.0}, None, ["int8"] * 4, "the predicted choice stays"),  # it takes as long as predicted
        (1e7, {"int8": 1.0}, 0.5, ["int8"] * 4, "the predicted choice stays"),  # a rival would be hopeless
        (2.5e8, {"int8": 1.0, "none": 0.9}, 1.0, ["int8", "none", "none", "none"], "use 'none'"),
        (2.5e8, {"int8": 1.0, "none": 1.02}, 1.0, ["int8", "none", "none", "none"], "use 'none'"),  # nothing is lost
        (2.5e8, {"int8": 1.0, "none": 1.1}, 1.0, ["int8", "none", "int8", "int8"], "the predicted choice stays"),
        (2.5e8, {"int8": 1.0, "int4": 1.1, "none": 0.9}, 1.0, ["int8", "int4", "none", "none"], "use 'none'"),
    ],
)
def test_rivals_are_tried_after_a_wrong_prediction_and_the_one_with_the_fastest_steps_stays(
    rate: float,
    step_s: dict[str, float],
    exchange_s: float | None,
    windows: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    communicator = Described(rate)
    made = chosen(communicator, *(name for name in step_s if name != "none"))
    if exchange_s is None:
        exchange_s = 1.05 * communicator.predict(SIZE[0], 4, make_codec("int8"))
    with caplog.at_level(logging.INFO, "gradwire"):
        assert corrected(made, monkeypatch, step_s, exchange_s) == windows
    assert said in caplog.messages[-1]
    assert communicator.asked == len(step_s)


def test_the_slowest_rank_decides_and_one_that_has_joined_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = Described(2.5e8)
    communicator.others = [
        [[1.5] * COUNTED, [2.0] * COUNTED],
        [],
    ]  # of another rank's steps, which take as long with any choice
    assert corrected(chosen(communicator, "int8"), monkeypatch, {"int8": 0.5, "none": 1.0}, 1.0)[-1] == "none"


def test_a_rank_that_has_joined_follows_without_steps_of_its_own() -> None:
    communicator = Described(2.5e8)
    communicator.others = [[[1.0] * COUNTED, [1.0] * COUNTED]]
    joined = chosen(communicator, "int8")
    joined.choose(SIZE)
    joined.follow(0, 1.0)
    joined.follow(SKIPPED + COUNTED, 1.0, counts=False)
    assert communicator.mine == [[]]


def test_steps_are_not_measured_before_codecs_are_used_nor_across_layouts() -> None:
    communicator = Described(2.5e8)
    made = chosen(communicator, ErrorFeedback("int8", warmup_steps=50))
    for step in range(50 + SKIPPED + COUNTED):
        made.sizes.clear()
        for _ in range(1 + (step == 54)):
            made.choose(SIZE)
        assert not made.follow(step, 1.0)
    assert communicator.asked == 0


@pytest.mark.parametrize(
    ("compression", "allow", "said"),
    [
        ("int8", ["int4"], "allow is for compression='auto'.*not for 'int8'"),
        ("auto", [], "at least one codec"),
        ("auto", ["none"], "at least one codec"),
        ("auto", "int8", "a list of codecs.*not 'int8'"),
        ("auto", ["zip"], "no codec is called 'zip'; known are none, fp16.*powersgd$"),
        ("zip", None, "no codec is called 'zip'; known are none, fp16.*powersgd, auto$"),
        (7, None, r"or its name \(none, fp16.*powersgd, auto\), not 7"),
        ("auto", ["int8", PowerSGD()], "what 'powersgd' takes cannot be predicted"),
    ],
)
def test_what_makes_no_sense_is_refused(compression: Any, allow: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wanted(compression, allow)


def test_allowed_are_what_compression_takes_with_the_feedback_that_it_has() -> None:
    assert wanted("auto", None) == Auto(tuple(map(encoding_of, ALLOWED)))
    assert wanted("auto", ["none", "topk", "topk", Compression.fp16]) == Auto((encoding_of("topk"), Compression.fp16))
    assert wanted("int8", None) == "int8"
