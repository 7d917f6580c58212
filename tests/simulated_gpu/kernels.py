"""What stands in for the launches of kernels, and for what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradwire.collectives.kernels.cuda import kernels
from gradwire.collectives.kernels.cuda.kernels import CudaKernels
from gradwire.collectives.kernels.reference import matrices, quantize, sparse
from tests.simulated_gpu.clocks import pass_gates
from tests.simulated_gpu.cuda import current_stream
from tests.simulated_gpu.memory import device_of
from tests.simulated_gpu.operators import collecting, run_on, tensors_in


class SimulatedLaunch:
    """A KernelLaunch that remembers what was launched."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, Sequence[torch.Tensor]]] = []

    def __call__(
        self, family: str, kernel: str, grid: int, parameters: Any, tensors: Sequence[torch.Tensor], *rest: Any
    ) -> None:
        self.launches.append((kernel, list(tensors)))


class SimulatedKernels:
    """The functions of CudaKernels. Each runs, for what it launches and allocates; if it launched kernels, the function of
    kernels/reference then computes what they would."""

    def __getattr__(self, name: str) -> Any:
        def run(*args: Any) -> None:
            launch = SimulatedLaunch()
            given = list(tensors_in(args))
            pass_gates(current_stream(device_of(given[0])).clock)
            with collecting():
                before = [each.clone() for each in given]
            getattr(CudaKernels(launch), name)(*args)
            if launch.launches:
                self._compute(name, args, given, before, launch)

        return run

    def _compute(
        self,
        name: str,
        args: tuple[Any, ...],
        given: list[torch.Tensor],
        before: list[torch.Tensor],
        launch: SimulatedLaunch,
    ) -> None:
        own = {each.untyped_storage()._cdata for each in given}
        with collecting() as (reads, writes):
            for each, content in zip(given, before, strict=True):
                each.copy_(content)
            reads.clear()
            writes.clear()
            next(getattr(each, name) for each in (quantize, sparse, matrices) if hasattr(each, name))(*args)
        device = device_of(given[0])
        for kernel, tensors in launch.launches:
            temporary = [each for each in tensors if each.untyped_storage()._cdata not in own]
            run_on(
                current_stream(device),
                f"kernel {kernel}",
                [each for each in reads if each.untyped_storage()._cdata in own],
                [each for each in writes if each.untyped_storage()._cdata in own] + temporary,
            )


def install() -> None:
    """Give codecs the stand-in on every GPU."""
    kernels.cuda_kernels = lambda device: SimulatedKernels()  # type: ignore[assignment,return-value]
