"""The flags, the tables and the pictures of the benchmarks of training, and when a loss is reached."""

import argparse
import math
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

import gradwire as hvd
from gradwire.bench import plots
from gradwire.bench.training import (
    convergence,
    convergence_report,
    rules,
    rules_report,
    shares,
    shares_report,
    step,
    step_report,
    train_report,
)
from gradwire.bench.training.convergence_report import ConvergenceRow
from gradwire.bench.training.rules import CODED, RULES, UNLIKE, CompetitorSpec, Point, competitor_spec, reached
from gradwire.bench.training.rules_report import RuleRow
from gradwire.bench.training.step_plans import fixed_plans
from gradwire.bench.training.step_report import StepRow, StepSpeedup
from gradwire.bench.training.train_report import DDP, OURS, Record
from gradwire.bench.workloads import bytes_gpt
from gradwire.bench.workloads.loop import Trainee
from gradwire.trainer.reducer.compression import NAMES

CPU = torch.device("cpu")


def test_defaults_and_what_goes_together() -> None:
    chosen = convergence.parse_arguments([])
    assert (chosen.models, chosen.codecs, chosen.steps) == (["bytes_gpt", "digits_cnn"], list(NAMES), 400)
    assert step.parse_arguments(["--compression", "topk,int8,topk"]).compression == ("topk", "int8")
    assert not {"none", "auto"} & set(step.parse_arguments(["--compression", "all"]).compression)
    chosen = rules.parse_arguments([])
    assert chosen.competitors[0].text == "synchronous"
    assert (chosen.steps, chosen.seconds, chosen.seed, chosen.slow) == (600, None, 0, None)
    assert rules.parse_arguments(["--seconds", "5"]).steps is None
    assert rules.parse_arguments(["alone", "--slow", "3:0.25"]).slow == (3, 0.25)
    assert rules.parse_arguments(["streaming", "--every", "8", "--delay", "1"]).delay == 1
    assert rules.parse_arguments(["diloco", "--every", "1"]).every == 1  # the delay is of streaming
    size = bytes_gpt.size_of(step.parse_arguments(["--preset", "13m", "--context", "64"]))
    assert (size.context, size.width) == (64, 512)


def test_a_competitor_is_a_rule_with_a_codec_and_a_share() -> None:
    assert competitor_spec("ddp") == CompetitorSpec("ddp", "ddp", "none", 1.0)
    assert competitor_spec("diloco+chunktopk@0.6") == CompetitorSpec("diloco+chunktopk@0.6", "diloco", "chunktopk", 0.6)
    assert RULES.keys() >= CODED | UNLIKE
    for text in ("", "dpp", "ddp+int8", "diloco+int9", "diloco+", "ddp@", "ddp@x", "ddp@0", "ddp@nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            competitor_spec(text)


@pytest.mark.parametrize(
    ("flags", "among"),
    [
        ("", []),
        ("--compression int8,topk", ["gradwire+int8", "gradwire+topk", "ddp+fp16"]),
        ("--reports", ["gradwire+on_step", "gradwire+check", "gradwire+timeline"]),
        ("--commits", ["gradwire+commits"]),
        ("--hook --bucket-view", ["gradwire+hook"]),
        ("--shard-states --compression int8,dgc", ["gradwire+shards", "gradwire+shards+int8", "ddp+zero"]),
        ("--overlap --compression int8", ["gradwire+next_forward", "gradwire+next_forward+int8"]),
    ],
)
def test_flags_of_a_step_add_competitors(flags: str, among: list[str]) -> None:
    names = list(step.builders(step.parse_arguments(flags.split()), CPU, {}))
    assert {"gradwire", "gradwire+ddp", "ddp", "compute", *among} <= set(names)
    assert "gradwire+shards+dgc" not in names
    assert names[0] == "gradwire"
    assert names[-1] == "compute"
    assert ("ddp+fp16" in names) == ("--compression" in flags)


@pytest.mark.parametrize(
    ("layers", "beside", "at_end"),
    [(1, ["1 MB"], ["1 MB"]), (3, ["1 MB", "4 MB"], ["1 MB", "4 MB"]), (8, ["1 MB", "4 MB", "25 MB"], None)],
)
def test_plans_that_lay_out_the_same_buckets_are_compared_once(
    layers: int, beside: list[str], at_end: list[str] | None
) -> None:
    """Each layer has 1 MB."""
    plans = fixed_plans(torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(layers))))
    assert list(plans) == [*beside, *(f"{name} at end" for name in at_end or beside)]
    assert all(plan == hvd.ExchangePlan(int(name.split()[0]) << 20, "end" in name) for name, plan in plans.items())
    names = list(step.builders(step.parse_arguments(["--plans"]), CPU, plans))
    assert names[: 1 + len(plans)] == ["gradwire", *(f"gradwire {name}" for name in plans)]


@pytest.mark.parametrize(("chooses_after", "steps"), [(0, 0), (7, 8), (150, 152), (1000, 152)])
def test_competitors_train_until_they_have_chosen_their_plan(chooses_after: int, steps: int) -> None:
    class Choosing(step.StepCompetitor):
        @property
        def plan(self) -> hvd.ExchangePlan | None:
            return hvd.ExchangePlan() if len(self.losses) >= chooses_after else None

    module = torch.nn.Linear(1, 1)
    named = {
        name: Choosing(Trainee(module, torch.optim.SGD(module.parameters())), lambda number: 0.0, 4) for name in "ab"
    }
    competitors = {"gradwire": named["a"], "gradwire+int8": named["b"]}
    with pytest.raises(RuntimeError) if chooses_after == 1000 else nullcontext():
        step.settle(competitors, CPU)
    assert [len(each.losses) for each in competitors.values()] == [steps, 0]


@pytest.mark.parametrize("backends", ["cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl"])
def test_our_backend_needs_nccl_on_a_gpu(backends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backends)
    names = step.builders(step.parse_arguments([]), torch.device("cuda"), {})
    assert ("gradwire+ddp" in names) == ("nccl" in backends)


def test_auto_chooses_among_the_others() -> None:
    choosing = step.builders(step.parse_arguments(["--compression", "int8,auto,powersgd"]), CPU, {})["gradwire+auto"]
    assert isinstance(choosing, partial)
    assert choosing.keywords == {"compression": "auto", "allow": ["int8"]}


def test_the_table_of_a_step() -> None:
    names = ["gradwire", "gradwire+threshold", "ddp"]
    rows = [StepRow(name, 4, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.02, "one bucket", 7.0, True) for name in names]
    speedups = [StepSpeedup("gradwire+threshold", "ddp", 3.333, (3.1, 3.52)), StepSpeedup("gradwire", "ddp", 1.0, None)]
    meta = {"model": "bytes_gpt", "preset": "13m", "parameters": 12_900_000, "batch": 1, "context": 64, "item": "token"}
    meta |= {"rounds": 9, "steps": 2, "backend": "gloo", "network": None}
    lines = step_report.format_table(rows, speedups, meta)
    assert (
        "bytes_gpt 13m: 12.90 M parameters, 1 sequences of 64 bytes a rank, world size 4 backend gloo, 9 turns of 2"
        in lines[0]
    )
    assert len({line.index("1.00 ") for line in lines[4:7]}) == 1
    assert all("1.02" in line and line.endswith("one bucket") for line in lines[4:7])
    assert lines[-2] == "# gradwire+threshold is 3.33 times as fast as ddp  [3.10, 3.52]"
    others = {"model": "digits_cnn", "preset": None, "context": None, "item": "image"}
    assert (
        "digits_cnn: 12.90 M parameters, 1 images a rank" in step_report.format_table(rows, [], {**meta, **others})[0]
    )


@pytest.mark.parametrize(
    ("version", "written"),
    [
        ("cgroup.controllers", {"cpu.max": "2500 10000"}),
        ("cpu", {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "2500"}),
    ],
)
def test_a_cgroup_limits_processor_time(version: str, written: dict[str, str], tmp_path: Path) -> None:
    """Of version 2, or of version 1."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / version).touch()
    parent = tmp_path / "cpu" if version == "cpu" else tmp_path
    pid = f"{os.getpid()}"
    try:
        with shares.limited(0.25, tmp_path):
            (group,) = parent.glob("gradwire-bench-*")
            found = {path.name: path.read_text() for path in group.iterdir()}
            assert found == {**written, "cgroup.procs": pid}
            for path in group.iterdir():  # those of a real cgroup go with it
                path.unlink()
    finally:
        assert (parent / "cgroup.procs").read_text() == pid
    assert not group.exists()


def test_the_table_and_the_picture_of_shares(tmp_path: Path) -> None:
    parts = {"BatchShares": [26, 6], "0.40": [19, 13], "equal": [16, 16], "ddp": [16, 16], "alone": [16, 16]}
    rows = [
        shares_report.ShareRow(name, each, each, 1, 1.0, 2.0, 0.5, (0.4, 0.6), True) for name, each in parts.items()
    ]
    meta = {"device": "a CPU", "torch": "2", "network": None, "backend": "gloo", "parameters": 1_000_000, "context": 8}
    meta |= {"slow": "rank 1 has 0.25 of a core", "rounds": 8, "steps": 5, "time": "", "world_size": 2}
    lines = shares_report.format_table(rows, meta)
    assert len({line.index(" 0.50  [0.40, 0.60]") for line in lines[-len(rows) :]}) == 1
    shares_report.draw(rows, meta, tmp_path / "out.png")
    assert (tmp_path / "out.png").exists()


def of_codec(codec: str, losses: list[float]) -> ConvergenceRow:
    last = losses[-1]
    return ConvergenceRow("m", codec, codec, 4, 1000, len(losses), 0, last, last, 1.25, 0.5, 6000.0, 1.0, True, losses)


def test_a_picture_of_codecs_even_of_a_run_that_diverged(tmp_path: Path) -> None:
    falling = [5 * 0.98**number for number in range(50)]
    rows = [of_codec(name, falling) for name in NAMES] + [of_codec("new", [*falling[:25], *[math.nan] * 25])]
    convergence_report.draw(rows, {"world_size": 4, "steps": 50, "seed": 0}, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    said = convergence_report.format_row(rows[0]).split()
    assert said == ["none", "1.8580", "1.8580", "1.2500", "50.0%", "6000", "1.00", "identical"]
    kinds = convergence_report.kinds_of(rows)
    assert kinds[-1] == ("others", [rows[-1]])
    assert sorted(each.codec for _, of_kind in kinds for each in of_kind) == sorted({*NAMES, "new"} - {"none"})


def test_where_a_loss_is_reached() -> None:
    curve = [Point(0, 0, 0, 5.0), Point(100, 10, 1000, 4.0), Point(200, 20, 2000, 2.0)]
    assert reached(curve, Point(0, 0, 0, 3.0)) == Point(150, 15, 1500, 3.0)
    assert reached(curve, Point(0, 0, 0, 2.0)) == curve[-1]
    assert reached(curve, Point(0, 0, 0, 1.9)) is None


def test_table_and_picture_of_rules(tmp_path: Path) -> None:
    rows = []
    for competitor, falls in (("synchronous", 0.92), ("diloco+chunktopk", 0.93), ("alone", 0.95)):
        losses = [5.5 * falls**number for number in range(13)]
        keys = ("tokens", "seconds", "sent_bytes", "loss")
        sent = 0.0 if competitor == "alone" else 1e6
        curve = [dict(zip(keys, (1e5 * n, 2.0 * n, sent * n, loss), strict=True)) for n, loss in enumerate(losses)]
        outcome = (24.0, 5e4, 12e6, 0.25, losses[-1], 1.125, 0.5, None, 0.25, None, "said", curve)
        rows.append(RuleRow(competitor, 0, 4, 1000, 12, *outcome))
    meta = {**vars(rules.parse_arguments(["--steps", "12", "--late", "drop"])), "context": 128}
    meta |= {"network": None, "slow": "rank 3 sleeps 1 s in each step", "device": "a processor", "torch": "2"}
    assert rules_report.format_row(rows[0]).split()[-5:] == ["1.1250", "0.500", "-", "0.250", "-"]
    assert rules_report.format_row(replace(rows[0], wait_share=None)).split()[6] == "-"
    assert "staleness 4, late drop," in rules_report.format_header(meta, rows[0])[1]
    rules_report.draw(rows, meta, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_means_are_centred_and_do_not_follow_the_last_value() -> None:
    assert plots.running_means([1.0, 2.0, 6.0, 4.0, 0.0], reach=1) == [1.0, 3.0, 4.0, 10 / 3, 2.0]
    calm, outlier = [1.0] * 100, [1.0] * 99 + [22.0]
    rise = plots.running_means(outlier, reach=20)[-1] - plots.running_means(calm, reach=20)[-1]
    assert rise == pytest.approx(21 / 21)


def test_every_line_of_a_training_has_a_name_and_points_do_not_touch() -> None:
    workload = bytes_gpt.workload(bytes_gpt.GPTSize(), 1)
    losses = [5 * 0.99**number for number in range(812)]
    record = Record(losses, [0.01] * 812, [(number, 1.0, 0.5) for number in (*range(100, 812, 100), 812)])
    (panel,) = train_report.curves("said", workload, {OURS: record, DDP: record}).axes
    legend = panel.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [line.get_label() for line in panel.lines]
    assert len(set(names)) == 6
    assert f"{OURS}, mean of 41 steps" in names
    assert list(panel.lines[2].get_xdata()) == [*range(100, 701, 100), 812]  # type: ignore[arg-type]


def test_the_progress_says_of_which_step_a_validation_is(capsys: pytest.CaptureFixture[str]) -> None:
    workload = bytes_gpt.workload(bytes_gpt.GPTSize(), 1)
    with train_report.progress(0, workload) as show:
        for validated in (100, 120):
            show(1.0, Record([2.0] * 120, [0.01] * 120, [(validated, 2.0, 0.5)]))
    stale, fresh = capsys.readouterr().out.splitlines()
    assert stale.endswith(" at step 100")
    assert fresh.split()[-2] == "validation"
