"""Test what the report of local updates says."""

from dataclasses import replace

from gradwire import LocalReport


def test_a_report_says_plainly_which_bytes_are_which() -> None:
    report = LocalReport(
        steps=60,
        warmup_bytes_per_step=20e3,
        bytes_per_step=500,
        inner_bytes_per_step=4e3,
        bytes_sent=580_000,
        bytes_saved=2,
        wait_share=0.25,
        batch_per_rank=8,
        global_batch=32,
    )
    assert str(report) == (
        "60 steps: 20.0 KB a step of the warm-up, then 0.5 KB a step, 2.0 times fewer than uncompressed, and 4.0 KB to inner "
        "ranks; 0.580 MB in all; 25.0% of the time waiting; a batch of 8 a rank, 32 in all"
    )
    alone = replace(
        report,
        warmup_bytes_per_step=0,
        inner_bytes_per_step=0,
        bytes_sent=30_000,
        batch_per_rank=None,
        global_batch=None,
    )
    assert str(alone) == (
        "60 steps: 0.5 KB a step, 2.0 times fewer than uncompressed; 0.030 MB in all; 25.0% of the time waiting"
    )
