"""Simulated training: one host's ranks stand for all, and what must hold whatever is described."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.bench.simulate import run
from gradwire.bench.simulate.exchange import AllreducePredictor, Network
from gradwire.bench.simulate.models import MODELS
from gradwire.bench.simulate.presets import DEVICES, compare, network
from gradwire.bench.simulate.scenario import Scenario, predict
from gradwire.bench.simulate.training import EXCHANGES, useful_share
from gradwire.collectives.compression.dense import Float16, Int8
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.tuning.cost_model import CodecCost, Costs, LinkCost
from gradwire.collectives.tuning.simulator import price

DOCUMENTED = Path(__file__).parents[2] / "docs" / "simulate.json"
LINK, NEAR = LinkCost(14e-6, 8e-10, 1e-6, 1e-11), LinkCost(3e-6, 2e-10, 1e-6, 1e-11)


def world(ranks: int, per_host: int) -> Costs:
    costs = Network(LINK, NEAR, 8e-10, per_host).costs(ranks)
    speeds = {"int8": 1e-10, "fp16": 1e-10, "none": 1e-11}
    codecs = tuple(CodecCost(make_codec(name).identity, each, each) for name, each in speeds.items())
    return replace(costs, reduce_byte_s=1e-10, codecs=codecs)


def scenario(model: str = "resnet50", gbit: float = 10, per_host: int = 1, **others: object) -> Scenario:
    return replace(Scenario(model, DEVICES[model], network(gbit, 10, per_host), steps=10), **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "per_host"), [(8, 1), (32, 1), (32, 4)])
@pytest.mark.parametrize(
    ("algorithm", "tolerance"),
    # Spans of blocks that wrap around, and receives in the order of ranks, differ from host to host.
    [("ring", 1e-4), ("hierarchical", 1e-4), ("rsag", 0.06), ("hierarchical(rsag)", 0.06), ("direct", 0.06)],
)
@pytest.mark.parametrize("numel", [32 * 25, 32 * 30_000])
def test_the_ranks_of_one_host_take_as_long_as_all(
    ranks: int, per_host: int, algorithm: str, tolerance: float, numel: int
) -> None:
    exchange = AllreducePredictor(world(ranks, per_host), algorithm)
    everyone = price(exchange.costs, [exchange.legs(rank, algorithm, numel) for rank in range(ranks)])
    assert exchange.seconds(numel) == pytest.approx(everyone, rel=tolerance)


@pytest.mark.parametrize("codec", [Int8(), Float16()])
def test_codes_take_the_bytes_that_the_codec_says(codec: Int8 | Float16) -> None:
    exchange = AllreducePredictor(world(8, 1), codec=codec)
    call = exchange.call(1 << 22)
    assert call.wire_bytes == pytest.approx(2 * 7 / 8 * codec.wire_bytes(1 << 22), rel=0.01)
    assert call.algorithm == ("two_shot" if isinstance(codec, Int8) else "rsag")
    if isinstance(codec, Int8):  # of one host's ranks they take as long as those of all
        everyone = [exchange.legs(rank, call.algorithm, 1 << 18) for rank in range(8)]
        assert exchange.seconds(1 << 18) == pytest.approx(price(exchange.costs, everyone), rel=0.15)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_one_rank_waits_for_nobody(exchange: str) -> None:
    point = predict(scenario(exchange=exchange, jitter=0.3, seed=1), 1)
    assert (point.efficiency, point.exchange_s, point.wire_bytes) == (1.0, 0.0, 0)


@settings(max_examples=15, deadline=None)
@given(
    ranks=st.sampled_from([2, 3, 8, 20]),
    exchange=st.sampled_from([name for name in EXCHANGES if name != "mg-wfbp"]),  # whose buckets depend on the link
    every=st.sampled_from([1, 4]),
    gbit=st.floats(0.1, 100),
    more=st.floats(1, 10),
)
def test_more_bandwidth_is_never_slower(ranks: int, exchange: str, every: int, gbit: float, more: float) -> None:
    slower, faster = (
        predict(scenario(gbit=rate, exchange=exchange, every=every), ranks).step_s for rate in (gbit, gbit * more)
    )
    assert faster <= slower * (1 + 1e-9)


def test_rules_differ_as_they_should() -> None:
    slow = scenario(gbit=1, jitter=0.5)
    every_step, every_tenth = (predict(replace(slow, every=every), 16) for every in (1, 10))
    assert every_tenth.step_s < every_step.step_s
    assert every_tenth.wire_bytes == pytest.approx(every_step.wire_bytes / 10, rel=0.01)
    quick = scenario(gbit=400, jitter=0.5)
    everyone, most, anyone = (predict(replace(quick, servers=8, quorum=quorum), 16) for quorum in (None, 14, 1))
    assert everyone.step_s > most.step_s > anyone.step_s
    assert predict(replace(quick, servers=8, quorum=1, groups=4), 16).step_s > anyone.step_s


def test_servers_without_jitter_take_a_step_and_most_of_an_exchange() -> None:
    described_run = scenario(servers=4, steps=20)
    point = predict(described_run, 16)
    # Those that have pulled first compute while others still pull.
    computing_s = described_run.device.step_s
    assert computing_s + point.exchange_s / 2 <= point.step_s <= computing_s + point.exchange_s


def test_failures_cost_what_was_computed_since_the_last_checkpoint() -> None:
    seldom, often = (useful_share(hours, 600, 300, 100) for hours in (1e6, 1e2))
    assert 0.99 < seldom < 1
    # An hour between failures: half of 10 minutes is lost, and 5 minutes for the restart.
    assert often == pytest.approx((60 - 5) / (60 + 5), rel=0.03)
    assert useful_share(1e2, 600, 300, 100, spare=5) > often


def test_models_have_the_parameters_that_their_authors_say() -> None:
    counts = {name: sum(weight.numel for weight in weights) for name, weights in MODELS.items()}
    assert (counts["resnet50"], counts["vgg16"], counts["bert-large"]) == (25_557_032, 138_357_544, 335_141_888)


def test_the_documented_table_is_what_is_predicted() -> None:
    documented = json.loads(DOCUMENTED.read_text())["rows"]
    for name in ("hkbu-100gib", "tensorflow-k80", "facebook-256"):
        rows = [row for row in documented if row["preset"] == name]
        assert [row.predicted for row in compare(name)] == pytest.approx([row["predicted"] for row in rows], rel=1e-6)
    errors = sorted(abs(row["error"]) for row in documented if row["preset"].startswith("hkbu") and not row["fitted"])
    assert errors[len(errors) // 2] <= 0.10
    assert all(abs(row["error"]) <= 0.20 for row in documented)


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--ranks", "6", "-J", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]) == 0
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["ranks"] for row in rows] == [1, 2, 4, 6]
    assert f"{rows[-1]['samples_per_s']:.1f}" in capsys.readouterr().out
    assert (tmp_path / "x.png").stat().st_size > 10_000
    servers = ["--servers", "1", "--groups", "6", "--steps", "1"]  # only numbers that can be divided into the groups
    assert run.main(["--ranks", "12", *servers, "-J", str(tmp_path / "x.json")]) == 0
    assert [row["ranks"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]] == [1, 2, 4, 12]


def test_none_is_no_codec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what is said of the speed of a codec is said only if there is one."""
    rows, printed = [], []
    for flags in ([], ["--codec", "none"], ["--codec", "int8"]):
        assert run.main(["--ranks", "4", *flags, "-J", str(tmp_path / "x.json")]) == 0
        rows.append(json.loads((tmp_path / "x.json").read_text())["rows"])
        printed.append(capsys.readouterr().out)
    assert rows[0] == rows[1] != rows[2]
    assert ["CPU" in each for each in printed] == [False, False, True]
