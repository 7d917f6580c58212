"""How gradients are exchanged: the ranks, the op, and the other arguments of a DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.collectives import Communicator, PreparedOperation, Work
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.feedback import Feedback
from gradwire.trainer.reducer.arguments import Average
from gradwire.trainer.reducer.compression import Cast, Encoding, Policy
from gradwire.trainer.reducer.plans import ExchangePlan
from gradwire.trainer.reducer.traffic import Traffic


@dataclass(frozen=True)
class Combination:
    """The Communicator and the op, "sum" or "average", that combine numbers. The numbers are divided by `predivide` before the
    operation, and multiplied by it afterwards. in_shares: whether each rank needs only its share of the result, see
    Communicator.shares(). traffic: counts the bytes sent; replace() keeps it."""

    communicator: Communicator
    op: str
    predivide: float = 1.0
    in_shares: bool = False
    traffic: Traffic = field(kw_only=True, compare=False)

    @property
    def inputs(self) -> int:
        """Return the number of ranks over which the result is a mean; 1 if the result is a sum."""
        return self.communicator.size if self.op == Average else 1

    @property
    def share(self) -> float:
        """Return the factor by which each rank must multiply equal numbers so that the result is these numbers."""
        return self.inputs / self.communicator.size

    def start(
        self,
        values: Tensor,
        codec: Codec | None = None,
        feedback: Feedback | None = None,
        step: int = 0,
        seed: int = 0,
        *,
        divided: bool = False,
        awaited: bool = False,
    ) -> Work:
        """Begin to combine values, in place. divided: whether they have been divided by `predivide` already. awaited: see
        PreparedOperation.start()."""
        nbytes = values.nbytes if codec is None else 4 * values.numel()
        self.traffic.count(sent=self.traffic.wire_bytes(nbytes, codec, step))
        return self.communicator.allreduce(
            values,
            self.op,
            prescale=1.0 if divided else 1 / self.predivide,
            postscale=self.predivide,
            compression=codec,
            feedback=feedback,
            step=step,
            seed=seed,
            async_op=True,
            awaited=awaited,
        )

    def prepare(self, values: Tensor) -> PreparedOperation:
        """Return a prepared operation that combines values in place, uncompressed, any number of times."""
        prepare = self.communicator.prepare_reduce_shares if self.in_shares else self.communicator.prepare_allreduce
        return prepare(values, self.op, prescale=1 / self.predivide, postscale=self.predivide)


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
    plan: the sizes of buckets, and when they are exchanged; a file that stores a plan; None chooses. passes: counts calls of
    backward(); a step follows passes.per_step of them. groups: the group number of each parameter in a group; a group shares a
    bucket if the dtypes allow it, and other parameters are fused by the plan. sparse_as_dense: whether sparse gradients are
    made dense. gradient_as_bucket_view: whether parameter.grad is in a bucket's memory after an exchange. parameter_encoding:
    with sharded states, the encoding of the parameters' deltas, which a rank sends after it has stepped its share; None sends
    the parameters uncompressed. tried: the parameters for which it is known that the optimizer supports sharded states.
    """

    optimizer: torch.optim.Optimizer
    policy: Policy
    plan: ExchangePlan | Path | None
    passes: Passes
    groups: Mapping[Tensor, int] = field(default_factory=dict)
    sparse_as_dense: bool = False
    gradient_as_bucket_view: bool = True
    parameter_encoding: Cast | Encoding | None = None
    tried: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
