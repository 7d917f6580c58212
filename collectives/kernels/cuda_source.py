"""The CUDA sources, how they are compiled, and how they are launched: by CuPy on a GPU, or by the tests where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

_FOLDER = Path(__file__).parent
_COMMON = "common.cuh"

#: Every operation is rounded by itself, and denormals are kept: only so do a GPU and a CPU write the same bytes.
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

#: Threads of a block, in every kernel.
THREADS = 256


class Launch(Protocol):
    """How a kernel gets to run."""

    def __call__(
        self, family: str, kernel: str, grid: int, parameters: NDArray[np.void], tensors: Sequence[torch.Tensor]
    ) -> None:
        """kernel: an instance of a template in `<family>.cu`. parameters: its only argument. tensors: all that it touches."""


def literal(flag: bool) -> str:
    """As C++ writes it."""
    return "true" if flag else "false"


@cache
def source(family: str) -> str:
    """The text of `<family>.cu`, with the header that all share in the place of its #include."""
    text = (_FOLDER / f"{family}.cu").read_text(encoding="utf-8")
    return text.replace(f'#include "{_COMMON}"', (_FOLDER / _COMMON).read_text(encoding="utf-8"))
