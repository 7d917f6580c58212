"""Flags of a collective's benchmark, nccl-tests' sizes among them, and what they make it measure."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib")
pytest.importorskip("numba")

from gradwire.bench import options
from gradwire.bench.codec import run as codec
from gradwire.bench.failures import run as failures
from gradwire.bench.micro.cases import CASES, IN_PLACE, OUT_OF_PLACE
from gradwire.bench.micro.options import DTYPES, OPS, parse_arguments, size_range
from gradwire.bench.micro.run import choose_algorithms, plan, plan_jobs
from gradwire.bench.private import run as private
from gradwire.bench.simulate import run as simulate
from gradwire.bench.training import convergence, convex, replicas, rules, step, train
from gradwire.collectives.parsing import format_size, parse_size

CPU = torch.device("cpu")


def test_short_and_long_names_mean_the_same() -> None:
    short = "-b 8 -e 64 -f 2 -n 3 -w 0 -c 2 -d half -o avg -r 1 -J out.json"
    long = (
        "--minbytes 8 --maxbytes 64 --stepfactor 2 --iters 3 --warmup_iters 0 --check 2 "
        "--datatype float16 --op average --root 1 --json out.json"
    )
    chosen = parse_arguments("allreduce", short.split())
    assert vars(chosen) == vars(parse_arguments("allreduce", long.split()))
    assert (chosen.sizes, chosen.json) == ([8, 16, 32, 64], Path("out.json"))
    chosen = parse_arguments("allreduce", [])
    assert chosen.sizes == [1024 * 4**power for power in range(9)]
    assert (chosen.iters, chosen.warmup_iters, chosen.check, chosen.root) == (20, 1, 1, 0)
    assert (chosen.datatype, chosen.op) == (["float32"], ["sum"])


allreduce = partial(parse_arguments, "allreduce")

#: By benchmark: flags that are wrong, separated by |, and what is said of some.
WRONG: list[tuple[Callable[[list[str]], object], str, str]] = [
    (allreduce, "-b 4X|-b 8 -e 4|-f 1|-n 0|-d float128|-o mean|--backend mpi|--codec int9|--codec int8+fe", ""),
    (allreduce, "--codec none|--codec powersgd|--codec int8 -d half|--codec int8 -o max|--codec int8 --shared", ""),
    (allreduce, "--codec qsgd+ef", "qsgd+ef"),
    (codec.parse_arguments, "--codec int8,int9", "int9"),
    (codec.parse_arguments, "-n 1000|-n 0|--iters 0", ""),
    (convergence.parse_arguments, "--models gpt|--codecs int8,int9|--steps 0|--seed -1", ""),
    (convex.parse_arguments, "--steps 0", ""),
    (replicas.parse_arguments, "--steps 0|--every 0|--warmup-steps -1|--preset big|--plot out.png", ""),
    (step.parse_arguments, "--compression int8,none|--compression int8,int9|--compression int8,", ""),
    (step.parse_arguments, "--model resnet|--model mlp --preset 13m|--model digits_cnn --context 64", "bytes_gpt"),
    (
        rules.parse_arguments,
        "--steps 0|--seconds 0|--seconds 1 --steps 1|--seed x|--slow 3|--slow x:1|--every 0|no",
        "",
    ),
    (rules.parse_arguments, "--k 0|--k 6|--k 1028|streaming --every 3 --delay 0|streaming --every 8 --delay 2", ""),
    (train.parse_arguments, "--batch=0|--seconds=0|--model=resnet|--checkpoint-every=0", ""),
    (failures.parse_arguments, "--plot p.png|file.json|--hosts 3|--rate fast", ""),
    (private.parse_arguments, "--rate fast|--rate 0gbit|--rate 1gbit,1gbit|--rounds 0", ""),
    (simulate.main, "--preset nobody", "hkbu-10gbe"),
    (simulate.main, "--model nobody", "resnet50"),
    (simulate.main, "--link 5", "gbit"),
    (simulate.main, "--ranks 0", "from 1"),
    (simulate.main, "--ranks 10 --ranks-per-host 4", "multiple"),
    (simulate.main, "--model vgg16", "--batch"),
    (simulate.main, "--algorithm tree", "rsag"),
    (simulate.main, "--ranks 9600 --ranks-per-host 64 --algorithm ring", "too large"),
    (simulate.main, "--servers 10000", "too many"),
    (simulate.main, "--quorum 3", "--servers"),
]


@pytest.mark.parametrize(("parse", "wrong", "said"), WRONG)
def test_wrong_flags_are_refused(
    parse: Callable[[list[str]], object], wrong: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in wrong.split("|"):
        with pytest.raises(SystemExit) as stop:
            parse(flags.split(" "))
        assert stop.value.code == 2, flags
        assert said in capsys.readouterr().err


def test_jobs_are_each_measured_once() -> None:
    chosen = parse_arguments("allreduce", ["-b", "64", "-e", "64", "-d", "all", "-o", "all"])
    jobs = plan_jobs(CASES["allreduce"], chosen, 0, 2, CPU)
    assert len(jobs) == 2 * (len(DTYPES) * len(OPS) - 1)
    assert not [job for job in jobs if job.dtype == torch.bool and job.op == "average"]
    chosen = parse_arguments("allgather", ["-b", "1", "-e", "32", "-f", "2"])
    jobs = plan_jobs(CASES["allgather"], chosen, 0, 2, CPU)  # sizes that round to one count
    assert [[job.count for job in jobs if job.place == place] for place in (IN_PLACE, OUT_OF_PLACE)] == [[1, 2, 4]] * 2
    assert {(job.op, job.root) for job in jobs} == {("none", -1)}


def test_algorithms_default_to_all_with_the_peers_beside_auto() -> None:
    legal = ("ring", "tree", "native")
    assert choose_algorithms(None, legal) == ["auto", "native", "torch", "ring", "tree"]
    assert choose_algorithms(None, ("ring",)) == ["auto", "torch", "ring"]
    assert choose_algorithms(["tree", "auto"], legal) == ["tree", "auto"]
    with pytest.raises(ValueError, match="rong"):
        choose_algorithms(["rong"], legal)


@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter"])
def test_sums_that_the_ranks_would_round_are_refused_before_anything_is_measured(name: str) -> None:
    world = Mock(rank=0, size=128, algorithms=lambda verb: ("ring",))
    chosen = parse_arguments(name, ["-d", "int8", "-b", "64", "-e", "64"])
    with pytest.raises(ValueError, match="at most 127 ranks"):
        plan(CASES[name], chosen, world, CPU)
    chosen.op = ["max"]
    assert len(plan(CASES[name], chosen, world, CPU)[0]) == len(CASES[name].places)


def test_what_is_missing_can_be_installed_as_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse_arguments("allreduce", ["--plot", "out.png"])
    assert "pip install '.[bench]' in a clone" in capsys.readouterr().err


@given(st.integers(0, 1 << 40))
def test_sizes_are_read_as_they_are_written(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("4K", 4096), ("3M", 3 << 20), ("1G", 1 << 30), ("1536", 1536), ("1000", 1000)]
)
def test_units_are_powers_of_1024(text: str, nbytes: int) -> None:
    assert (parse_size(text), format_size(nbytes)) == (nbytes, text)
    assert (parse_size("4k"), parse_size("1.5M")) == (4096, 1572864)


@pytest.mark.parametrize("text", ["", "M", "-1", "4KB", "4 K", "1e6", "0.3K", "1.5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_sizes_grow_by_a_factor_or_a_step() -> None:
    assert (size_range(8, 128, None, 4), size_range(8, 127, None, 4)) == ([8, 32, 128], [8, 32])
    assert (size_range(4, 12, 4, 2), size_range(4, 11, 4, 2), size_range(4, 4, 1 << 20, 2)) == ([4, 8, 12], [4, 8], [4])
    for arguments in ((0, 8, 1, 2), (16, 8, 1, 2), (8, 16, 0, 2), (8, 16, None, 1)):
        with pytest.raises(ValueError, match=r"no size|not grow"):
            size_range(*arguments)
