"""The flags, the predictions, the table and the picture of `bench utilization`."""

from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from gradwire.bench.utilization.published import FITTED, predict_published
from gradwire.bench.utilization.report import LossRow, UtilizationRow, draw, format_table
from gradwire.bench.utilization.run import parse_arguments


@pytest.mark.parametrize(
    "flags",
    ["--rates 50", "--every 0", "--every 8,", "--codecs zip", "--hosts 1", "--every 100", "--loss-steps 100"],
)
def test_flags_that_are_refused(flags: str) -> None:
    with pytest.raises(SystemExit) as failure:
        parse_arguments(flags.split())
    assert failure.value.code == 2


def test_losses_are_measured_at_the_fastest_rate_which_is_the_last() -> None:
    chosen = parse_arguments(["--rates", "1gbit,50mbit,200mbit", "--every", "1,16"])
    assert (chosen.rates, chosen.every) == (["50mbit", "200mbit", "1gbit"], [1, 16])


def test_predictions_of_published_figures() -> None:
    rows = {(row.mbit, row.every): row for row in predict_published()}
    fitted = rows[FITTED]
    assert fitted.predicted == pytest.approx(fitted.published)
    # A ring sends 1.5 times 123.2 MB; 1448 of 1538 bytes of a packet are payload: 1.57 s at 1 Gbit/s.
    computing_s = 1.57 * 0.7152 / (1 - 0.7152) / 128
    assert rows[1000, 1].predicted == pytest.approx(computing_s / (computing_s + 1.57), rel=0.01)
    assert rows[50, 32].predicted == pytest.approx(32 * computing_s / (32 * computing_s + 20 * 1.57), rel=0.01)


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    rows = [
        UtilizationRow(codec, every, "1gbit", 10.0, 5.0, 4.0, 1000, 2.0 * every, 0.5, True)
        for codec in ("none", "int8")
        for every in (1, 128)
    ]
    losses = [LossRow(row.codec, row.every, "average", 1.25, 2e6, True) for row in rows]
    meta = {"device": "a CPU", "torch": "2", "network": "4 hosts", "parameters": 1_000_000, "context": 8, "batch": 1}
    meta |= {"rounds": 3, "loss_steps": 9, "time": "", "published": [asdict(row) for row in predict_published()]}
    lines = format_table(rows, losses, meta)
    assert sum(line.endswith(" 50.0%") for line in lines) == len(rows)
    assert sum(line.endswith("   1.2500      2.000") for line in lines) == len(losses)
    draw(rows, meta, tmp_path / "out.png")
    assert (tmp_path / "out.png").exists()
