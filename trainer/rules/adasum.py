"""The rule of Adasum: every rank steps by itself, and the steps are combined by adaptive summation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.adasum import adasum_
from trainer.compression import Cast, Encoding
from trainer.gradients.agreement import agree_on_parameters
from trainer.gradients.dtensors import shard_of
from trainer.rules.rule import Rule, Setup
from trainer.world import here


class AdaptiveSummation(Rule):
    """Combines, after every step, what the step of each rank has changed (Maleki et al. 2020, section 4).

    The optimizer steps with this rank's own gradients, and keeps a state that is each rank's own. Then the differences
    that the steps of all ranks have made to a parameter are combined, and every rank continues from the parameter of
    before plus the result: replicas that start equal stay equal bit for bit. The learning rate is that of one rank.

    Casts are for the differences; codecs raise ValueError. GradScaler must not be used, since it decides on each rank
    by itself whether to step.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if setup.policy.encodings:
            raise ValueError(f"{here()}op='adasum' takes the casts of compression= only (none, fp16, bf16), no codec")
        self._names: list[str] = []
        self._parameters: list[Tensor] = []
        self._casts: list[Cast | Encoding] = []
        self._before: list[Tensor] | None = None

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        for name, parameter in zip(names, parameters, strict=True):
            if shard_of(parameter):
                raise ValueError(f"{here()}op='adasum' needs whole parameters, and {name!r} is sharded")
        self._names += names
        self._parameters += parameters
        self._casts += [
            self.setup.policy.encoding(name, tensor) for name, tensor in zip(names, parameters, strict=True)
        ]

    @property
    def shares_state(self) -> bool:
        return False

    def start(self) -> None:
        trained = [place for place, parameter in enumerate(self._parameters) if parameter.requires_grad]
        names, parameters = [self._names[i] for i in trained], [self._parameters[i] for i in trained]
        agree_on_parameters(self.communicator, names, parameters)

    def synchronize(self) -> None:
        """Remember the parameters from which the optimizer steps next."""
        self._before = [
            parameter.detach().clone() if parameter.requires_grad else parameter.detach()
            for parameter in self._parameters
        ]

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Return this rank's own loss: it steps by itself, however often it asks."""
        if self._before is None:
            self.synchronize()
        return closure()

    @torch.no_grad()
    def after_step(self) -> None:
        before, self._before = self._before, None
        if before is None:  # the optimizer has not called its closure
            return
        entries = [
            (parameter, start, cast)
            for parameter, start, cast in zip(self._parameters, before, self._casts, strict=True)
            if parameter.requires_grad
        ]
        changes = []
        for parameter, start, cast in entries:
            assert isinstance(cast, Cast)
            changes.append((parameter - start).to(cast.dtype_on_wire(parameter.dtype)))
        adasum_(self.communicator, changes, prescale=1.0, postscale=1.0)
        for (parameter, start, _), change in zip(entries, changes, strict=True):
            parameter.copy_(start + change)
