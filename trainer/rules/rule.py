"""The base class of update rules, whose methods a DistributedOptimizer calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.trainer.reducer.bucket import Bucket
from gradwire.trainer.reducer.compression import AUTO
from gradwire.trainer.reducer.plans import ExchangePlan
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.reducer.times import ExchangeTimes
from gradwire.trainer.reducer.traffic import ExchangeStats

_SWITCHES = ("train", "eval")
"""The methods of an optimizer that change parameters for evaluation, and back, as those of Schedule-Free do."""


class Rule:
    """Decides which data the ranks exchange (gradients, parameters, or their changes), and when.

    Derive from this class, and override the methods that you need: by default, every rank trains by itself. A
    DistributedOptimizer calls these methods on all ranks in the same order, so every method may communicate, except settle(),
    state_dict(), close() and the properties, which a single rank may call. A rule must count its own steps, and save the count
    in state_dict(). docs/extending.md has an example.

    shares_state: whether the optimizers of all ranks have the same state. If False, check_replicas_every= compares parameters
    only.
    starts_equal: whether all ranks must hold the same parameters before the first step, also after loading a checkpoint. If so,
    they are compared then, unless check_replicas_every=None.
    keeps_replicas: whether all ranks have the same parameters and state after each step, so that a rank that has lost them can
    load those of any other.
    can_stand_in: whether stand_in() supports a rank that waits in join(); the same on all ranks. If False, operations of the
    other ranks raise PeerJoined while a rank waits in join().
    supports_auto: whether compression="auto" may choose codecs, by the times of exchanges of gradients in every step, and trials
    a plan.
    can_move: whether this rule can continue among other ranks, in another world: it has no Communicator but that of `setup`.
    times: those of the exchanges of gradients; None disables the report of stragglers.
    """

    shares_state: bool = True
    starts_equal: bool = False
    keeps_replicas: bool = False
    can_stand_in: bool = False
    supports_auto: bool = False
    can_move: bool = True
    times: ExchangeTimes | None = None

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        if setup.policy.auto is not None and type(self) is not Rule and not self.supports_auto:
            raise ValueError(
                f"compression={AUTO!r} is for gradients that are averaged in every step, as by the default rule, not "
                f"for {type(self).__name__}: name a codec"
            )

        if isinstance(setup.plan, Path) and type(self) is not Rule and not self.supports_auto:
            raise ValueError(
                f"exchange_plan={str(setup.plan)!r}: plans are tried only if gradients are averaged in every step, not with "
                f"{type(self).__name__}: give an ExchangePlan, or no exchange_plan"
            )

    @property
    def communicator(self) -> Communicator:
        """Return the Communicator of the ranks; it belongs to this optimizer alone."""
        return self.setup.communicator

    @property
    def wait_s(self) -> float:
        """Return the seconds for which this rank has waited for other ranks so far, in the operations of this rule."""
        return 0.0

    @property
    def stats(self) -> ExchangeStats:
        """Return how many bytes this rank has sent so far, in the operations of this rule."""
        return self.setup.traffic.stats

    @property
    def exchange_plan(self) -> ExchangePlan | None:
        """Return the plan by which gradients are exchanged; None while plans are tried, and if the rule has none."""
        return None

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Return the current buckets of gradients; empty if the rule has none."""
        return ()

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Add parameters: first those of the optimizer, later those of a new param group, or those that have replaced others in
        its param groups; none if some were only removed from them. Raises ValueError, with nothing added, for parameters that
        cannot be exchanged."""

    def start(self) -> None:
        """Prepare for training, once the optimizer's parameters have been added. Raises ValueError on all ranks if the ranks
        have different parameters."""

    def weigh(self, samples: float | Tensor) -> None:
        """Set how many samples the gradients of the next backward() stand for. Raises RuntimeError if the rule has no weights."""
        if type(self) is Rule:
            raise RuntimeError("this rank is not in the process_set, whose ranks alone call weigh()")
        raise RuntimeError(
            f"rank {self.communicator.rank}: {type(self).__name__} does not support weigh(): use the default rule, "
            "rules.Sharded, rules.NextForward or rules.LocalUpdates"
        )

    @property
    def weighs(self) -> bool:
        """Return whether weigh() was ever called."""
        return False

    def synchronize(self) -> None:
        """Exchange all data that the optimizer's step needs, unless that is done."""

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call the closure of a step, which computes gradients, and return the loss for the optimizer."""
        loss = closure()
        self.synchronize()
        return loss

    def take_step(self) -> Any:
        """Step the optimizer, without a closure, after synchronize(); return its result."""
        self.synchronize()
        return self.setup.optimizer.step()

    def settle(self) -> None:
        """Finish all work that backward() and steps have begun, so that parameters and optimizer state are up to date."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> Tensor:
        """Scale the gradients of the next step so that their total norm is at most max_norm; return the norm before
        scaling."""
        self.synchronize()
        groups = self.setup.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def before_method(self, name: str) -> None:
        """Prepare for the call of a method that only the wrapped optimizer has, such as train() of Schedule-Free or first_step()
        of SAM. Raises RuntimeError if the method could use gradients of this rank alone, or step past this rule. train() and
        eval() are taken to do neither: by convention they change parameters for evaluation, and back."""
        self.settle()
        if type(self) is not Rule and name not in _SWITCHES:
            raise self._refused(name, "step() and step(closure) alone take steps in which the ranks exchange data")

    def _refused(self, name: str, why: str) -> RuntimeError:
        """Return the error for a call of a method of the wrapped optimizer."""
        optimizer = self.setup.optimizer
        return RuntimeError(f"{name}() of the wrapped {type(optimizer).__name__} is not supported here: {why}")

    def after_step(self) -> None:
        """Do the rule's work that follows a step of the optimizer."""

    def fill(self) -> None:
        """Give zeros, which do not count as gradients, to parameters that have no gradient, if programs written for Horovod may
        use this rule: there, parameters have gradients before the first backward()."""

    def reset(self) -> None:
        """Discard accumulated gradients, after they have been zeroed."""

    def stand_in(self, verb: str, numel: int) -> bool:
        """Take part in the next operations of the other ranks, on a rank that waits in join() and has no new gradients.

        verb, numel: those of the first operation. Returns False, and does nothing, if this rank only has to contribute zeros to
        this operation; join() then contributes them.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with all that this rank needs to resume exactly."""
        return self.setup.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        """Load a state_dict(), including the optimizer's state. also: the states of ranks that no longer exist."""
        self.setup.optimizer.load_state_dict(state_dict)

    def close(self) -> None:
        """Stop exchanging, and remove all hooks."""
