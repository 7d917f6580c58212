"""`bench train` as a user runs it: on several ranks, alone, interrupted and resumed."""

import json
import math
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as hvd
from gradwire.bench.training.train import parse_arguments, train
from gradwire.bench.training.train_report import OURS
from gradwire.bench.workloads.bytes_gpt import read_text
from gradwire.bench.workloads.loop import Trainee
from tests.harness import World, Worlds
from tests.interpreter import python
from tests.ranks.programs import DEADLINE_S, ended, launch, start
from tests.ranks.training import in_world, on_ranks

KEYS = {"steps", "loss_first", "loss_last", "val_loss", "items_per_s", "comm_share", "replicas_identical", "world_size"}
SMALL = ["--context=32", "--batch=2", "--device=cpu"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(500)))
    return str(path)


def start_alone(out: Path, *arguments: str) -> subprocess.Popen[str]:
    return start([python(), "-m", "gradwire.bench", "train", *SMALL, "--out", str(out), *arguments], out.parent)


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    """Wait for a process, check its exit status and return its output; leave nothing of it running."""
    found, output = ended(process)
    assert found == status, output
    return output


def checked(out: Path, output: str, world_size: int) -> dict[str, Any]:
    """Check what a run left behind, and return its summary."""
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    assert summary["replicas_identical"] is True
    assert summary["world_size"] == world_size
    assert math.isfinite(summary["val_loss"])
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["items_per_s"] > 0
    assert 0 <= summary["comm_share"] < 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    parts = {f"checkpoint.step{summary['steps']}.rank{rank}of{world_size}.pt" for rank in range(world_size)}
    assert {path.name for path in out.glob("checkpoint*")} == parts
    (progress,) = [line for line in output.splitlines() if line.startswith("100%")]
    assert progress.endswith(f"validation {summary['val_loss']:.3f}")  # of the final parameters
    return summary


@in_world
def trained(out: Path, text: str, *arguments: str) -> int:
    """Return the exit status of a small GPT's training, on processes that have started already."""
    return train(parse_arguments([text, *SMALL, "--out", str(out), *arguments]))


def weights_in(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("checkpoint.*.rank0of2.pt")
    loaded: dict[str, Any] = torch.load(path, weights_only=True)["modules"][OURS]
    return loaded


def test_a_killed_run_with_error_feedback_continues_bit_for_bit(
    ranks: Worlds, failing_world: Callable[[int], World], tmp_path: Path, text: str
) -> None:
    """At whatever step, for both ranks have a file of the step of the last checkpoint. Files of others stay as they are."""
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    others = [killed / f"checkpoint.{name}.pt" for name in ("best", "rank0.step4", "step900.rank0of2.best")]
    killed.mkdir()
    for other in others:
        other.write_text("of the user, or of an earlier version")
    flags = ["--compression=powersgd", "--checkpoint-every=3", "--steps=40", "--resume"]
    world = failing_world(2)
    world.start(trained, killed, text, *flags)
    deadline = time.monotonic() + DEADLINE_S
    while not list(killed.glob("*.rank1of2.pt")) and world.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    world.kill()
    assert not (killed / "summary.json").exists()  # the run was not over
    for folder in (killed, straight):
        assert ranks(2).run(trained, folder, text, *flags) == [0, 0]
    expected = weights_in(straight)
    assert all(weights.equal(expected[name]) for name, weights in weights_in(killed).items())
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (killed, straight)]
    for key in ("steps", "loss_first", "loss_last", "val_loss"):
        assert summaries[0][key] == summaries[1][key]
    assert all(other.exists() for other in others)


@pytest.mark.wide
def test_a_run_with_error_feedback_continues_on_other_ranks(ranks: Worlds, tmp_path: Path, text: str) -> None:
    for world, steps in ((3, 4), (2, 7), (3, 10)):
        (tmp_path / "checkpoint.step2.rank5of6.partial").write_text("of a process that was killed while it saved")
        flags = ["--compression=topk", f"--steps={steps}", "--resume"]
        assert ranks(world).run(trained, tmp_path, text, *flags) == [0] * world
        names = {path.name for path in tmp_path.glob("checkpoint*")}
        assert names == {f"checkpoint.step{steps}.rank{rank}of{world}.pt" for rank in range(world)}


@pytest.mark.wide
def test_digits_beside_ddp(tmp_path: Path) -> None:
    flags = ["--model=digits_cnn", "--batch=16", "--device=cpu", "--steps=30", "--compare=ddp", "--out", str(tmp_path)]
    summary = checked(tmp_path, launch("gradwire.bench", tmp_path, "train", *flags), 2)
    assert summary.keys() == KEYS | {"accuracy", "ddp", "times_as_fast"}
    assert summary["accuracy"] > 0.2
    assert summary["loss_first"] == summary["ddp"]["loss_first"]
    assert summary["val_loss"] == pytest.approx(summary["ddp"]["val_loss"], rel=0.02)
    assert summary["times_as_fast"] == pytest.approx(summary["ddp"]["step_s"] / summary["ddp"]["gradwire_step_s"])


def test_alone_until_the_time_is_up(tmp_path: Path, text: str) -> None:
    summary = checked(tmp_path, finish(start_alone(tmp_path, text, "--seconds=1")), 1)
    assert summary.keys() == KEYS
    assert summary["steps"] > 1


def test_an_interrupted_run_leaves_a_checkpoint_and_a_report(tmp_path: Path, text: str) -> None:
    process = start_alone(tmp_path, text, "--steps=1000000")
    assert process.stdout is not None
    while "step" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    steps = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert 0 < steps < 1000000
    assert (tmp_path / f"checkpoint.step{steps}.rank0of1.pt").exists()


@on_ranks(2)
def test_replicas_that_differ_fail_the_run(tmp_path: Path, text: str) -> None:
    """Spoil the model of rank 1 in the end."""
    validate = Trainee.validate

    def validate_and_spoil(trainee: Trainee, workload: Any) -> tuple[float, float]:
        found = validate(trainee, workload)
        with torch.no_grad():
            next(trainee.module.parameters()).add_(hvd.rank())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainee, "validate", validate_and_spoil)
        assert train(parse_arguments([text, *SMALL, "--steps=2", "--out", str(tmp_path)])) == 1
    hvd.barrier()
    assert json.loads((tmp_path / "summary.json").read_text())["replicas_identical"] is False


def test_a_text_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.py").write_text("first")
    (tmp_path / "c.png").write_text("no text")
    assert bytes(read_text(tmp_path).tolist()) == b"firstsecond"
    library = read_text(None)
    assert library.equal(read_text(None))
    assert b"import " in bytes(library.tolist())


def test_what_cannot_be_trained_is_refused(ranks: Worlds, tmp_path: Path, text: str) -> None:
    assert ranks(2).run(trained, tmp_path, text, "--context=9999") == [2, 2]
    assert ranks(2).run(trained, tmp_path, text, "--compression=int9") == [2, 2]
