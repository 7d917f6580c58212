"""Programs of the shapes that Horovod's users have, with `import gradwire as hvd` and nothing else of ours in them."""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import gradwire as hvd
from gradwire.trainer.horovod.run import run as horovod_run
from tests.harness import Worlds, wide
from tests.interpreter import python
from tests.pages import ROOT

PROGRAMS = Path(__file__).parent / "horovod_programs"

#: What each is run with, where the result does not depend on how many ranks share the work, and where it does.
SHARED_WORK: dict[str, tuple[str, list[str]]] = {
    "images": ("image_classification", ["--gradient-predivide-factor", "2"]),
    "generator and discriminator": ("gan", []),
}
OTHERS: dict[str, tuple[str, list[str]]] = {
    "images, half precision": ("image_classification", ["--fp16-allreduce"]),
    "elastic": ("elastic", []),
}


def run(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a program on this rank; return its variables."""
    path = str(PROGRAMS / f"{program}.py")
    with patch.object(sys, "argv", [path, *arguments]):
        try:
            return runpy.run_path(path, run_name="__main__")
        finally:
            hvd.shutdown()


def state_at_the_end(program: str, arguments: Sequence[str]) -> torch.Tensor:
    """Return all parameters and buffers, which must be the same on all ranks."""
    state = run(program, arguments)["model"].state_dict()
    return torch.cat([tensor.double().flatten() for tensor in state.values()])


def on_all(ranks: Worlds, size: int, program: str, arguments: Sequence[str]) -> torch.Tensor:
    ended = ranks(size).run(state_at_the_end, program, arguments)
    for rank, state in enumerate(ended):
        assert torch.equal(state, ended[0]), f"rank {rank} of {size} ended elsewhere than rank 0"
    return ended[0]


def in_a_world(add: float, *, of: str) -> tuple[int, float, str]:
    """Return this rank, a sum over all ranks, by a program's import of Horovod, and the number of compute threads; of rank 0,
    end the process instead."""
    module = importlib.import_module(of)
    module.init()
    total = module.allreduce(torch.tensor([module.rank() + add]), op=module.Sum)
    rank = module.rank()
    module.shutdown()
    if rank == 0:
        sys.exit(0)
    return rank, total.item(), os.environ["OMP_NUM_THREADS"]


def interrupt(caller: int) -> None:
    """Interrupt the process that has called horovod.run(), which ends this one."""
    os.kill(caller, signal.SIGINT)
    signal.pause()


def test_horovods_run_returns_what_each_rank_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"args": (0.5,), "kwargs": {"of": "horovod.torch"}}
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        returned = horovod_run(in_a_world, **arguments, num_proc=2, hosts="localhost:2", verbose=None)
    finally:
        torch.set_num_threads(threads)
    assert returned == [None, (1, 2.0, "3")]
    with pytest.raises(KeyboardInterrupt):
        horovod_run(interrupt, (os.getpid(),))
    with pytest.raises(RuntimeError, match="exit status 1"):
        horovod_run(in_a_world, (0.5,), {"of": "no_such_module"})
    for given in ({"np": 0}, {"hosts": "elsewhere:1"}, {"use_mpi": True}):
        with pytest.raises(ValueError, match=r"num_proc|hosts|use_mpi"):
            horovod_run(in_a_world, **given)


def test_horovods_run_needs_the_guard_of_a_main_module(tmp_path: Path) -> None:
    """Without it, every rank would begin with a job of its own."""
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from gradwire.trainer.horovod.run import run\nprint('imported', flush=True)\nrun(print, ['called'], num_proc=1)\n"
    )
    ended = subprocess.run(
        [python(), script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 1, ended.stderr
    assert (ended.stdout.count("imported"), ended.stdout.count("called")) == (2, 0), "once by its only rank"


def test_only_the_import_names_this_project() -> None:
    for program in PROGRAMS.glob("*.py"):
        lines = [line for line in program.read_text().splitlines() if "trainer" in line or "gradwire" in line]
        assert lines == ["import gradwire as hvd"], program.name


@pytest.mark.parametrize("case", SHARED_WORK)
@pytest.mark.parametrize("size", [2, *wide(4)])
def test_any_number_of_ranks_ends_where_one_ends(ranks: Worlds, case: str, size: int) -> None:
    alone, together = on_all(ranks, 1, *SHARED_WORK[case]), on_all(ranks, size, *SHARED_WORK[case])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("size", [3, *wide(1)])
def test_all_ranks_end_alike(ranks: Worlds, case: str, size: int) -> None:
    assert torch.isfinite(on_all(ranks, size, *OTHERS[case])).all()


@pytest.mark.parametrize("size", [2, *wide(4)])
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
    model = run("large_batch_resnet", arguments)["model"]
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
