"""The benchmark as a user runs it: torchrun, the command line, the exit code, the files."""

from __future__ import annotations

import csv
import json
import subprocess
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gradwire.bench.micro.table import Row
from tests.harness import wide
from tests.interpreter import python
from tests.pages import ROOT
from tests.ranks.programs import DEADLINE_S, launch, launch_text


def bench(*arguments: str, ranks: int = 2) -> str:
    """Run `torchrun -m gradwire.bench ...`, and return what it prints."""
    said = launch("gradwire.bench", ROOT, *arguments, processes=ranks)
    if "--plot" in arguments:
        assert Path(arguments[arguments.index("--plot") + 1]).read_bytes().startswith(b"\x89PNG")
    return said


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m gradwire.bench ...` without a launcher."""
    return run([python(), "-m", "gradwire.bench", *arguments])


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)


needs_namespaces = pytest.mark.skipif(
    run(["sh", "-c", "ip -V && tc -V && unshare --net --uts --mount true"]).returncode != 0,
    reason="needs root, iproute2 and util-linux",
)


def into(folder: Path) -> list[str]:
    """Return the flags for both files of a benchmark."""
    return ["--json", str(folder / "out.json"), "--plot", str(folder / "out.png")]


def rows_of(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    result = json.loads(path.read_text())
    assert set(result) == {"meta", "rows"}
    return result["meta"], result["rows"]


@pytest.mark.parametrize("collective", ["allreduce", *wide("reduce_scatter", "broadcast")])
def test_every_algorithm_is_measured_and_right(collective: str, tmp_path: Path) -> None:
    flags = ["-b", "64", "-e", "16K", "-f", "256", "-n", "2", "-w", "0", "-c", "1"]
    said = bench(collective, *flags, *into(tmp_path), "--csv", str(tmp_path / "out.csv"), ranks=3)
    meta, rows = rows_of(tmp_path / "out.json")
    assert (meta["world_size"], meta["backend"], meta["hosts"]) == (3, "gloo", [[0, 1, 2]])
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    assert {"auto", "native", "torch"} < set(algorithms)
    places = ["out-of-place"] if collective == "reduce_scatter" else ["out-of-place", "in-place"]
    assert len(rows) == 2 * len(places) * len(algorithms)
    assert list(dict.fromkeys(row["place"] for row in rows)) == places
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["time_us"] for row in csv.DictReader(file)] == [str(row["time_us"]) for row in rows]
    for row in rows:
        assert set(row) == {field.name for field in fields(Row)}
        assert (row["collective"], row["world_size"], row["codec"], row["dtype"]) == (collective, 3, "none", "float32")
        assert row["wrong"] == 0
        assert 0 < row["time_us"] <= row["p99_us"]
        assert 0 < row["min_us"] <= row["avg_us"] <= row["max_us"] <= row["p99_us"]
        assert row["algbw_GBps"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)
        assert row["algorithm"] in ("auto", "shared", "native", "torch") or row["wire_bytes"] > 0
    assert said.count("# Out of bounds values : 0 OK") == len(algorithms)
    assert [line.split()[2] for line in said.splitlines() if line.startswith("# Algorithm ")] == algorithms


def test_dtypes_and_ops(tmp_path: Path) -> None:
    flags = ["-b", "1000", "-e", "1000", "-n", "1", "-w", "0", "-d", "all", "-o", "all", "--algorithm", "auto,torch"]
    bench("allreduce", *flags, "--json", str(tmp_path / "out.json"))
    _, rows = rows_of(tmp_path / "out.json")
    assert len({(row["dtype"], row["op"]) for row in rows}) == 10 * 5 - 1
    assert not any(row["wrong"] for row in rows)


@pytest.mark.parametrize("name", ["bandwidth", *wide("latency", "barrier")])
def test_messages_and_barriers(name: str, tmp_path: Path) -> None:
    bench(name, "-b", "1000", "-e", "1000", "-n", "2", "-w", "0", "--json", str(tmp_path / "out.json"), ranks=3)
    _, rows = rows_of(tmp_path / "out.json")
    assert {"auto", "torch"} <= {row["algorithm"] for row in rows}
    assert [(row["wrong"], row["bytes"]) for row in rows] == [(0, 0 if name == "barrier" else 1000)] * len(rows)


@pytest.mark.wide
def test_codecs_beside_no_compression(tmp_path: Path) -> None:
    codecs = ["int8", "onebit+ef", "randomk+ef", "bf16"]
    flags = ["--codec", ",".join(codecs), "-b", "400K", "-e", "400K", "-n", "8"]  # fewer turns have no interval
    said = bench("allreduce", *flags, *into(tmp_path), ranks=3)
    _, rows = rows_of(tmp_path / "out.json")
    by_name = {(row["algorithm"], row["codec"]): row for row in rows}
    assert list(by_name) == [("torch", "none"), ("auto", "none"), *(("auto", name) for name in codecs)]
    for (_, name), row in by_name.items():
        assert row["wrong"] == 0
        parts = [row["encode_us"], row["wire_us"], row["decode_us"]]
        assert parts == [None] * 3 if name == "none" else min(parts) > 0
    int8, onebit = by_name["auto", "int8"], by_name["auto", "onebit+ef"]
    assert int8["ratio"] == pytest.approx(3.94, rel=0.02)
    assert onebit["ratio"] == pytest.approx(31, rel=0.02)
    assert int8["ratio"] * int8["wire_bytes"] == pytest.approx(4 / 3 * 400 * 1024)
    assert by_name["auto", "none"]["relative_error"] < 1e-6 < int8["relative_error"] < 0.02 < onebit["relative_error"]
    for line in ("# Out of bounds values : 0 OK", "t_encode", "How many times as fast auto is as torch"):
        assert said.count(line) == 5


CORRUPT = """
import sys
from gradwire.bench.micro import run as micro

class Corrupt(micro.Communicator):
    def allreduce(self, tensor, op="sum", *, algorithm="auto", **rest):
        super().allreduce(tensor, op, algorithm=algorithm, **rest)
        if self.rank == 1 and algorithm == "ring":
            tensor[5] += 1

micro.Communicator = Corrupt
sys.exit(micro.main("allreduce", "-b 4K -e 4K -n 2 -w 0 -c 1 --algorithm auto,ring".split()))
"""


def test_one_wrong_element_on_one_rank_fails_the_run(tmp_path: Path) -> None:
    """Run the real driver, with a Communicator whose rank 1 gets one element wrong in one algorithm."""
    with pytest.raises(AssertionError) as caught:
        launch_text(CORRUPT, tmp_path)
    said = str(caught.value)
    assert "# Out of bounds values : 4 FAILED" in said  # one checked turn, and the last timed one, of two places
    assert "# Out of bounds values : 0 OK" in said


def test_alone() -> None:
    """Be a world of one where a benchmark can be, and refuse what needs others, what is not there, and who is not there."""
    done = alone("allreduce", "-b", "8", "-e", "8", "-n", "1")
    assert done.returncode == 0, done.stderr
    assert "world size 1 hosts 1" in done.stdout
    for arguments, said in (
        ("latency", "a message needs two ranks"),
        ("broadcast -b 8 -e 8 --algorithm auto,rong", "'rong' is not one of auto, native, torch"),
        ("rules alone --slow 1:0.1", "--slow names rank 1, and there are ranks 0 to 0"),
        ("shares", "--slow names rank 1, and there are ranks 0 to 0"),
        ("convergence --steps 1", "one rank exchanges nothing"),
    ):
        done = alone(*arguments.split())
        assert done.returncode == 2, done.stderr
        assert said in done.stderr


@needs_namespaces
def test_simulated_hosts_are_hosts(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    cluster = ["hosts", "--hosts", "2", "--ranks", "3", "--rate", "100mbit", "--deadline-s", "60", "--"]
    collective = ["allreduce", "-b", "256K", "-e", "256K", "-n", "3", "--algorithm", "auto,native", "--json"]
    done = alone(*cluster, *collective, str(out))
    assert done.returncode == 0, done.stderr
    meta, rows = rows_of(out)
    assert meta["hosts"] == [[0, 1], [2]]
    assert meta["network"].startswith("2 simulated hosts, 100mbit links")
    slowest_us = (256 * 1024 - 128 * 1024) / 100e6 * 8 * 1e6
    assert all(row["time_us"] > slowest_us for row in rows), "the links are faster than their rate"


@needs_namespaces
@pytest.mark.parametrize(
    ("command", "deadline_s", "exit_code", "said"),
    [
        ("if [ $RANK = 1 ]; then exit 7; fi; sleep 1", 60, 7, ""),
        ("sleep 60", 1, 124, "bench hosts: the ranks had not ended after 1 s: raise --deadline-s\n"),
        ("true", 60, 0, ""),
    ],
)
def test_the_exit_code_of_simulated_hosts(command: str, deadline_s: int, exit_code: int, said: str) -> None:
    cluster = ["hosts", "--hosts", "2", "--ranks", "2", "--deadline-s", str(deadline_s), "--"]
    done = alone(*cluster, "sh", "-c", command)
    assert (done.returncode, done.stderr) == (exit_code, said)


@pytest.mark.wide
def test_a_training_step_with_codecs(tmp_path: Path) -> None:
    flags = ["--batch", "1", "--context", "16", "--steps", "1", "--device", "cpu", "--compression", "int8,topk"]
    said = bench("step", *flags, "--rounds", "2", "--json", str(tmp_path / "out.json"))
    meta, rows = rows_of(tmp_path / "out.json")
    assert (meta["preset"], meta["context"]) == ("small", 16)
    assert "gloo" in meta["backend"]  # and NCCL on a machine with a GPU
    names = ["gradwire", "gradwire+int8", "gradwire+topk", "gradwire+ddp", "ddp", "ddp+fp16", "compute"]
    assert [row["competitor"] for row in rows] == names
    assert [row["replicas_identical"] for row in rows] == [True] * 6 + [False]
    assert {row["of_best_plan"] for row in rows} == {None}
    by_name = {row["competitor"]: row for row in rows}
    ours, ddp = by_name["gradwire"], by_name["ddp"]
    assert ours["as_ddp"] == pytest.approx(ddp["step_ms"] / ours["step_ms"])
    assert by_name["compute"]["beyond_compute_as_ddp"] is None
    for name, tolerance in (("gradwire", 1e-4), ("gradwire+int8", 1e-2), ("ddp+fp16", 1e-2)):
        assert by_name[name]["loss"] == pytest.approx(by_name["ddp"]["loss"], rel=tolerance)
    assert by_name["gradwire+topk"]["loss"] != pytest.approx(by_name["ddp"]["loss"], rel=1e-4)
    pairs = [(speedup["competitor"], speedup["peer"]) for speedup in meta["speedups"]]
    assert pairs == [(ours, peer) for ours in names[:4] for peer in ("ddp", "ddp+fp16")]
    for speedup in meta["speedups"]:
        times = [by_name[speedup[key]]["step_ms"] for key in ("competitor", "peer")]
        assert speedup["times"] == pytest.approx(times[1] / times[0])
    assert f"# gradwire+ddp is {meta['speedups'][-1]['times']:.2f} times as fast as ddp+fp16" in said


@pytest.mark.wide
def test_a_training_step_by_every_plan(tmp_path: Path) -> None:
    flags = ["--batch", "1", "--context", "16", "--steps", "1", "--device", "cpu", "--plans"]
    said = bench("step", *flags, "--rounds", "2", "--json", str(tmp_path / "out.json"))
    _, rows = rows_of(tmp_path / "out.json")
    plans = ["gradwire", *(f"gradwire {size}{when}" for when in ("", " at end") for size in ("1 MB", "4 MB"))]
    assert [row["competitor"] for row in rows] == [*plans, "gradwire+ddp", "ddp", "compute"]
    assert all(row["replicas_identical"] for row in rows[:-1])
    assert [row["loss"] for row in rows[:7]] == pytest.approx([rows[6]["loss"]] * 7, rel=1e-4)
    assert min(row["of_best_plan"] for row in rows[1:5]) == 1
    for row in rows:
        assert row["of_best_plan"] == pytest.approx(row["step_ms"] / min(other["step_ms"] for other in rows[1:5]))
        assert (row["plan"] is not None) == (row["competitor"] in plans)
        assert row["plan"] is None or row["plan"] in said
    assert len({row["plan"] for row in rows[1:5]}) == 4


@pytest.mark.wide
def test_a_training_step_of_many_small_parameters(tmp_path: Path) -> None:
    flags = [
        "--model",
        "mlp",
        "--batch",
        "2",
        "--steps",
        "1",
        "--rounds",
        "2",
        "--device",
        "cpu",
        "--hook",
        "--bucket-view",
    ]
    bench("step", *flags, "--json", str(tmp_path / "out.json"))
    meta, rows = rows_of(tmp_path / "out.json")
    assert (meta["model"], meta["item"], meta["preset"], meta["context"]) == ("mlp", "vector", None, None)
    names = ["gradwire", "gradwire+ddp", "gradwire+hook", "ddp", "compute"]
    assert [row["competitor"] for row in rows] == names
    assert [row["replicas_identical"] for row in rows] == [True] * 4 + [False]
    assert [row["loss"] for row in rows[:4]] == pytest.approx([rows[3]["loss"]] * 4, rel=1e-4)


@pytest.mark.wide
def test_the_benchmark_of_gpus_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = bench("gpu", "--device", "cpu", "--json", str(tmp_path / "out.json"))
    assert "goal" not in said  # figures of a CPU say nothing about them
    meta, rows = rows_of(tmp_path / "out.json")
    assert (meta["wrong"], meta["goals"]) == ([], [])
    assert [row["share"] for row in rows if row["part"] == "overlap"] == [None, None]  # codecs on a stream need a GPU
    places = {row["network"] is None for row in rows if row["part"] == "step"}
    assert True in places  # False, too, where hosts can be simulated
    assert {row["part"] for row in rows} == {"step", "call", "overlap", "verb"}
    assert all(row["same_bits"] for row in rows if row["part"] == "verb")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    views = import_module("figure_views")
    monkeypatch.setattr(views, "FOLDER", tmp_path)
    shown = {name: getattr(views, name)("out") for name in ("gpu_steps", "gpu_calls", "gpu_overlap", "gpu_goals")}
    for lines in (text.strip().splitlines() for text in shown.values()):
        assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "`gradwire+onebit`" in shown["gpu_steps"]


ON_A_SIMULATED_GPU = """
import os, sys
from pathlib import Path
import torch
from gradwire.bench.gpu import run, scale
from tests.simulated_gpu import check, install

backend, parts = {given}
install(int(os.environ["RANK"]), Path("."), nccl=backend == "nccl")
run.BACKENDS["nccl"] = "gloo"  # beside which the simulated NCCL is
run.choose_device = lambda name: torch.device("cuda", 0)  # each process has simulated GPUs of its own
scale.SCALES["cuda"] = scale.SCALES["cpu"]
code = run.main(["--device", "cuda", "--backend", backend, "--parts", parts])
check()
sys.exit(code)
"""


@pytest.mark.wide
@pytest.mark.parametrize("given", [("gloo", "step,call"), ("nccl", "step,call,nccl")])
def test_the_benchmark_of_gpus_on_a_simulated_gpu(given: tuple[str, str], tmp_path: Path) -> None:
    """The program that a GPU runs, whose results are checked; its figures mean nothing."""
    said = launch_text(ON_A_SIMULATED_GPU.format(given=given), tmp_path)
    assert "gradwire+powersgd" in said
    assert "# WRONG" not in said


@pytest.mark.parametrize("programs", ["pipeline", *wide("ddp,ddp+views,fsdp2,tensor-parallel")])
def test_ways_to_train_give_the_same_over_both_backends(programs: str, tmp_path: Path) -> None:
    flags = ["--programs", programs, "--width", "16", "--layers", "2", "--steps", "2", "--rounds", "1"]
    said = bench("backends", *flags, "--json", str(tmp_path / "out.json"))
    _, rows = rows_of(tmp_path / "out.json")
    assert list(dict.fromkeys(row["program"] for row in rows)) == programs.split(",")
    for row in rows:
        exchanges = row["backend"] not in ("no exchange", "compute")
        assert row["difference"] == (0.0 if exchanges else None)  # two ranks add in either order alike
        assert row["beyond_of_gloo"] is None or row["program"].startswith(
            "ddp"
        )  # None if gloo was as fast as `compute`
        assert row["program"] in said


@pytest.mark.wide
def test_training_with_codecs(tmp_path: Path) -> None:
    flags = ["--models", "digits_cnn", "--codecs", "int8,topk", "--steps", "3", "--device", "cpu"]
    said = bench("convergence", *flags, *into(tmp_path))
    meta, rows = rows_of(tmp_path / "out.json")
    assert (meta["world_size"], meta["steps"], meta["seed"]) == (2, 3, 0)
    none, int8, topk = rows
    assert [row["codec"] for row in rows] == ["none", "int8", "topk"]
    for row in rows:
        assert len(row["losses"]) == 3
        assert row["replicas_identical"]
        assert row["losses"][0] == none["losses"][0]
        assert row["validation_over_none"] == pytest.approx(row["validation_loss"] / none["validation_loss"])
    assert none["losses"][-1] != int8["losses"][-1] == pytest.approx(none["losses"][-1], rel=0.05)
    assert none["wire_bytes"] > 3 * int8["wire_bytes"] > 6 * topk["wire_bytes"]
    assert "# digits_cnn: " in said


@pytest.mark.wide
def test_error_feedback_reaches_a_minimum_that_codecs_alone_do_not(tmp_path: Path) -> None:
    bench("convex", "--steps", "400", *into(tmp_path))
    meta, rows = rows_of(tmp_path / "out.json")
    assert meta["recorded_steps"][-1] == 400
    gap = {(row["codec"], row["feedback"], row["schedule"]): row["gap"] for row in rows}
    for row in rows:
        assert row["replicas_identical"]
        assert row["gaps"][0] < 2
        if row["feedback"]:
            assert row["gap"] < gap[row["codec"], False, row["schedule"]] / 5
            assert gap[row["codec"], True, "decaying"] < gap[row["codec"], True, "constant"]


RULE_FLAGS = ["--batch", "1", "--context", "16", "--warmup-steps", "2"]


@pytest.mark.wide
def test_the_models_of_local_updates(tmp_path: Path) -> None:
    """What the rule makes of the replicas, the benchmark makes of them, too: without an outer optimizer, their average."""
    flags = [*RULE_FLAGS, "--steps", "6", "--every", "2", "--json", str(tmp_path / "out.json")]
    bench("replicas", *flags)
    _, rows = rows_of(tmp_path / "out.json")
    assert [row["step"] for row in rows] == [4, 6] * 3
    for row in rows:
        assert row["replicas_identical"]
        assert len({*row["replicas"], row["average"], row["previous"]}) == 4
        exact = row["rule"] == "average"
        assert (row["common"] == pytest.approx(row["average"], rel=1e-6)) == exact
    for before, after in zip(rows[::2], rows[1::2], strict=True):
        assert after["previous"] == before["common"]
    assert len({row["previous"] for row in rows if row["step"] == 4}) == 1  # after the same synchronous steps


@needs_namespaces
@pytest.mark.wide
def test_utilization(tmp_path: Path) -> None:
    """On two simulated hosts."""
    flags = (
        "--hosts=2 --rates=1gbit --every=1,2 --codecs=none,int8 --rounds=2 --context=16 --warmup-steps=2 --loss-steps=4"
    )
    ended = alone("utilization", *flags.split(), *into(tmp_path))
    assert ended.returncode == 0, ended.stderr
    meta, rows = rows_of(tmp_path / "out.json")
    sent = {(row["codec"], row["every"]): row["bytes_per_exchange"] for row in rows}
    exact = pytest.approx(4 * meta["parameters"], rel=1e-3)  # 2(p-1)/p of the bytes, and the first checks
    assert sent["none", 1] == exact
    assert sent["none", 2] == exact
    assert sent["int8", 2] < sent["none", 2] / 3.5
    for row in rows:
        assert row["replicas_identical"]
        assert row["computing_over_transfer"] == pytest.approx(row["every"] * row["step_ms"] / row["transfer_ms"])
    losses = {(row["codec"], row["every"], row["rule"]): row for row in meta["losses"]}
    rules = [(1, "synchronous"), (2, "average"), (2, "diloco")]
    assert losses.keys() == {(codec, *each) for codec in ("none", "int8") for each in rules}
    assert losses["none", 1, "synchronous"]["sent_bytes"] == pytest.approx(4 * sent["none", 1], rel=1e-3)
    local = losses["none", 2, "average"]["sent_bytes"]  # of two steps, and of one exchange after two others
    assert local == pytest.approx(3 * sent["none", 1], rel=1e-3)


@pytest.mark.wide
def test_update_rules(tmp_path: Path) -> None:
    """Average every step, by several ways, or now and then, with a codec, or never."""
    competitors = ["synchronous", "ddp", "server", "synchronous@0.5", "average+chunktopk", "alone"]
    flags = [*RULE_FLAGS, "--steps", "4", "--every", "2", "--seed", "3"]
    bench("rules", *competitors, *flags, *into(tmp_path))
    meta, rows = rows_of(tmp_path / "out.json")
    assert (meta["steps"], meta["seconds"], meta["context"]) == (4, None, 16)
    assert [row["competitor"] for row in rows] == competitors
    assert [row["steps"] for row in rows] == [4, 4, 4, 2, 4, 4]
    assert [row["replicas_identical"] for row in rows] == [True] * 5 + [None]
    synchronous, ddp, server, half, average, alone = rows
    assert synchronous["wait_share"] > 0
    assert ddp["wait_share"] is server["wait_share"] is None
    assert synchronous["reach_time"] == synchronous["reach_tokens"] == synchronous["reach_bytes"] == 1
    uncompressed = 4 * synchronous["parameters"]
    for same, tolerance in ((ddp, 1e-4), (server, 1e-2)):  # to a server, each rank pushes what it has clipped itself
        assert same["loss"] == pytest.approx(synchronous["loss"], rel=tolerance)
        assert same["over_first"] == same["loss"] / synchronous["loss"]
        assert same["sent_bytes"] == 4 * uncompressed
    assert synchronous["sent_bytes"] == pytest.approx(4 * uncompressed, rel=1e-3)  # with the bytes that count gradients
    for other in (half, average, alone):
        assert other["loss"] != pytest.approx(synchronous["loss"], rel=1e-5)
        assert other["curve"][0]["loss"] == synchronous["curve"][0]["loss"]
    assert 2 * uncompressed < average["sent_bytes"] < 2 * uncompressed + 2 * uncompressed / 100  # two warm-up steps
    assert alone["sent_bytes"] == 0


@pytest.mark.wide
@pytest.mark.skipif(
    run(
        ["sh", "-c", "cd /sys/fs/cgroup; test -e cgroup.controllers || cd cpu; mkdir a-test && rmdir a-test"]
    ).returncode
    != 0,
    reason="needs root and a cgroup",
)
def test_shares_of_a_batch(tmp_path: Path) -> None:
    flags = ["--batch", "4", "--context", "16", "--splits", "0.25", "--warmup", "3", "--steps", "1", "--rounds", "1"]
    bench("shares", *flags, *into(tmp_path))
    meta, rows = rows_of(tmp_path / "out.json")
    assert meta["slow"] == "rank 1 has 0.25 of a core"
    assert [row["competitor"] for row in rows] == ["BatchShares", "0.25", "equal", "ddp", "alone"]
    assert [row["parts"] for row in rows] == [[4, 4], [6, 2], [4, 4], [4, 4], [4, 4]]
    assert all(row["replicas_identical"] for row in rows)
    assert rows[-1]["of_alone"] == 1


@pytest.mark.wide
def test_update_rules_in_equal_time(tmp_path: Path) -> None:
    competitors = ["average", "quorum"]
    flags = [*RULE_FLAGS, "--seconds", "0.5", "--every", "3", "--slow", "1:0.1"]
    said = bench("rules", *competitors, *flags, "-J", str(tmp_path / "out.json"))
    _, rows = rows_of(tmp_path / "out.json")
    assert [row["competitor"] for row in rows] == competitors
    for row in rows:
        assert row["seconds"] >= 0.5
        assert row["curve"][-1]["loss"] == row["loss"]
    average, quorum = rows
    assert average["steps"] == 1 or (average["steps"] - 2) % 3 == 0  # the time may be up within the 2 synchronous steps
    assert "contributions" in quorum["report"]
    assert "# Slow: rank 1 sleeps 0.1 s in each step" in said
