"""Where in the user's own code something was called."""

from __future__ import annotations

import os
import threading
from types import FrameType

import torch

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = (
    *(os.path.join(_ROOT, package) + os.sep for package in ("collectives", "trainer")),
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    threading.__file__,
    "<frozen ",
)


def place_of(frame: FrameType | None) -> str:
    """Return 'file:line' of the innermost call, from `frame` outwards, that is neither this framework's nor torch's; nothing
    where there is none, as in a thread of theirs."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
