"""The flags, the table and the picture of `bench rules`, and when a loss is reached."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from gradwire.bench.rules.competitors import CODED, RULES, UNLIKE, CompetitorSpec, competitor_spec
from gradwire.bench.rules.plot import draw
from gradwire.bench.rules.run import parse_arguments, reached
from gradwire.bench.rules.table import RuleRow, format_header, format_row
from gradwire.bench.rules.training import Point, Slowness


def test_a_competitor_is_a_rule_with_a_codec_and_a_share() -> None:
    assert competitor_spec("ddp") == CompetitorSpec("ddp", "ddp", "none", 1.0)
    assert competitor_spec("diloco+chunktopk@0.6") == CompetitorSpec("diloco+chunktopk@0.6", "diloco", "chunktopk", 0.6)


@pytest.mark.parametrize("text", ["", "dpp", "ddp+int8", "diloco+int9", "diloco+", "ddp@", "ddp@x", "ddp@0", "ddp@nan"])
def test_what_is_no_competitor_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        competitor_spec(text)


def test_sets_name_rules() -> None:
    assert RULES.keys() >= CODED | UNLIKE


def test_defaults() -> None:
    chosen = parse_arguments([])
    assert chosen.competitors[0].text == "synchronous"
    assert (chosen.steps, chosen.seconds, chosen.seeds, chosen.slow) == (600, None, [0], None)
    assert parse_arguments(["--seconds", "5"]).steps is None
    assert parse_arguments(["alone", "--slow", "3:0.25", "--seeds", "1,2"]).slow == Slowness(3, 0.25)


@pytest.mark.parametrize(
    "flags",
    [
        *(
            "--steps 0",
            "--seconds 0",
            "--seconds 1 --steps 1",
            "--seeds 1,x",
            "--slow 3",
            "--slow x:1",
            "--every 0",
            "no",
        ),
        *("--k 0", "--k 6", "--k 1028", "streaming --every 3 --delay 0", "streaming --every 8 --delay 2"),
    ],
)
def test_wrong_flags_are_refused(flags: str) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(flags.split())


def test_flags_that_go_together_are_taken() -> None:
    assert parse_arguments(["--k", "1024"]).k == 1024
    assert parse_arguments(["streaming", "--every", "8", "--delay", "1"]).delay == 1
    assert parse_arguments(["diloco", "--every", "1"]).every == 1  # the delay is of streaming


def test_where_a_loss_is_reached() -> None:
    curve = [Point(0, 0, 0, 5.0), Point(100, 10, 1000, 4.0), Point(200, 20, 2000, 2.0)]
    assert reached(curve, Point(0, 0, 0, 3.0)) == Point(150, 15, 1500, 3.0)
    assert reached(curve, Point(0, 0, 0, 2.0)) == curve[-1]
    assert reached(curve, Point(0, 0, 0, 1.9)) is None


def row(competitor: str, falls: float) -> RuleRow:
    losses = [5.5 * falls**number for number in range(13)]
    curve = [
        {"tokens": 1e5 * number, "seconds": 2.0 * number, "sent_bytes": 1e6 * number, "loss": loss}
        for number, loss in enumerate(losses)
    ]
    return RuleRow(
        competitor, 0, 4, 1000, 12, 24.0, 5e4, 12e6, 0.25, losses[-1], 1.125, 0.5, None, 0.25, None, "said", curve
    )


def test_table_and_picture(tmp_path: Path) -> None:
    rows = [row("synchronous", 0.92), row("diloco+chunktopk", 0.93), row("alone", 0.95)]
    settings = {**vars(parse_arguments(["--steps", "12", "--late", "drop"])), "context": 128}
    meta = settings | {"network": None, "slow": "rank 3 sleeps 1 s in each step", "device": "a processor", "torch": "2"}
    assert format_row(rows[0]).split()[-5:] == ["1.1250", "0.500", "-", "0.250", "-"]
    assert format_row(rows[0]).split()[6] == "25.0%"
    assert format_row(replace(rows[0], wait_share=None)).split()[6] == "-"
    assert "12 steps" in format_header(meta, rows[0])[0]
    assert "staleness 4, late drop," in format_header(meta, rows[0])[1]
    draw(rows, meta, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
