"""What local updates have cost on a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LocalReport:
    """The costs of local updates on this rank.

    steps: the number of steps of the optimizer, including those before a checkpoint that was loaded.
    warmup_bytes_per_step: bytes of gradients, per step of the warm-up.
    bytes_per_step: bytes of pseudo-gradients, per step after the warm-up.
    inner_bytes_per_step: bytes of gradients to inner ranks, per step after the warm-up.
    bytes_sent: all bytes that this rank has sent since the optimizer was made; in an elastic job, since the present world began.
    bytes_saved: a ratio: the bytes of the pseudo-gradients without compression, divided by those that this rank has sent.
    wait_share: the share of the time since then for which this rank has waited for others.
    batch_per_rank: the batch size of this rank, as given to report(). global_batch: batch_per_rank times the number of ranks.
    """

    steps: int
    warmup_bytes_per_step: float
    bytes_per_step: float
    inner_bytes_per_step: float
    bytes_sent: int
    bytes_saved: float
    wait_share: float
    batch_per_rank: int | None
    global_batch: int | None

    def __str__(self) -> str:
        warmup, inner, batches = "", "", ""
        saved = "uncompressed" if self.bytes_saved == 1 else f"{self.bytes_saved:.1f} times fewer than uncompressed"
        if self.warmup_bytes_per_step:
            warmup = f"{self.warmup_bytes_per_step / 1e3:.1f} KB a step of the warm-up, then "
        if self.inner_bytes_per_step:
            inner = f", and {self.inner_bytes_per_step / 1e3:.1f} KB to inner ranks"
        if self.batch_per_rank is not None:
            batches = f"; a batch of {self.batch_per_rank} a rank, {self.global_batch} in all"
        return (
            f"{self.steps} steps: {warmup}{self.bytes_per_step / 1e3:.1f} KB a step, {saved}{inner}; "
            f"{self.bytes_sent / 1e6:.3f} MB in all; {self.wait_share:.1%} of the time waiting{batches}"
        )
