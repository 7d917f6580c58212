"""What happens in a forked child to objects whose threads and connections belong to the parent."""

from __future__ import annotations

import os
import traceback
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def in_forked_child(made: T, action: Callable[[T], object]) -> None:
    """Call action(made) in every child that is forked from this process while the object is alive."""
    _actions[made] = action


def _after_fork() -> None:
    for made, action in list(_actions.items()):
        try:
            action(made)
        except Exception:  # the next object must not keep what belongs to the parent
            traceback.print_exc()


_actions: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()

os.register_at_fork(after_in_child=_after_fork)
