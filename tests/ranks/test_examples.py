"""The examples as a user runs them: on several ranks, alone, interrupted and resumed."""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

import gradwire as hvd
from gradwire.trainer.examples import loop
from gradwire.trainer.examples.bytes_gpt import GPTConfig, read_text, task
from gradwire.trainer.examples.config import LoopConfig, parse
from gradwire.trainer.examples.loop import Run
from gradwire.trainer.examples.report import OURS
from tests.harness import World, Worlds
from tests.interpreter import python
from tests.ranks.programs import DEADLINE_S, ended, launch, start
from tests.ranks.training import in_world, on_ranks

KEYS = {"steps", "loss_first", "loss_last", "val_loss", "items_per_s", "comm_share", "replicas_identical", "world_size"}
SMALL_GPT: dict[str, Any] = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 32,
    "batch": 4,
    "lr": 1e-2,
    "decay_steps": 6,
}
FLAGS_OF_SMALL_GPT = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL_GPT.items()]
SMALL_CNN = ["--layers=1", "--width=8", "--batch=32", "--lr=1e-2", "--warm-up=5"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(500)))
    return str(path)


def start_alone(example: str, out: Path, *arguments: str) -> subprocess.Popen[str]:
    module = f"gradwire.trainer.examples.{example}"
    return start([python(), "-m", module, "--device", "cpu", "--out", str(out), *arguments], out.parent)


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    """Wait for a process, check its exit status and return its output; leave nothing of it running."""
    found, output = ended(process)
    assert found == status, output
    return output


def run(example: str, out: Path, *arguments: str, processes: int | None = 2) -> dict[str, Any]:
    """Run an example to its end, check what it left behind, and return its summary."""
    if processes is None:
        output = finish(start_alone(example, out, *arguments))
    else:
        module = f"gradwire.trainer.examples.{example}"
        output = launch(module, out.parent, "--device", "cpu", "--out", str(out), *arguments, processes=processes)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    assert summary["replicas_identical"] is True
    assert summary["world_size"] == (processes or 1)
    assert math.isfinite(summary["val_loss"])
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["items_per_s"] > 0
    assert 0 <= summary["comm_share"] < 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "checkpoint.pt").exists()
    assert not list(out.glob("*.partial"))
    assert "replicas bit-identical" in output
    (progress,) = [line for line in output.splitlines() if line.startswith("100%")]
    assert progress.endswith(f"validation {summary['val_loss']:.3f}")  # of the final parameters
    return summary


@in_world
def train(out: Path, text: str, steps: int, **settings: Any) -> int:
    """Return the exit status of a small GPT's training. As run() does it, on processes that have started already."""
    config = GPTConfig(text=Path(text), steps=steps, out=out, device="cpu", **{**SMALL_GPT, **settings})
    return Run(task(config), config)()


def test_a_resumed_run_continues_bit_for_bit(ranks: Worlds, tmp_path: Path, text: str) -> None:
    assert ranks(2).run(train, tmp_path / "straight", text, 6) == [0, 0]
    straight = json.loads((tmp_path / "straight" / "summary.json").read_text())
    assert ranks(2).run(train, tmp_path / "resumed", text, 3) == [0, 0]
    resumed = run("bytes_gpt", tmp_path / "resumed", text, *FLAGS_OF_SMALL_GPT, "--steps=6", "--resume")
    assert straight.keys() == resumed.keys() == KEYS
    assert straight["steps"] == resumed["steps"] == 6
    for key in ("loss_first", "loss_last", "val_loss"):
        assert straight[key] == resumed[key]


#: With a matrix that is large enough for a codec.
WITH_FEEDBACK: dict[str, Any] = {"checkpoint_every": 3, "batch": 6, "width": 64, "resume": True}


def weights_in(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)["modules"][OURS]
    return loaded


def test_a_killed_run_with_error_feedback_continues_bit_for_bit(
    ranks: Worlds, failing_world: Callable[[int], World], tmp_path: Path, text: str
) -> None:
    """At whatever step, for both ranks have a file of the step that the last checkpoint is of."""
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    common = killed / "checkpoint.pt"
    world = failing_world(2)
    world.start(train, killed, text, 1_000_000, compression="powersgd", **WITH_FEEDBACK)
    deadline = time.monotonic() + DEADLINE_S
    while not common.exists() and world.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    world.kill()
    step = torch.load(common, weights_only=True)["step"]
    assert step > 0
    assert all((killed / f"checkpoint.rank{rank}.step{step}.pt").exists() for rank in (0, 1))

    for folder in (killed, straight):
        assert ranks(2).run(train, folder, text, step + 4, compression="powersgd", **WITH_FEEDBACK) == [0, 0]
    expected = weights_in(straight)
    assert all(weights.equal(expected[name]) for name, weights in weights_in(killed).items())
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (killed, straight)]
    for key in ("loss_first", "loss_last", "val_loss"):
        assert summaries[0][key] == summaries[1][key]


@pytest.mark.wide
def test_a_run_with_error_feedback_continues_on_other_ranks(ranks: Worlds, tmp_path: Path, text: str) -> None:
    for world, steps in ((3, 4), (2, 7), (3, 10)):
        (tmp_path / "checkpoint.rank5.step2.partial").write_text("of a process that was killed while it saved")
        assert ranks(world).run(train, tmp_path, text, steps, compression="topk", **WITH_FEEDBACK) == [0] * world
        names = {path.name for path in tmp_path.glob("checkpoint*")}
        parts = {f"checkpoint.rank{rank}.step{steps}.pt" for rank in range(world)}
        assert names == {"checkpoint.pt", *parts}


@pytest.mark.wide
def test_digits_beside_ddp(tmp_path: Path) -> None:
    summary = run("digits_cnn", tmp_path, *SMALL_CNN, "--steps=30", "--compare=ddp")
    assert summary.keys() == KEYS | {"accuracy", "ddp", "times_as_fast"}
    assert summary["accuracy"] > 0.5
    assert summary["loss_first"] == summary["ddp"]["loss_first"]
    assert summary["val_loss"] == pytest.approx(summary["ddp"]["val_loss"], rel=0.02)
    assert summary["times_as_fast"] == pytest.approx(summary["ddp"]["step_s"] / summary["ddp"]["gradwire_step_s"])


def test_alone_until_the_time_is_up(tmp_path: Path) -> None:
    summary = run("digits_cnn", tmp_path, *SMALL_CNN, "--seconds=1", processes=None)
    assert summary["steps"] > 1


@on_ranks(2)
def test_the_clock_starts_when_training_does(tmp_path: Path) -> None:
    """Steps of a second each in a run of three, where what is allreduced before the first takes a minute to compile."""
    config = GPTConfig(seconds=3.0, batch=4, layers=1, width=4, out=tmp_path, device="cpu")
    run, now, begun = Run(task(config), config), 0.0, False
    allreduce, turn = hvd.allreduce, run._turn

    def slow_at_first(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal now
        now += 0.0 if begun else 60.0
        return allreduce(*args, **kwargs)

    def a_second_each(trainee: Any, length: int) -> list[float]:
        nonlocal now, begun
        now, begun = now + length, True
        losses_seconds_wait = turn(trainee, length)
        return [*losses_seconds_wait[:length], *[1.0] * length, losses_seconds_wait[-1]]

    run._turn = a_second_each  # type: ignore[method-assign]
    with patch.object(hvd, "allreduce", slow_at_first), patch.object(loop, "time", Mock(wraps=time)) as clock:
        clock.monotonic = lambda: now
        assert run() == 0
    assert run.steps == 3


def test_an_interrupted_run_leaves_a_checkpoint_and_a_report(tmp_path: Path, text: str) -> None:
    process = start_alone("bytes_gpt", tmp_path, text, *FLAGS_OF_SMALL_GPT, "--steps=1000000")
    assert process.stdout is not None
    while "step" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    steps = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert 0 < steps < 1000000
    assert len(checkpoint["records"]["gradwire"]["losses"]) == steps


def test_without_a_text_the_standard_library_is_read() -> None:
    text = read_text(None)
    assert text.equal(read_text(None))
    assert b"import " in bytes(text.tolist())


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.py").write_text("first")
    (tmp_path / "c.png").write_text("no text")
    assert bytes(read_text(tmp_path).tolist()) == b"firstsecond"


def test_the_command_line_overrides_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--preset=large", "--lr=0.5", "--resume"])
    config = parse(LoopConfig(), "An example", presets={"large": {"batch": 64, "lr": 0.1}})
    assert (config.batch, config.lr, config.resume) == (64, 0.5, True)
    assert config.until(steps=7).steps == 7


@pytest.mark.parametrize(
    ("arguments", "batch"),
    [([], 18), (["--preset=large"], 66), (["--batch=16"], 16), (["--preset=large", "--ba=5"], 5)],
)
def test_only_a_default_batch_is_rounded_up_to_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], batch: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", *arguments])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert parse(LoopConfig(), "An example", presets={"large": {"batch": 64}}).batch == batch
    assert ("to split it evenly over 3 ranks" in capsys.readouterr().out) == (batch in (18, 66))


@on_ranks(2)
def test_replicas_that_differ_fail_the_run(tmp_path: Path) -> None:
    """Spoil the model of rank 1 in the end."""
    config = GPTConfig(steps=2, batch=4, layers=1, width=4, out=tmp_path, device="cpu")
    run = Run(task(config), config)
    save = run._save

    def save_and_spoil() -> None:
        save()
        with torch.no_grad():
            next(run.trainees[OURS].module.parameters()).add_(hvd.rank())

    run._save = save_and_spoil  # type: ignore[method-assign]
    assert run() == 1
    hvd.barrier()
    assert json.loads((tmp_path / "summary.json").read_text())["replicas_identical"] is False


def test_a_wrong_value_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--batch=0"])
    with pytest.raises(SystemExit):
        parse(LoopConfig(), "An example")
    assert "batch must be positive, not 0" in capsys.readouterr().err
