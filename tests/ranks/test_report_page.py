"""The page that `gradwire report` makes of what ranks leave, whatever becomes of them."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path

import pytest

from gradwire.trainer.__main__ import main
from gradwire.trainer.tools.report.measured import read
from gradwire.trainer.tools.report.page import page
from tests.interpreter import python
from tests.pages import ROOT

SECTIONS = ["Steps", "Stragglers", "Bytes on the wire", "Operations", "Ranks, hosts and links"]

#: Five steps of a model of 40,000 bytes, of which rank 1 is slow; then what the first argument says.
TRAINS = """
import os, sys, time
import torch
import gradwire as hvd

hvd.init(timeout_s=40)
model = torch.nn.Linear(100, 100, bias=False)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), compression="fp16")
for step in range(5):
    time.sleep(0.1 * hvd.rank())
    model(torch.randn(2, 100)).sum().backward()
    optimizer.step()
exec(sys.argv[1])
"""

LEAVES = "open(f'sent{hvd.rank()}', 'w').write(str(optimizer.stats.bytes_sent))"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAINS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "executable", python())
    return tmp_path


def text_of(made: str) -> str:
    """Return what a page says, in words with one space between."""
    return " ".join(html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", made, flags=re.DOTALL)).split())


def test_two_ranks(folder: Path) -> None:
    assert main(["report", "--out", "page.html", "-np", "2", "train.py", LEAVES]) == 0
    made = (folder / "page.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", made) == SECTIONS
    assert not re.search(r"""(?:src|href)="(?!data:)|url\(|<script""", made)  # it needs nothing beside it
    said = text_of(made)
    sent = sum(int((folder / f"sent{rank}").read_text()) for rank in range(2))
    assert 200_000 <= sent < 201_000  # halves of 40,000 bytes, and some that count
    for part in (
        "gradwire report -np 2 train.py",
        "2 ranks 1 host 5 steps",
        f"all ranks together {sent / 1e3:.2f} kB in all steps: 2.00 times fewer",
        "The other rank waited longest for rank 1 :",
        "in 4 exchanges",
    ):
        assert part in said
    assert re.search(r"allreduce \w+ fp16 shared memory 5 40\.00 kB [\d.]+ m?s [\d.]+ m?s [\d.]+ .B/s", said), said
    assert {path.name for path in folder.iterdir()} == {"train.py", "page.html", "sent0", "sent1"}


@pytest.mark.parametrize(
    ("ending", "status", "parts"),
    [
        ("raise ValueError('no <data>')", 1, ["ended with exit code 1", "ValueError: no <data>"]),
        ("os.kill(os.getpid(), 9)", 137, ["was killed by SIGKILL (9)"]),
    ],
)
def test_a_command_that_fails(folder: Path, ending: str, status: int, parts: list[str]) -> None:
    assert main(["report", "--", python(), "train.py", ending]) == status
    said = text_of((folder / "report.html").read_text())
    for part in (*parts, "1 rank 1 host 5 steps"):
        assert part in said


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "no command is given"),
        (["--out", "a.html", "--"], "no command is given"),
        (["nowhere"], "cannot start nowhere: No such file"),
        (["--out", "nowhere/a.html", "train.py"], "--out nowhere/a.html: No such file"),
        (["--out", ".", "train.py"], "--out . is a folder"),
    ],
)
def test_what_cannot_be_run_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    status: object
    try:
        status = main(["report", *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert error in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def leave(folder: Path, world: int, *ranks: tuple[int, list[int], int]) -> None:
    """Write what killed ranks leave of the steps of an optimizer. ranks: the rank, the ranks of the exchange, and the steps."""
    for rank, group, lines in ranks:
        header = json.dumps({"rank": rank, "ranks": group, "world": world, "made": float(world)})
        rows = [json.dumps([0.5, 0.2, 100, 400, step, 0.3 - 0.1 * rank]) for step in range(lines)]
        (folder / f"steps-{world}-{rank}.jsonl").write_text("\n".join([header, *rows, "[0.5, 0."]))


def test_what_a_killed_rank_has_left_counts(tmp_path: Path) -> None:
    """It has fewer steps, and half a line; and there is another optimizer, of another two ranks."""
    leave(tmp_path, 0, (0, [0, 1], 4), (1, [0, 1], 3), (2, [2, 3], 1))
    first, second = read(tmp_path).trainings
    assert (first.ranks, first.size, first.steps) == ([0, 1], 2, 4)
    assert first.stragglers is not None
    assert first.stragglers.cost_s == pytest.approx((0.0, 0.1))
    assert first.stragglers.steps == 2  # of three that both have left, but for the first
    assert (second.ranks, second.size, second.steps, second.stragglers) == ([2], 2, 1, None)
    said = text_of(page("c", [], -9, "", "", read(tmp_path)))
    assert "all ranks together 700 B in all steps: 4.00 times fewer bytes than the 2.80 kB" in said


def test_the_bandwidth_is_that_of_one_rank(tmp_path: Path) -> None:
    """Two groups of as many ranks make the same operation, one of them a hundred times as often."""
    for rank, calls in ((0, 100), (1, 100), (2, 1), (3, 1)):
        header = {"rank": rank, "size": 2, "routes": ["CPU tensors: TCP"]}
        totals = [["allreduce", "none", "ring", "cpu", 20, calls, calls * 1e6, calls * 0.01, 1e8]]
        (tmp_path / f"operations-{rank}.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(totals)}\n")
    (found,) = read(tmp_path).operations
    assert (found.calls, found.nbytes, found.rate) == (100, 100_000_000, pytest.approx(1e8))


def test_worlds_of_an_elastic_job_are_told_apart(tmp_path: Path) -> None:
    """In the last world, a process that joined made its first optimizer, and the others made their third."""
    leave(tmp_path, 0, (0, [0, 1, 2], 2), (1, [0, 1, 2], 2), (2, [0, 1, 2], 1))
    leave(tmp_path, 1, (0, [0, 1], 3), (1, [0, 1], 3))
    leave(tmp_path, 2, (0, [0, 1, 2], 5), (1, [0, 1, 2], 5), (2, [0, 1, 2], 5))
    measured = read(tmp_path)
    assert [(each.generation, each.number, each.ranks) for each in measured.trainings] == [
        (0, 1, [0, 1, 2]),
        (1, 1, [0, 1]),
        (2, 1, [0, 1, 2]),
    ]
    made = page("c", [], 0, "", "", measured)
    assert re.findall("<h2>(Steps.*?)</h2>", made) == [f"Steps in generation {world}" for world in range(3)]
    assert "5 steps in generation 2 500 ms median step" in text_of(made)
