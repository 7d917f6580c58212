"""What the layerwise optimizers share: the ratio of a layer's norm to that of its update."""

from __future__ import annotations

import torch
from torch import Tensor


def trust_ratios(numerators: list[Tensor], denominators: list[Tensor]) -> list[Tensor]:
    """Return each numerator over its denominator, both of no dimension, and 1 where either is 0."""
    above, below = torch.stack(numerators), torch.stack(denominators)
    usable = (above > 0) & (below > 0)
    return list(torch.where(usable, above / torch.where(usable, below, 1), 1).unbind())
