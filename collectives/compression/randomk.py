"""Numbers drawn by lot, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradwire.collectives.compression.seeds import mixed
from gradwire.collectives.compression.sparse import Sparse
from gradwire.collectives.kernels.wire import pad16


@dataclass(frozen=True)
class RandomK(Sparse):
    """k = ceil(ratio * n) numbers, one from each of k parts of the buffer; which ones follows from n, seed and step
    alone.

    So no indices are sent, and codes of ranks that agree on the codec can be added as they are: a wire is k float32
    (and zeros up to 16 bytes). The decoder must know what the encoder drew, which is why seed and step are settings and
    encode's seed, which differs from rank to rank, is not used: call `at(step)` for the codec of a step.

    Every number is drawn with probability k / n. As it stands biased, for error feedback, with contraction delta = k /
    n on average; multiplied by n / k (decode's scale) unbiased, omega = n / k - 1 (Stich et al. 2018; Wangni et al.
    2018). If any number is not finite, whether it was drawn or not, all that is sent is NaN, so that every rank sees
    it.
    """

    name: ClassVar[str] = "randomk"
    summable: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.float32
    ratio: float = 0.01
    seed: int = 0
    step: int = 0

    def at(self, step: int) -> RandomK:
        """Return the codec of the step of that number, the same on all ranks."""
        return replace(self, step=step)

    def wire_bytes(self, numel: int) -> int:
        return pad16(4 * self.count(numel))

    def _parameters(self, numel: int) -> tuple[int, ...]:
        # The seed of the draw is mixed, as otherwise the draws of neighbouring steps would be alike, shifted.
        return self.count(numel), mixed(self.step, self.seed)
