"""The synchronous rule: every step is taken with the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from gradwire.trainer.reducer.arguments import Adasum
from gradwire.trainer.reducer.bucket import Bucket
from gradwire.trainer.reducer.checkpoint import load_state, state_of
from gradwire.trainer.reducer.plans import ExchangePlan
from gradwire.trainer.reducer.reducer import Reducer
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.reducer.shards.optimizer_shards import SHARDS
from gradwire.trainer.reducer.weights import MESSAGE_NUMEL
from gradwire.trainer.rules.rule import Rule


class Synchronous(Rule):
    """Exchanges gradients in the last backward() before a step: hooks of the parameters start the exchange, and backward()
    returns when it is done. reducer: exchanges the gradients.

    A rule that exchanges gradients in some steps only overrides synchronize(), and calls super().synchronize() in these steps. To
    super().__init__(), it passes dataclasses.replace(setup, passes=...) with a Passes whose is_due() returns False in the other
    steps. The optimizer's no_sync() and set_backward_passes_per_step() then have no effect.
    """

    starts_equal = keeps_replicas = can_stand_in = supports_auto = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if setup.op == Adasum:
            raise ValueError(f"a rule that exchanges gradients does not support op={Adasum!r}: leave out one of both")
        self.reducer = Reducer(setup)
        self.times = self.reducer.times
        self._within_step = ExitStack()

    @property
    def wait_s(self) -> float:
        return self.reducer.wait_s

    @property
    def exchange_plan(self) -> ExchangePlan | None:
        return self.reducer.planner.settled_plan

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self.reducer.buckets

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        self.reducer.add(names, parameters)

    def start(self) -> None:
        self.reducer.rebuild()

    def weigh(self, samples: float | Tensor) -> None:
        self.reducer.weigh(samples)

    @property
    def weighs(self) -> bool:
        return self.reducer.weights.is_used

    def synchronize(self) -> None:
        self.reducer.flush()

    def take_step(self) -> Any:
        self.synchronize()
        if not self.reducer.planner.densified:
            return self.setup.optimizer.step()
        with self.sparse_again(self.reducer.parameters):
            return self.setup.optimizer.step()

    @contextmanager
    def sparse_again(self, parameters: Collection[Tensor]) -> Iterator[None]:
        """Give those of the parameters whose sparse gradients were exchanged as dense ones sparse gradients in the with block,
        if the optimizer accepts no others."""
        dense: dict[Tensor, Tensor] = {}
        if isinstance(self.setup.optimizer, torch.optim.SparseAdam):
            wanted, found = (
                set(parameters),
                [self.reducer.parameters[index] for index in self.reducer.planner.densified],
            )
            dense = {each: each.grad for each in found if each.grad is not None and each in wanted}
        for parameter, gradient in dense.items():
            parameter.grad = gradient.to_sparse(1)
        try:
            yield
        finally:
            for parameter, gradient in dense.items():
                parameter.grad = gradient

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Return the loss combined over all ranks, so that the optimizers of all ranks decide alike."""
        self._within_step.close()
        self.reducer.open_window()
        loss = super().evaluate(closure)
        self._within_step.enter_context(self.sparse_again(self.reducer.parameters))
        if loss is None:
            return None
        if isinstance(loss, Tensor):
            total = loss.detach().clone()
        else:
            total = torch.tensor(float(loss), dtype=torch.float64, device=self.reducer.parameters[0].device)
        if not (factor := self.reducer.weights.loss_factor):
            total.zero_()  # the mean loss of no samples is NaN
        elif factor != 1.0:
            total *= factor
        self.communicator.allreduce(total, self.setup.op)
        return total if isinstance(loss, Tensor) else total.item()

    def before_method(self, name: str) -> None:
        """Allow all methods: after backward(), parameters have the gradients of all ranks. Raises RuntimeError while they have
        those of this rank."""
        if self.reducer.has_unreduced:
            raise self._refused(name, "gradients of this rank have not been exchanged yet: call synchronize() before")

    def after_step(self) -> None:
        self._within_step.close()
        self.start()

    def fill(self) -> None:
        self.reducer.fill()

    def reset(self) -> None:
        self.reducer.open_window(forget=True)

    def stand_in(self, verb: str, numel: int) -> bool:
        """Take part in the agreement on new buckets, or in an exchange: with accumulated gradients if any, else with zeros."""
        # Without buckets, an exchange begins with an allgather, too. New ones are due right after an exchange.
        if verb == "allgather" and (self.buckets or self.reducer.planner.is_due):
            self.reducer.rebuild(counts=False)
            return True
        if verb != "allgather" and numel <= 1:  # a loss; a bucket has at least a gradient and its count
            return False
        if not self.reducer.has_unreduced:
            self.setup.optimizer.zero_grad()
            if verb != "allgather" and numel == MESSAGE_NUMEL:
                self.reducer.weigh(0)
        self.reducer.open_window()
        self.reducer.flush()
        return True

    def state_dict(self) -> dict[str, Any]:
        return state_of(self.reducer)

    def load_state_dict(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        if SHARDS in state_dict:
            raise ValueError("load_state_dict: saved with rules.Sharded, and loaded without")
        load_state(self.reducer, state_dict, also)

    def close(self) -> None:
        self.reducer.close()
