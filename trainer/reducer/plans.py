"""Plans of an exchange: how large buckets are, and when they are exchanged."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from gradwire.trainer.reducer.layout import FIRST_BUCKET_BYTES, LARGE_BUCKET_BYTES, SMALL_BUCKET_BYTES


@dataclass(frozen=True)
class ExchangePlan:
    """How large buckets are, and when they are exchanged.

    bucket_bytes: the maximum size of a bucket in bytes; None: all gradients of a dtype, device and codec share one bucket. A
    gradient that is larger has a bucket of its own. at_end: True exchanges all buckets when backward() has computed all
    gradients, in the thread that called it, or in the background if gradients are sparse or have codecs other than casts. False
    exchanges each one as soon as it is full, beside backward(); then the first bucket holds at most 1 MB.
    """

    bucket_bytes: int | None = SMALL_BUCKET_BYTES
    at_end: bool = False

    def __post_init__(self) -> None:
        size = self.bucket_bytes
        if size is not None and not (type(size) is int and size > 0):
            raise ValueError(f"bucket_bytes must be a whole number > 0 or None, not {size!r}")
        if not isinstance(self.at_end, bool):
            raise ValueError(f"at_end must be True or False, not {self.at_end!r}")

    def __str__(self) -> str:
        size = "in one bucket" if self.bucket_bytes is None else f"in buckets of {self.bucket_bytes / (1 << 20):.3g} MB"
        return f"{size} {'after' if self.at_end else 'beside'} backward()"


USUAL = ExchangePlan()


def limits(plan: ExchangePlan) -> tuple[float, float]:
    """Return the maximum bytes of the first bucket, and of each other one."""
    others = math.inf if plan.bucket_bytes is None else plan.bucket_bytes
    return (others if plan.at_end else FIRST_BUCKET_BYTES), others


def rivals(nbytes: int) -> list[ExchangePlan]:
    """Return the plans that may be better than the usual one for gradients of so many bytes in sum."""
    if nbytes <= FIRST_BUCKET_BYTES:  # one bucket in any case
        return []
    other = LARGE_BUCKET_BYTES if nbytes > 4 * LARGE_BUCKET_BYTES else SMALL_BUCKET_BYTES // 4
    return [ExchangePlan(None, at_end=True), ExchangePlan(other)]


def check_plan(plan: object, bucket_bytes: int | None, usual_bytes: int | None) -> ExchangePlan | Path | None:
    """Return the plan that these arguments of an optimizer ask for. usual_bytes: the size of buckets without either argument.
    Raises TypeError or ValueError for invalid arguments."""
    if plan is not None and bucket_bytes is not None:
        raise ValueError(
            f"exchange_plan and bucket_bytes both set the size of buckets: leave out bucket_bytes={bucket_bytes!r}"
        )
    if isinstance(plan, str | os.PathLike):
        return Path(plan)
    if not isinstance(plan, ExchangePlan | None):
        raise TypeError(f"exchange_plan must be an ExchangePlan, a path, or None, not {plan!r}")
    size = usual_bytes if bucket_bytes is None else bucket_bytes
    return plan if size is None or plan is not None else ExchangePlan(size)
