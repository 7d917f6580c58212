"""Flags of a collective's benchmark, and what they make it measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradwire.bench import options
from gradwire.bench.micro.cases import CASES
from gradwire.bench.micro.options import DTYPES, OPS, parse_arguments
from gradwire.bench.micro.run import choose_algorithms, plan_jobs


def test_defaults_are_those_of_nccl_tests() -> None:
    chosen = parse_arguments("allreduce", [])
    assert chosen.sizes == [32 << 20]
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
    assert len(jobs) == len(DTYPES) * len(OPS) - 1
    assert not [job for job in jobs if job.dtype == torch.bool and job.op == "average"]


def test_sizes_that_round_to_one_count_are_measured_once() -> None:
    chosen = parse_arguments("allgather", ["-b", "1", "-e", "32", "-f", "2"])
    jobs = plan_jobs(CASES["allgather"], chosen, 0, 2, torch.device("cpu"))
    assert [job.count for job in jobs] == [1, 2, 4]
    assert {(job.op, job.root) for job in jobs} == {("none", -1)}


def test_algorithms_default_to_all_with_the_peers_beside_auto() -> None:
    legal = ("ring", "tree", "native")
    assert choose_algorithms(None, legal) == ["auto", "native", "torch", "ring", "tree"]
    assert choose_algorithms(None, ("ring",)) == ["auto", "torch", "ring"]
    assert choose_algorithms(["tree", "auto"], legal) == ["tree", "auto"]
    with pytest.raises(ValueError, match="'rong' is not one of auto, native, torch, ring, tree"):
        choose_algorithms(["rong"], legal)


def test_what_is_missing_can_be_installed_as_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """See that it is said for a clone, as no index has the project."""
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        parse_arguments("allreduce", ["--plot", "out.png"])
    assert "pip install '.[bench]' in a clone" in capsys.readouterr().err
