"""The examples of the rules, run as a user does, and what each shows."""

import re
from pathlib import Path

import pytest
import torch

from tests.pages import ROOT
from tests.ranks.programs import launch_text

EXAMPLES = ROOT / "docs/examples"
NOT_OF_A_RULE = {"files_link", "one_file", "train", "tensor_parallel", "pipeline"}
RULES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in NOT_OF_A_RULE)


@pytest.mark.parametrize("name", RULES)
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 48


def run(name: str, folder: Path) -> str:
    return launch_text((EXAMPLES / f"{name}.py").read_text(), folder)


@pytest.mark.wide
def test_ranks_that_step_alone_learn_and_meet(tmp_path: Path) -> None:
    """Have the same loss on all ranks whenever they have met."""
    said = run("local_updates", tmp_path)
    losses: dict[int, list[str]] = {}
    for step, loss in re.findall(r"rank \d, step (\d+): loss ([0-9.]+)", said):
        losses.setdefault(int(step), []).append(loss)
    assert sorted(losses) == list(range(50, 351, 50))
    assert all(len(of_ranks) == 2 and len(set(of_ranks)) == 1 for of_ranks in losses.values())
    assert float(losses[350][0]) < 0.5 * float(losses[50][0])
    assert "350 steps: " in said


def test_a_large_batch_learns_with_rates_of_its_own(tmp_path: Path) -> None:
    """Learn after a warm-up of two epochs to the rate of all ranks' batch."""
    said = run("lars_lamb", tmp_path)
    for name, reached in (("LARS", 10), ("LAMB", 0.02)):
        found = re.findall(rf"{name}, epoch (\d): loss ([0-9.]+), rate ([0-9.]+)", said)
        assert [int(epoch) for epoch, _, _ in found] == [1, 2, 3, 4, 5, 6]
        losses, rates = [float(loss) for _, loss, _ in found], [float(rate) for _, _, rate in found]
        assert rates == pytest.approx([0.75 * reached, *[reached] * 5])
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.6 * losses[0]


@pytest.mark.wide
def test_ranks_without_locks_learn_one_model(tmp_path: Path) -> None:
    said = run("hogwild", tmp_path)
    errors = re.findall(r"rank (\d): error ([0-9.]+), from ([0-9.]+)", said)
    assert {rank for rank, _, _ in errors} == {"0", "1"}
    assert errors[0][1:] == errors[1][1:]
    assert float(errors[0][1]) < 0.1 * float(errors[0][2])


@pytest.mark.wide
def test_ranks_share_the_states_of_an_optimizer(tmp_path: Path) -> None:
    found = re.findall(r"rank \d of 2: loss ([0-9.]+), (\d+) bytes", run("shard_states", tmp_path))
    losses, kept = [float(loss) for loss, _ in found], [int(nbytes) for _, nbytes in found]
    steps = 4 * 4  # a number for each parameter, on each rank
    assert len(found) == 2
    assert max(losses) < 4.0, "the sum of eight normal numbers has variance 8"
    assert sum(kept) == 8 * (8 * 256 + 256 + 256 + 1) + 2 * steps
    assert max(kept) < 0.6 * sum(kept)


def test_a_run_that_broke_goes_on_with_the_same_command(tmp_path: Path) -> None:
    """Die once while saving, as rank 0, where rank 1 has saved already: the step that both have counts."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    script = (EXAMPLES / "resume.py").read_text()
    renames = '        (folder / "unfinished").rename'
    assert renames in script
    planted = """
        if step == 40 and hvd.rank() == 0:
            import time

            until = time.monotonic() + 60
            while not Path("checkpoints/rank1of2/40.pt").exists() and time.monotonic() < until:
                time.sleep(0.01)
            raise ValueError("planted")
"""
    with pytest.raises(AssertionError, match="planted"):
        launch_text(script.replace(renames, planted + renames), broken)
    assert [steps_in(broken / f"checkpoints/rank{rank}of2") for rank in (0, 1)] == [{"20"}, {"20", "40"}]
    for folder in (whole, broken):
        launch_text(script, folder)
    assert all(steps_in(folder) == {"60"} for folder in broken.glob("checkpoints/*"))
    for name in ("model.pt", "checkpoints/rank0of2/60.pt", "checkpoints/rank1of2/60.pt"):
        expected, got = (torch.load(folder / name, weights_only=True) for folder in (whole, broken))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.wide
def test_a_run_goes_on_with_other_numbers_of_ranks_or_says_why_not(tmp_path: Path) -> None:
    def go_on(steps: int, processes: int) -> str:
        script = (EXAMPLES / "resume.py").read_text()
        assert "SAVE_EVERY = 66," in script
        return launch_text(script.replace("SAVE_EVERY = 66,", f"SAVE_EVERY = {steps},"), tmp_path, processes)

    said = [go_on(24, 1), go_on(45, 3), go_on(66, 2)]
    for each, first in zip(
        said, ("starts at step 1", "continues after step 20", "continues after step 40"), strict=True
    ):
        assert first in each
    losses = [float(loss) for each in said for loss in re.findall(r"loss ([0-9.]+), saved", each)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert {size for size in (1, 2, 3) if any(tmp_path.glob(f"checkpoints/rank*of{size}/*.pt"))} == {2, 3}
    for path in tmp_path.glob("checkpoints/rank0of*/*.pt"):
        path.rename(path.with_stem("80"))
    with pytest.raises(AssertionError, match=r"no step has a file for each of 2 ranks; by rank, .*\(0, 2, 80\)"):
        go_on(90, 2)


def steps_in(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.pt")}
