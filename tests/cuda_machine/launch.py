"""Launches on the machine, in the place of those on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from gradwire.collectives.kernels.cuda.launch import THREADS
from tests.cuda_machine import nvrtc, ptx
from tests.cuda_machine.machine import Order, decode, run
from tests.cuda_machine.memory import Memory


@cache
def _loaded(family: str, kernel: str, architecture: str) -> tuple[ptx.Kernel, list[Any]]:
    compiled = nvrtc.compile_kernel(family, kernel, architecture)
    parsed = ptx.parse(compiled.code.decode(), compiled.name)
    return parsed, decode(parsed)


class MachineLaunch:
    """A KernelLaunch (kernels/cuda/launch.py) for tensors in the memory of the CPU. launched: the kernels, in order."""

    def __init__(self, architecture: str = "compute_80", order: Order = Order.TOGETHER) -> None:
        self.architecture, self.order = architecture, order
        self.launched: list[str] = []

    def __call__(self, family: str, kernel: str, grid: int, parameters: bytes, tensors: Sequence[torch.Tensor]) -> None:
        self.launched.append(kernel)
        parsed, blocks = _loaded(family, kernel, self.architecture)
        memory = Memory(tensors)
        run(parsed, blocks, grid, THREADS, parameters, memory, self.order)
        memory.write_back()
