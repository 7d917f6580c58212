"""The largest numbers, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.collectives.compression.sparse import Sparse


@dataclass(frozen=True)
class TopK(Sparse):
    """The k = ceil(ratio * n) numbers of largest magnitude, as indices and values; of equal ones those that come first.

    Contraction: delta >= k / n (Stich et al. 2018). NaN and Inf are the largest, so that some reach every rank.

    It needs no state to be fast: the k-th largest is guessed from a sample of c = values + residual before the one pass
    that adds them, which gathers what reaches the guess; it is then found exactly among what was gathered. What is sent
    does not depend on the guess.
    """

    name: ClassVar[str] = "topk"
    needs_feedback: ClassVar[bool] = True
    ratio: float = 0.01
