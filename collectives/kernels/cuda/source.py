"""The CUDA sources, and the protocol of their launch: by CuPy on a GPU, or by the tests without one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

_FOLDER = Path(__file__).parent

#: Every operation is rounded by itself, and denormals are kept: only so do a GPU and a CPU write the same bytes.
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

#: Threads of a block, in every kernel.
THREADS = 256


class Launch(Protocol):
    """The protocol of a launch."""

    def __call__(
        self, family: str, kernel: str, grid: int, parameters: NDArray[np.void], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Launch a kernel, an instance of a template in `<family>.cu`.

        parameters: its only argument. tensors: all that it reads or writes.
        """


def literal(flag: bool) -> str:
    """Return a flag as C++ writes it."""
    return "true" if flag else "false"


@cache
def source(family: str) -> str:
    """Return the text of `<family>.cu`, with every header in the place of its #include."""
    return re.sub(r'#include "(.+)"', lambda include: _text(include[1]), _text(f"{family}.cu"))


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
