"""What the report of local updates says."""

from __future__ import annotations

from trainer import LocalReport


def test_a_report_says_plainly_which_bytes_are_which() -> None:
    report = LocalReport(60, 20e3, 500, 4e3, 580_000, 2, 0.25, 8, 32)
    assert str(report) == (
        "60 steps: 20.0 KB a step of the warm-up, then 0.5 KB a step, 2.0 times fewer than uncompressed, and 4.0 KB to inner "
        "ranks; 0.580 MB in all; 25.0% of the time waiting; a batch of 8 a rank, 32 in all"
    )
    alone = LocalReport(60, 0, 500, 0, 30_000, 2, 0.25, None, None)
    assert str(alone) == (
        "60 steps: 0.5 KB a step, 2.0 times fewer than uncompressed; 0.030 MB in all; 25.0% of the time waiting"
    )
