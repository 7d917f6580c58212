"""Copies of optimizers, with their settings and state, for copies of their parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.collectives.torch_internals import map_only


def of_copies(optimizer: torch.optim.Optimizer, copies: Mapping[Tensor, nn.Parameter]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer for the copies of its parameters; parameters without a copy are left out. It has as many
    param groups, so some may be empty. State on the device of a parameter is moved to that of its copy. Raises TypeError as
    copied_attributes() does."""
    attributes = copied_attributes(optimizer)
    known: dict[int, Any] = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    left_out = [parameter for parameter in known.values() if parameter not in copies]
    memo = known | {id(parameter): made for parameter, made in copies.items()}
    kept = optimizer.state.copy()
    for parameter in left_out:
        kept.pop(parameter, None)
    memo[id(optimizer.state)] = copy.deepcopy(kept, memo)
    made = copy.deepcopy(optimizer, memo)
    wanted = set(copies.values())
    for group in made.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in wanted]
    for parameter, copied in copies.items():
        if copied.device != parameter.device and copied in made.state:
            moved = partial(_moved, parameter.device, copied.device)
            made.state[copied] = map_only(Tensor, moved, made.state[copied])
    for name, value in attributes.items():
        made.__dict__.setdefault(name, value)
    return made


def _moved(source: torch.device, target: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(target) if tensor.device == source else tensor


def copied_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of the attributes that an optimizer has beyond those of every torch.optim.Optimizer, which a copy of an
    Optimizer leaves out.

    Raises TypeError for one that cannot be copied, or that holds parameters: of these, some may have copies and some not.
    """
    common = vars(torch.optim.Optimizer([torch.empty(0, dtype=torch.float32, device="cpu")], {}))
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    copies: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if name in common or callable(getattr(type(optimizer), name, None)):  # such as a step() that a scheduler wraps
            continue
        memo: dict[int, Any] = {id(optimizer): optimizer}
        try:
            copies[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise TypeError(f"{_named(optimizer, name)} cannot be copied: {error}") from error
        if parameters & memo.keys():
            raise TypeError(
                f"{_named(optimizer, name)} holds parameters, of which only some are updated together: keep what belongs to "
                "one parameter in the optimizer's state"
            )
    return copies


def _named(optimizer: torch.optim.Optimizer, attribute: str) -> str:
    return f"the optimizer's attribute {type(optimizer).__name__}.{attribute}"
