"""What a DistributedOptimizer was made with: its rule and the exchange of gradients go by that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.trainer.gradients.combination import Combination
from gradwire.trainer.gradients.compression import Cast, Encoding, Policy


@dataclass
class Passes:
    """Counts calls of backward(), of which `per_step` come before every step of the optimizer.

    paused: while True, they only accumulate gradients, and are not counted; set by no_sync(), not for rules. ended: so many
    since the last exchange.
    """

    per_step: int
    paused: bool = False
    ended: int = 0

    def is_due(self) -> bool:
        """Return whether the pass that is running is the last before a step."""
        return not self.paused and self.ended + 1 >= self.per_step


@dataclass(frozen=True)
class Setup:
    """Holds what a DistributedOptimizer was made with.

    optimizer: the one that it wraps. combination: among whom and by which op. policy: what gradients travel as, in
    buckets of bucket_bytes. passes: counts calls of backward(), of which passes.per_step come before a step. groups:
    numbers of the groups of parameters, each of which shares a bucket where the dtypes allow it; the others are fused by
    bucket_bytes. sparse_as_dense: whether sparse gradients are to be made dense. returning: with sharded states, what
    travels when a rank has stepped its share of the parameters: how far they have moved, by this; None for the parameters
    as they are.
    """

    optimizer: torch.optim.Optimizer
    combination: Combination
    policy: Policy
    bucket_bytes: int
    passes: Passes
    groups: Mapping[Tensor, int] = field(default_factory=dict)
    sparse_as_dense: bool = False
    returning: Cast | Encoding | None = None
