"""What `bench failures` makes of the log of a run."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from gradwire.bench.failures.kills import KillRecord
from gradwire.bench.failures.outcome import BLOCK_STEPS, Outcome, compare, described
from gradwire.bench.failures.run import earlier
from gradwire.bench.failures.ways import kill_all, processes_of
from tests.harness import wait_until

BEGAN, SECONDS = 1000.0, 300.0


def log_of(path: Path, steps: list[tuple[float, int, float]], ends_within: str = "") -> Path:
    """Write a log of steps: seconds since the beginning, step, loss."""
    lines = (json.dumps({"time": BEGAN + at, "step": step, "loss": loss, "process": 7}) for at, step, loss in steps)
    path.write_text("".join(f"\n{line}" for line in lines) + ends_within)
    return path


def test_a_run_by_its_log(tmp_path: Path) -> None:
    """A rank is killed at 50.5 s, while it logs a step; training goes back to step 40, and stops for 150 s at step 100."""
    forth = [(float(step), step, 2.0) for step in range(1, 51)]
    again = [(60.0 + step - 40, step, 1.0) for step in range(41, 101)]
    last = [(270.0, 101, 1.0)]
    log = log_of(tmp_path / "log", [*forth, *again, *last], '\n{"time": 13')
    run = described("disk", 0, log, BEGAN, SECONDS, [KillRecord(50.5, of_host=False, of_rank_0=True)])
    assert (run.steps, run.hangs) == (101, 1)
    assert run.outages_s == [60.0 + 52 - 40 - 50.5]
    assert run.losses == [(40 * 2.0 + 10 * 1.0) / BLOCK_STEPS, 1.0]
    assert (run.reached[0], run.reached[-1]) == (0, 101)
    assert run.reached == sorted(run.reached)
    undisturbed = Outcome("undisturbed", 0, steps=202, losses=[1.0, 0.8, 0.7])
    compare([undisturbed, run])
    assert run.goodput == 0.5
    assert run.loss_over == pytest.approx(0.25)
    assert described("torchrun", None, tmp_path / "none", BEGAN, 60.0, []).hangs == 1  # a job that does not end
    assert Outcome.from_record(json.loads(json.dumps(asdict(run)))) == run


def test_ways_of_other_settings_commits_and_machines_are_not_put_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    meta = {"minutes": 2.0, "commit": "abc", "device": "EPYC, 2 cores"}
    path.write_text(json.dumps({"meta": meta, "rows": [asdict(Outcome("undisturbed", 0, steps=9))]}))
    assert [run.steps for run in earlier(path, meta, ["disk"])] == [9]
    assert earlier(path, meta | {"minutes": 20.0}, ["undisturbed"]) == []
    for name, other in {"minutes": 20.0, "commit": "abd", "device": "Xeon, 2 cores"}.items():
        with pytest.raises(ValueError, match=rf"other settings \({name} {meta[name]}\)"):
            earlier(path, meta | {name: other}, ["disk"])


def test_only_processes_of_a_log_are_killed(tmp_path: Path) -> None:
    """Not one that shows it, whose argument has the name of the log in it."""
    log = tmp_path / "steps.jsonl"
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen([*wait, f"+F {log}"]) as pager, subprocess.Popen([*wait, str(log)]) as training:
        try:
            wait_until(lambda: processes_of(log) == [training.pid])
            kill_all(log, 10.0)
            assert training.wait(10) == -signal.SIGKILL
            assert pager.poll() is None
        finally:
            pager.kill()
            training.kill()
