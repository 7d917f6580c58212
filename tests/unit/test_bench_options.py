"""Flags of a collective's benchmark, nccl-tests' sizes among them, and what they make it measure."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench import options
from gradwire.bench.micro.cases import CASES, IN_PLACE, OUT_OF_PLACE
from gradwire.bench.micro.options import DTYPES, OPS, parse_arguments, size_range
from gradwire.bench.micro.run import choose_algorithms, plan, plan_jobs
from gradwire.collectives.notation import format_size, parse_size


def test_defaults_sweep_sizes_and_else_are_those_of_nccl_tests() -> None:
    chosen = parse_arguments("allreduce", [])
    assert chosen.sizes == [1024 * 4**power for power in range(9)]
    assert (chosen.iters, chosen.warmup_iters, chosen.check, chosen.root) == (20, 1, 1, 0)
    assert (chosen.datatype, chosen.op) == (["float32"], ["sum"])


def test_short_and_long_names_mean_the_same() -> None:
    short = "-b 8 -e 64 -f 2 -n 3 -w 0 -c 2 -d half -o avg -r 1 -J out.json"
    long = (
        "--minbytes 8 --maxbytes 64 --stepfactor 2 --iters 3 --warmup_iters 0 --check 2 "
        "--datatype float16 --op average --root 1 --json out.json"
    )
    chosen = parse_arguments("allreduce", short.split())
    assert vars(chosen) == vars(parse_arguments("allreduce", long.split()))
    assert chosen.sizes == [8, 16, 32, 64]
    assert chosen.json == Path("out.json")


@pytest.mark.parametrize("flags", ["-b 4X", "-b 8 -e 4", "-f 1", "-n 0", "-d float128", "-o mean", "--backend mpi"])
def test_wrong_flags_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_arguments("allreduce", flags.split())
    assert stop.value.code == 2
    assert "usage: python -m gradwire.bench allreduce" in capsys.readouterr().err


def test_all_dtypes_and_ops() -> None:
    chosen = parse_arguments("allreduce", ["-b", "64", "-e", "64", "-d", "all", "-o", "all"])
    jobs = plan_jobs(CASES["allreduce"], chosen, 0, 2, torch.device("cpu"))
    assert len(jobs) == 2 * (len(DTYPES) * len(OPS) - 1)
    assert not [job for job in jobs if job.dtype == torch.bool and job.op == "average"]


def test_sizes_that_round_to_one_count_are_measured_once() -> None:
    chosen = parse_arguments("allgather", ["-b", "1", "-e", "32", "-f", "2"])
    jobs = plan_jobs(CASES["allgather"], chosen, 0, 2, torch.device("cpu"))
    assert [job.count for job in jobs if job.place == IN_PLACE] == [1, 2, 4]
    assert [job.count for job in jobs if job.place == OUT_OF_PLACE] == [1, 2, 4]
    assert {(job.op, job.root) for job in jobs} == {("none", -1)}


def test_algorithms_default_to_all_with_the_peers_beside_auto() -> None:
    legal = ("ring", "tree", "native")
    assert choose_algorithms(None, legal) == ["auto", "native", "torch", "ring", "tree"]
    assert choose_algorithms(None, ("ring",)) == ["auto", "torch", "ring"]
    assert choose_algorithms(["tree", "auto"], legal) == ["tree", "auto"]
    with pytest.raises(ValueError, match="'rong' is not one of auto, native, torch, ring, tree"):
        choose_algorithms(["rong"], legal)


@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter"])
def test_sums_that_the_ranks_would_round_are_refused_before_anything_is_measured(name: str) -> None:
    world = Mock(rank=0, size=128, algorithms=lambda verb: ("ring",))
    chosen = parse_arguments(name, ["-d", "int8", "-b", "64", "-e", "64"])
    with pytest.raises(ValueError, match=r"sum of torch.int8 over 128 ranks .*: at most 127 ranks are allowed"):
        plan(CASES[name], chosen, world, torch.device("cpu"))
    chosen.op = ["max"]
    assert len(plan(CASES[name], chosen, world, torch.device("cpu"))[0]) == len(CASES[name].places)


def test_what_is_missing_can_be_installed_as_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse_arguments("allreduce", ["--plot", "out.png"])
    assert "pip install '.[bench]' in a clone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("4K", 4096), ("4k", 4096), ("1.5M", 1572864), ("32M", 32 << 20), ("1G", 1 << 30)]
)
def test_units_are_powers_of_1024(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "M", "-1", "4KB", "4 K", "1e6", "0.3K", "1.5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@given(st.integers(0, 1 << 40))
def test_format_is_read_back(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0"), (1000, "1000"), (1024, "1K"), (1536, "1536"), (3 << 20, "3M")])
def test_format_takes_the_largest_unit_that_is_exact(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_sizes_grow_by_a_factor() -> None:
    assert size_range(8, 128, None, 4) == [8, 32, 128]
    assert size_range(8, 127, None, 4) == [8, 32]


def test_a_step_includes_both_ends() -> None:
    assert size_range(4, 12, 4, 2) == [4, 8, 12]
    assert size_range(4, 11, 4, 2) == [4, 8]
    assert size_range(4, 4, 1 << 20, 2) == [4]


@pytest.mark.parametrize("arguments", [(0, 8, 1, 2), (16, 8, 1, 2), (8, 16, 0, 2), (8, 16, None, 1)])
def test_a_range_that_cannot_be_walked_is_refused(arguments: tuple[int, int, int | None, int]) -> None:
    with pytest.raises(ValueError, match=r"no size|not grow"):
        size_range(*arguments)
