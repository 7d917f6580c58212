"""All that the trainer uses of torch under private names: what to look at when torch changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore as HashStore
from torch.utils import _pytree

OUTSIDE_BACKWARD = -1
"""The graph task where no backward() is running."""

_HOOKS = [
    f"_optimizer_{method}_{when}_hooks"
    for method in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]


def graph_task() -> int:
    """Return a number that tells the backward() that is running from all others, or OUTSIDE_BACKWARD."""
    return torch._C._current_graph_task_id()


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Have the autograd engine call back at the end of the backward() that is running; its errors are backward()'s."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def share_hooks(wrapper: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Give a wrapper the hooks of the optimizer inside it, in place of those that torch's __init__ would make."""
    for hooks in _HOOKS:
        setattr(wrapper, hooks, getattr(optimizer, hooks))


def map_only(kind: type[Any], function: Callable[[Any], object], tree: object) -> Any:
    """Return a structure of lists, (named) tuples and dicts with function(leaf) for each leaf of a kind."""
    return _pytree.tree_map_only(kind, function, tree)
