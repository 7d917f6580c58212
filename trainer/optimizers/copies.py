"""Copies of optimizers, with their settings and state, for copies of their parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.torch_internals import map_only


def of_copies(
    optimizer: torch.optim.Optimizer,
    copies: Mapping[Tensor, Tensor],
    states: Mapping[Tensor, dict[str, Any]] | None = None,
) -> torch.optim.Optimizer:
    """Return a copy of an optimizer for the copies of its parameters; parameters without a copy are left out. It has as many
    param groups, so some may be empty. State on the device of a parameter is moved to that of its copy.

    states: the states of some copies, by the parameters; the others are copies of the parameters' states. Raises TypeError as
    copied_attributes() does.
    """
    attributes, given = copied_attributes(optimizer), states or {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memo: dict[int, Any] = {id(parameter): copies.get(parameter, parameter) for parameter in parameters}
    state = copy.copy(optimizer.state)
    state.clear()
    everything: dict[Any, Any] = dict(optimizer.state)
    for key, value in everything.items():
        if key in copies:
            state[copies[key]] = given[key] if key in given else copy.deepcopy(value, memo)
        elif not isinstance(key, Tensor):
            state[copy.deepcopy(key, memo)] = copy.deepcopy(value, memo)
    memo[id(optimizer.state)] = state
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
