"""Optimizers of copies: as another one is, with its settings and state, but of other tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def of_copies(optimizer: torch.optim.Optimizer, copies: Mapping[Tensor, nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer as this one is, of the copies of those of its parameters that have one. It has as many param groups,
    so some may be empty."""
    groups = optimizer.param_groups
    known: dict[int, Any] = {id(parameter): parameter for group in groups for parameter in group["params"]}
    others = [parameter for parameter in known.values() if parameter not in copies and parameter in optimizer.state]
    not_copied: dict[int, Any] = {id(optimizer.state[parameter]): {} for parameter in others}
    made = copy.deepcopy(optimizer, known | not_copied | {id(parameter): made for parameter, made in copies.items()})
    wanted = set(copies.values())
    for group in made.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in wanted]
    for parameter in known.values():  # those that have a copy are in there no more
        made.state.pop(parameter, None)
    return made
