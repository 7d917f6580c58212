"""Published figures of utilization, beside the predictions of the cost model of `gradwire simulate`."""

from __future__ import annotations

from gradwire.bench.simulate.exchange import AllreducePredictor
from gradwire.bench.simulate.presets import network
from gradwire.bench.utilization.report import PublishedRow

PUBLISHED_PARAMETERS, PUBLISHED_RANKS = 30_800_000, 4
#: Figures that others have published for such a job over TCP, uncompressed: the percentage of the time that GPUs compute, by
#: (Mbit/s, steps between exchanges).
PUBLISHED = {
    (50, 1): 0.07,
    (200, 1): 0.32,
    (1000, 1): 1.74,
    (50, 8): 0.55,
    (200, 8): 2.48,
    (1000, 8): 12.35,
    (50, 32): 2.41,
    (200, 32): 10.01,
    (1000, 32): 36.01,
    (50, 128): 11.55,
    (200, 128): 36.09,
    (1000, 128): 71.52,
}
FITTED = (1000, 128)
"""The published figure from which the time of a step, which is not published, is calculated."""


def predict_published() -> list[PublishedRow]:
    """Return the published figures beside those of the cost model of `gradwire simulate`, which has the links' rates."""
    exchange_s = {
        mbit: AllreducePredictor(network(mbit / 1000, 1, 1).costs(PUBLISHED_RANKS)).seconds(PUBLISHED_PARAMETERS)
        for mbit, _ in PUBLISHED
    }
    busy = PUBLISHED[FITTED] / 100
    step_s = exchange_s[FITTED[0]] * busy / (1 - busy) / FITTED[1]
    rows = []
    for (mbit, every), percentage in PUBLISHED.items():
        computing_s = every * step_s
        computing_over_transfer = computing_s / exchange_s[mbit]
        predicted = computing_s / (computing_s + exchange_s[mbit])
        rows.append(
            PublishedRow(mbit, every, percentage / 100, predicted, computing_over_transfer, (mbit, every) == FITTED)
        )
    return rows
