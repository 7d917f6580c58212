"""The rule that the arguments rule=, op= and overlap= select, and the settings that must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from gradwire.trainer.gradients.arguments import Adasum
from gradwire.trainer.gradients.setup import Setup
from gradwire.trainer.rules.adasum import AdaptiveSummation
from gradwire.trainer.rules.next_forward import NextForward
from gradwire.trainer.rules.rule import Rule
from gradwire.trainer.rules.synchronous import Synchronous
from gradwire.trainer.world.world import here


def checked_rule(rule: Any, op: str) -> Callable[[Setup], Rule]:
    """Return the function from a Setup to the Rule that these arguments select. Raises TypeError and ValueError."""
    if rule is None:
        return AdaptiveSummation if op == Adasum else Synchronous
    if not callable(rule):
        raise TypeError(
            f"{here()}rule must be an object of gradwire.rules, a class derived from Rule, or a function that makes one, not "
            f"{rule!r}"
        )
    made: Callable[[Setup], Rule] = rule
    return made


def overlapping(rule: Callable[[Setup], Rule], overlap: object, model: object) -> Callable[[Setup], Rule]:
    """Return the function from a Setup to the Rule with this overlap. Raises TypeError and ValueError."""
    if overlap not in ("backward", "next_forward"):
        raise ValueError(f"{here()}overlap must be 'backward' or 'next_forward', not {overlap!r}")
    if overlap == "backward":
        if model is not None:
            raise ValueError(f"{here()}model is for overlap='next_forward', which hooks its modules")
        return rule
    if rule is not Synchronous:
        raise ValueError(
            f"{here()}overlap='next_forward' supports only the default rule, not op={Adasum!r} or "
            "rule=: use overlap='backward'"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{here()}overlap='next_forward' needs model=, the torch.nn.Module whose forward() the updates precede, not {model!r}"
        )
    return partial(NextForward, model=model)


def described_settings(setup: Setup, rule: Callable[[Setup], Rule], parameters: Sequence[Tensor]) -> dict[str, str]:
    """Return the settings that must be equal on all ranks, as text by the names of the arguments."""
    compression, policy = setup.policy.described
    return {
        "rule": str(getattr(rule, "described", getattr(rule, "__qualname__", type(rule).__qualname__))),
        "op": setup.combination.op,
        "gradient_predivide_factor": str(setup.combination.predivide),
        "compression": compression,
        "policy": policy,
        "bucket_bytes": str(setup.bucket_bytes),
        "groups": str([setup.groups.get(parameter) for parameter in parameters] if setup.groups else None),
        "sparse_as_dense": str(setup.sparse_as_dense),
    }
