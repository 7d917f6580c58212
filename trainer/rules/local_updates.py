"""The settings of local updates: hvd.rules.LocalUpdates(every=...). The rule itself is in local_steps.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gradwire.collectives import Communicator
from gradwire.trainer.optimizers.wrapped import tensors_of
from gradwire.trainer.reducer.compression import Compression, Compressor, Policy
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.rules.fragments import is_one_shot
from gradwire.trainer.rules.local_steps import Locality, LocalSteps
from gradwire.trainer.world.process_sets import ProcessSetLike
from gradwire.trainer.world.world import current_world, names_rank


@dataclass(frozen=True)
class LocalUpdates:
    """The rule of local updates: every rank steps alone, and the ranks exchange the changes of their parameters once in `every`
    steps. docs/guides/local-updates.md is the guide; hvd.LocalUpdates is an optimizer with this rule and a report of its costs.

    The compression= and policy= of the optimizer are for the gradients of the warm-up, and among inner ranks. op= must be
    Average. Between exchanges the ranks have different parameters, for which check_replicas_every= raises ReplicasDiffer.

    every: the number of steps from one exchange to the next.
    outer: an optimizer of the same parameters, as a template: its class, settings and state are used. None averages the
    parameters. With compression="chunktopk", None sums the movements, because few ranks send the same elements.
    warmup_steps: the number of synchronous steps at the start.
    compression, policy: the compression of movements, as compression= and policy= of DistributedOptimizer, for parameters of any
    size; not "auto".
    fragments: the number of parts of the parameters, which are exchanged in turn, each once in `every` steps.
    delay: the number of steps that a rank takes while a fragment is exchanged.
    alpha: the weight of a rank's own parameters after such a delay: alpha * own + (1 - alpha) * common parameters.
    inner: a process set that averages gradients in every step, such as the ranks of a host; the ranks of each host pass
    their own process set.

    Raises ValueError or TypeError for invalid arguments; the optimizer does so for those that do not fit its parameters.
    """

    every: int
    outer: torch.optim.Optimizer | None = None
    warmup_steps: int = 0
    compression: Compressor = Compression.none
    policy: Mapping[str, Compressor] | None = None
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.5
    inner: ProcessSetLike = None

    @names_rank
    def __post_init__(self) -> None:
        for name in ("every", "warmup_steps", "fragments", "delay"):
            value, least = getattr(self, name), 1 if name in ("every", "fragments") else 0
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, not {value!r}")
        if self.fragments > self.every:
            raise ValueError(f"fragments={self.fragments} must be at most every={self.every}")
        if self.delay >= self.every // self.fragments:
            raise ValueError(
                f"delay={self.delay} must be less than every // fragments = {self.every // self.fragments}: one fragment "
                "is in flight at a time"
            )
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha must be at least 0 and less than 1, not {self.alpha!r}")
        if not isinstance(self.outer, torch.optim.Optimizer | None):
            raise TypeError(f"outer must be a torch.optim.Optimizer or None, not {type(self.outer).__name__}")
        if self.outer is None:
            _check_averaging(self._movements)

    def __call__(self, setup: Setup) -> LocalSteps:
        parameters = tensors_of(setup.optimizer.param_groups)
        if self.fragments > len(parameters):
            raise ValueError(f"fragments={self.fragments} must be at most the number of parameters, {len(parameters)}")
        if self.outer is not None and set(tensors_of(self.outer.param_groups)) != set(parameters):
            raise ValueError("outer must be an optimizer of the same parameters as optimizer")
        inner = self.inner
        if not isinstance(inner, Communicator | None):
            inner = current_world().open_communicator(inner, tensors=parameters)
        owns_inner = inner is not self.inner
        locality = Locality(
            self.every,
            self.outer,
            self.warmup_steps,
            self._movements,
            self.fragments,
            self.delay,
            self.alpha,
            inner,
            owns_inner,
        )
        try:
            return LocalSteps(setup, locality)
        except BaseException:
            if inner is not None and owns_inner:
                inner.close()
            raise

    @property
    def _movements(self) -> Policy:
        """Return the policy of movements, in which compression= applies to parameters of any size."""
        by_pattern = dict(self.policy or {})
        return Policy(Compression.none, by_pattern if "*" in by_pattern else {**by_pattern, "*": self.compression})


def _check_averaging(policy: Policy) -> None:
    """Raise ValueError if movements would first be averaged over all ranks, and later over those that send a number."""
    for encoding in policy.encodings:
        if is_one_shot(encoding) and encoding.warmup_steps:
            raise ValueError(
                f"ErrorFeedback({encoding.codec.name!r}, warmup_steps={encoding.warmup_steps}) does not support "
                "outer=None: movements with this codec are summed, but those of its warm-up, which are uncompressed, would "
                "have to be averaged. Use a warm-up in which gradients are averaged: LocalUpdates(warmup_steps=...)"
            )
