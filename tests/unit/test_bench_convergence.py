"""The flags, the bytes and the picture of `bench convergence`."""

import math
from pathlib import Path

import pytest
from torch import nn

pytest.importorskip("matplotlib")

from gradwire.bench.training.convergence import MODELS, parse_arguments, wire_bytes
from gradwire.bench.training.convergence_plot import draw, kinds_of, smoothed
from gradwire.bench.training.convergence_table import ConvergenceRow, format_row
from gradwire.trainer.reducer.compression import NAMES


def test_defaults_are_both_models_and_all_codecs() -> None:
    chosen = parse_arguments([])
    assert chosen.models == ["bytes_gpt", "digits_cnn"]
    assert chosen.codecs == list(NAMES)
    assert (chosen.steps, chosen.seed) == (400, 0)


@pytest.mark.parametrize("flags", ["--models gpt", "--codecs int8,int9", "--steps 0", "--seed -1"])
def test_wrong_flags_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(flags.split())
    assert flags.split()[1].split(",")[-1] in capsys.readouterr().err


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_batch_can_be_shared_out(model: str, size: int) -> None:
    assert MODELS[model].config(size).batch % size == 0


def test_bytes_of_a_step() -> None:
    """Count for 4 ranks 6/4 of a buffer. A bias and a small matrix go as they are, but for casts."""
    module = nn.Sequential(nn.Linear(128, 64), nn.Linear(16, 16, bias=False))
    large, small = 128 * 64, 64 + 16 * 16
    assert wire_bytes(module, "none", 4) == 1.5 * 4 * (large + small)
    assert wire_bytes(module, "fp16", 4) == 1.5 * 2 * (large + small)
    assert wire_bytes(module, "int8", 4) == 1.5 * (large + large // 256 * 4 + 4 * small)
    assert wire_bytes(module, "topk", 4) == 6 * 2 * 4 * 24 + 1.5 * 4 * small  # of 2048 each 21, padded
    assert wire_bytes(module, "powersgd", 4) == 1.5 * 4 * (4 * (128 + 64) + small)


def row(codec: str, losses: list[float]) -> ConvergenceRow:
    return ConvergenceRow(
        "m", codec, codec, 4, 1000, len(losses), 0, losses[-1], losses[-1], 1.25, 0.5, 6000.0, 1.0, True, losses
    )


def test_smoothing_keeps_to_whole_windows() -> None:
    steps, losses = smoothed(row("none", [float(step) for step in range(1, 81)]))
    assert (steps[0], steps[-1]) == (3, 78)
    assert losses == pytest.approx(steps)
    assert smoothed(row("none", [3.0, 2.0])) == ([1, 2], [3.0, 2.0])


def test_every_codec_has_a_panel_and_only_none_has_none() -> None:
    rows = [row(name, [1.0]) for name in (*NAMES, "new")]
    kinds = kinds_of(rows)
    assert kinds[-1] == ("others", [rows[-1]])
    assert sorted(each.codec for _, of_kind in kinds for each in of_kind) == sorted({*NAMES, "new"} - {"none"})
    assert kinds_of(rows[:1]) == []


def test_a_picture_even_of_a_run_that_diverged(tmp_path: Path) -> None:
    falling = [5 * 0.98**step for step in range(50)]
    rows = [row(name, falling) for name in NAMES] + [row("new", [*falling[:25], *[math.nan] * 25])]
    draw(rows, {"world_size": 4, "steps": 50, "seed": 0}, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert format_row(rows[0]).split() == ["none", "1.8580", "1.8580", "1.2500", "50.0%", "6000", "1.00", "identical"]
