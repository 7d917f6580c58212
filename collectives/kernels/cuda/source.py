"""The CUDA sources, and the protocol of a launch. CuPy launches kernels on a GPU, and the tests emulate them without one."""

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

#: Round every operation separately, and keep denormals, so that a GPU and a CPU write the same bytes.
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

#: Threads of a block, in every kernel.
THREADS = 256


class KernelLaunch(Protocol):
    """The protocol of a function that launches kernels."""

    def __call__(
        self, family: str, kernel: str, grid: int, parameters: NDArray[np.void], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Launch a kernel, an instance of a template in `<family>.cu`.

        parameters: the kernel's only argument. tensors: all that the kernel reads or writes.
        """


def literal(flag: bool) -> str:
    """Return a flag as a C++ literal."""
    return "true" if flag else "false"


@cache
def source(family: str) -> str:
    """Return the text of `<family>.cu`, with every #include replaced by the header's text."""
    return re.sub(r'#include "(.+)"', lambda include: _text(include[1]), _text(f"{family}.cu"))


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
