"""The arguments of a DistributedOptimizer, for its rule and the exchange of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.trainer.reducer.combination import Combination
from gradwire.trainer.reducer.compression import Cast, Encoding, Policy


@dataclass
class Passes:
    """Counts calls of backward(). The optimizer steps after every `per_step` calls.

    paused: while True, calls only accumulate gradients, and are not counted; set by no_sync(), not by rules. ended: the number
    of calls since the last exchange.
    """

    per_step: int
    paused: bool = False
    ended: int = 0

    def is_due(self) -> bool:
        """Return whether the running pass is the last before a step."""
        return not self.paused and self.ended + 1 >= self.per_step


@dataclass(frozen=True, kw_only=True)
class Setup(Combination):
    """The arguments of a DistributedOptimizer: beside those of the Combination (communicator, op, predivide),

    optimizer: the wrapped optimizer. policy: selects the encodings of gradients.
    bucket_bytes: the maximum size of a bucket; None selects a default size for each kind of bucket. passes: counts calls of
    backward(); a step follows passes.per_step of them. groups: the group number of each parameter in a group; a group shares a
    bucket if the dtypes allow it, and other parameters are fused by bucket_bytes. sparse_as_dense: whether sparse gradients are
    made dense. gradient_as_bucket_view: whether parameter.grad is in a bucket's memory after an exchange. returning: with
    sharded states, the encoding of the parameters' movements, which a rank sends after it has stepped its share; None sends the
    parameters uncompressed. tried: the parameters for which it is known that the optimizer supports sharded states.
    """

    optimizer: torch.optim.Optimizer
    policy: Policy
    bucket_bytes: int | None
    passes: Passes
    groups: Mapping[Tensor, int] = field(default_factory=dict)
    sparse_as_dense: bool = False
    gradient_as_bucket_view: bool = True
    returning: Cast | Encoding | None = None
    tried: set[Tensor] = field(default_factory=set)
