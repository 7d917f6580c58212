"""The rule of an optimizer whose parameters a later DistributedOptimizer exchanges: it refuses every further step."""

from __future__ import annotations

from typing import Any

from gradwire.trainer.rules.rule import Rule


class Superseded(Rule):
    """Raises RuntimeError before the next step. closed: the rule until then, whose state can still be saved. name: a parameter
    that both optimizers have."""

    supports_auto = True

    def __init__(self, closed: Rule, name: str) -> None:
        super().__init__(closed.setup)
        self._closed, self._name = closed, name

    def synchronize(self) -> None:
        raise RuntimeError(
            f"rank {self.communicator.rank}: this optimizer was closed when another DistributedOptimizer with its "
            f"{self._name!r} was made, because the gradients of a parameter can be exchanged by one only. If both are to step "
            "it: move the parameters that they share into a DistributedOptimizer of their own, or make one optimizer with "
            "several param groups"
        )

    def state_dict(self) -> dict[str, Any]:
        return self._closed.state_dict()
