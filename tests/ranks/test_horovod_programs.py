"""Programs of the shapes that Horovod's users have, with `import gradwire as hvd` and nothing else of ours in them."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import gradwire as hvd
from tests.harness import Worlds

PROGRAMS = Path(__file__).parent / "horovod_programs"

#: What each is run with, where the result does not depend on how many ranks share the work.
SHARED_WORK: dict[str, tuple[str, list[str]]] = {
    "images": ("image_classification", []),
    "images, predivided": ("image_classification", ["--gradient-predivide-factor", "2"]),
    "language model, rows": ("sparse_language_model", []),
    "language model, dense": ("sparse_language_model", ["--sparse-as-dense"]),
    "generator and discriminator": ("gan", []),
}

#: And where it does.
OTHERS: dict[str, tuple[str, list[str]]] = {
    "images, half precision": ("image_classification", ["--fp16-allreduce"]),
    "benchmark": ("synthetic_benchmark", ["--num-iters", "1"]),
    "benchmark, half precision": ("synthetic_benchmark", ["--num-iters", "1", "--fp16-allreduce"]),
    "benchmark, Adasum": ("synthetic_benchmark", ["--num-iters", "1", "--use-adasum"]),
    "uneven data": ("uneven_data", []),
    "Adasum": ("adasum", []),
}


def run(program: str, arguments: Sequence[str], found: Sequence[str] = ()) -> tuple[torch.Tensor, dict[str, Any]]:
    """Run a program on this rank; return all parameters and buffers at its end, and some of its variables."""
    path = str(PROGRAMS / f"{program}.py")
    with patch.object(sys, "argv", [path, *arguments]):
        try:
            variables = runpy.run_path(path, run_name="__main__")
        finally:
            hvd.shutdown()
    state = [tensor.double().flatten() for tensor in variables["model"].state_dict().values()]
    return torch.cat(state), {name: variables[name] for name in found}


def on_all(
    ranks: Worlds, size: int, program: str, arguments: Sequence[str], found: Sequence[str] = ()
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Run a program on that many ranks; return the state in which all of them ended, and what each found."""
    ended = ranks(size).run(run, program, arguments, found)
    for rank, (state, _) in enumerate(ended):
        assert torch.equal(state, ended[0][0]), f"rank {rank} of {size} ended elsewhere than rank 0"
    return ended[0][0], [variables for _, variables in ended]


def test_only_the_import_names_this_project() -> None:
    for program in PROGRAMS.glob("*.py"):
        lines = [line for line in program.read_text().splitlines() if "trainer" in line or "gradwire" in line]
        assert lines == ["import gradwire as hvd"], program.name


@pytest.mark.parametrize("case", SHARED_WORK)
def test_any_number_of_ranks_ends_where_one_ends(ranks: Worlds, case: str) -> None:
    alone, _ = on_all(ranks, 1, *SHARED_WORK[case])
    for size in (2, 4):
        together, _ = on_all(ranks, size, *SHARED_WORK[case])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", OTHERS)
def test_all_ranks_end_alike(ranks: Worlds, case: str) -> None:
    for size in (1, 2, 3, 4):
        state, _ = on_all(ranks, size, *OTHERS[case])
        assert torch.isfinite(state).all()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_that_is_resumed_ends_as_if_it_had_not_stopped(ranks: Worlds, size: int, tmp_path: Path) -> None:
    ended = {}
    for folder, pauses in {"whole": [[]], "resumed": [["--stop-after", "2"], []]}.items():
        (tmp_path / folder).mkdir()
        place = ["--checkpoint-format", str(tmp_path / folder / "checkpoint-{epoch}.pt")]
        for pause in pauses:
            ended[folder] = ranks(size).run(trained_residual_network, [*place, *pause])
    for rank in range(size):
        assert torch.equal(ended["resumed"][rank], ended["whole"][0]), f"rank {rank} of {size}"


def trained_residual_network(arguments: Sequence[str]) -> torch.Tensor:
    """Return the parameters, which all ranks have in common: the statistics of BatchNorm are each rank's own."""
    _, variables = run("large_batch_resnet", arguments, ["model"])
    return torch.cat([parameter.detach().flatten() for parameter in variables["model"].parameters()])


def test_uneven_data_ends_with_who_had_most(ranks: Worlds) -> None:
    for size in (2, 3):
        _, found = on_all(ranks, size, "uneven_data", [], ["last_joined"])
        assert all(variables["last_joined"] == [size - 1] * 2 for variables in found)


def test_adasum_fits(ranks: Worlds) -> None:
    for size in (2, 4):
        _, found = on_all(ranks, size, "adasum", [], ["losses"])
        for variables in found:
            assert variables["losses"][-1] < variables["losses"][0] / 4


def test_two_sets_train_two_models(ranks: Worlds) -> None:
    for size in (2, 3, 4):
        ended = ranks(size).run(run, "process_sets", [], ["members", "objects"])
        for rank, (state, variables) in enumerate(ended):
            members = list(range(rank % 2, size, 2))
            assert variables["members"] == members
            assert [entry["rank"] for entry in variables["objects"]] == list(range(size))
            assert all(torch.equal(state, ended[member][0]) for member in members)
        assert not torch.equal(ended[0][0], ended[1][0])
