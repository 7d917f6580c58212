"""What a DistributedOptimizer asks of a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from trainer.gradients.exchange import Passes


class Rule(Protocol):
    """Decides what the ranks that train one model exchange (gradients, parameters, their differences), and when.

    A DistributedOptimizer calls it, on all ranks in the same order. passes: how many calls of backward() come before a step.
    """

    passes: Passes

    @property
    def wait_s(self) -> float:
        """Tell for how many seconds callers were held up by other ranks so far."""

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Take in more parameters. Raises ValueError for those that cannot be exchanged."""

    def synchronize(self) -> None:
        """Exchange what must be exchanged before the optimizer steps, unless that is done."""

    def renew(self, *, forget: bool = False) -> None:
        """Expect another backward(). forget: the gradients have been reset, and what was accumulated does not count."""

    def settle(self) -> None:
        """Do what is due when the optimizer has taken in parameters or stepped. Raises ValueError on all ranks alike where these
        do not have the same parameters."""

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state with what this rank needs to go on exactly as if it had not stopped."""

    def load_state_dict(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        """Load what state_dict() returned, on this rank or, in `also`, on ranks that no longer exist, into the optimizer too."""

    def close(self) -> None:
        """Leave the parameters alone from now on."""
