"""What a training run shows: the line of progress, and the picture of its losses."""

import itertools
import math

import pytest
from matplotlib.colors import to_rgba

from gradwire.trainer.examples.report import BASELINE, OURS, Record, RunReport, progress, running_means


def record(steps: int, validated: list[int]) -> Record:
    """A run whose losses fall, with a ripple."""
    losses = [2 + 5 * math.exp(-step / 50) + 0.1 * (-1) ** step for step in range(steps)]
    return Record(losses, [0.01] * steps, 0.1, [(step, losses[step - 1], 0.5) for step in validated])


def report(**records: Record) -> RunReport:
    return RunReport("an example", "token", 100, 2, accuracy=False, records=records)


@pytest.mark.parametrize(
    ("steps", "validated", "shown"),
    [
        (812, [*range(100, 812, 100), 812], [*range(100, 701, 100), 812]),  # 800 would touch 812
        (850, [*range(100, 850, 100), 850], [*range(100, 801, 100), 850]),
        (800, [*range(100, 801, 100)], [*range(100, 801, 100)]),
        (7, [7], [7]),
    ],
)
def test_the_points_of_a_picture_do_not_touch(steps: int, validated: list[int], shown: list[int]) -> None:
    figure = report(**{OURS: record(steps, validated)}).figure()
    (axes,) = figure.axes
    (points,) = [line for line in axes.lines if "validation" in str(line.get_label())]
    assert list(points.get_xdata()) == shown  # type: ignore[arg-type]
    figure.draw_without_rendering()
    places = axes.transData.transform(points.get_xydata())[:, 0]  # type: ignore[arg-type]
    size = points.get_markersize() * figure.dpi / 72
    assert all(right - left > size for left, right in itertools.pairwise(places))


@pytest.mark.parametrize("steps", [5, 400])
def test_every_line_of_a_picture_has_a_name(steps: int) -> None:
    both = {OURS: record(steps, [steps]), BASELINE: record(steps, [steps])}
    (axes,) = report(**both).figure().axes
    legend = axes.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [line.get_label() for line in axes.lines]
    assert len(set(names)) == len(names) == (4 if steps == 5 else 6)
    if steps == 400:
        assert f"{OURS}, mean of 41 steps" in names
    for line in axes.lines:
        assert (
            to_rgba(line.get_color())[:3] == to_rgba("tab:blue" if OURS in str(line.get_label()) else "tab:orange")[:3]
        )


def test_means_are_centred_and_do_not_follow_the_last_value() -> None:
    assert running_means([1.0, 2.0, 6.0, 4.0, 0.0], reach=1) == [1.0, 3.0, 4.0, 10 / 3, 2.0]
    assert running_means([3.0], reach=5) == [3.0]
    calm, outlier = [1.0] * 100, [1.0] * 99 + [22.0]
    rise = running_means(outlier, reach=20)[-1] - running_means(calm, reach=20)[-1]
    assert rise == pytest.approx(21 / 21)


def test_the_progress_says_of_which_step_a_validation_is(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(0, "token", 100) as show:
        show(1.0, record(120, [100]))
        show(1.0, record(120, [100, 120]))
    stale, fresh = capsys.readouterr().out.splitlines()
    assert stale.endswith(" at step 100")
    assert fresh.split()[-2] == "validation"
