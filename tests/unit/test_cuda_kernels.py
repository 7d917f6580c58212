"""The CUDA kernels, as NVRTC compiles them, on a machine in numpy, against the reference, byte for byte."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from collectives.compression.dense import Dense
from collectives.compression.integers import Int8
from collectives.compression.sparse import Sparse
from collectives.kernels import cuda
from collectives.kernels.cuda import CudaKernels, cuda_kernels
from collectives.kernels.cuda_source import source
from tests.cuda_machine.cases import DENSE, SPARSE, SPARSE_NUMELS, Pair, check_dense, check_many, check_sparse

pytest.importorskip("cuda.bindings.nvrtc")

from tests.cuda_machine import MachineLaunch, Order
from tests.cuda_machine.nvrtc import compile_kernel

ARCHITECTURES = ("80", "90")


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """What torch.empty gives holds numbers that no kernel could mistake for zeros."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(deterministic)


def ids(codec: Dense | Sparse) -> str:
    return repr(codec)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("codec", DENSE, ids=ids)
def test_dense(codec: Dense, architecture: str) -> None:
    assert check_dense(CudaKernels(MachineLaunch(f"compute_{architecture}")), "cpu", codec) == []


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("codec", SPARSE, ids=ids)
def test_sparse(codec: Sparse, order: Order) -> None:
    """In any order of the warps: where one needs what another has done, it waits for it."""
    together = order is Order.TOGETHER
    launch = MachineLaunch(f"compute_{ARCHITECTURES[together]}", order)
    assert check_sparse(CudaKernels(launch), "cpu", codec, SPARSE_NUMELS if together else (20_001,)) == []


class FewBlocks(CudaKernels):
    blocks = 2


@pytest.mark.parametrize("codec", SPARSE, ids=ids)
def test_blocks_of_several_chunks(codec: Sparse) -> None:
    assert check_sparse(FewBlocks(MachineLaunch()), "cpu", codec, (40_001,), ("ties", "not finite")) == []


def test_many_tensors_in_one_launch() -> None:
    launch = MachineLaunch()
    assert check_many(CudaKernels(launch), "cpu") == []
    assert len(launch.launched) == 4, "100 tensors, 96 of them in a launch"


def test_blocks_that_no_warp_holds() -> None:
    launch = MachineLaunch()
    assert check_dense(CudaKernels(launch), "cpu", Int8(block=48), (100,)) == []
    assert launch.launched == []


def test_nothing_is_done_for_nothing() -> None:
    for codec in DENSE:
        pair = Pair(CudaKernels(MachineLaunch()), "cpu")
        wire = pair.both(
            f"{codec.name}_encode", torch.zeros(0), None, torch.zeros(0, dtype=torch.uint8), *codec._encoder(), 0
        )
        pair.both(f"{codec.name}_decode", wire[-1], torch.zeros(0), *codec._decoder(), True, 1.0)
        assert pair.failures == []
    assert check_sparse(CudaKernels(MachineLaunch()), "cpu", SPARSE[0], (0,)) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_without_a_warning(architecture: str) -> None:
    """To machine code, and all of those that the sources have. (The machine, which knows no local memory, sees to spills.)"""
    launch = MachineLaunch(f"compute_{architecture}")
    for codec in DENSE:
        check_dense(CudaKernels(launch), "cpu", codec, (1, 3))
    for codec in SPARSE:
        check_sparse(CudaKernels(launch), "cpu", codec, (1,))
    launched = {("quantize" if "code<" in kernel else "sparse", kernel) for kernel in launch.launched}
    for family in ("quantize", "sparse"):
        written = set(re.findall(r"__global__ void __launch_bounds__\(THREADS\) (\w+)\(", source(family)))
        assert written == {kernel.split("<")[0] for of, kernel in launched if of == family}
    alike = {re.sub(r"\d+|true|false", "", kernel): (family, kernel) for family, kernel in sorted(launched)}
    for family, kernel in alike.values():
        assert compile_kernel(family, kernel, f"sm_{architecture}").log == "", kernel


class TestCuPy:
    def test_compiles_the_same_without_flushing_denormals(self) -> None:
        nvrtc = pytest.importorskip("cupy").cuda.nvrtc
        code, name = cuda.compile_kernel(nvrtc, "quantize", "encode<Int8<256, false>, true>", "sm_80")
        assert len(code) > 1000
        assert "encode" in name
        with pytest.raises(RuntimeError, match="no_such_codec"):
            cuda.compile_kernel(nvrtc, "quantize", "encode<no_such_codec, true>", "sm_80")

    def test_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setitem(sys.modules, "cupy", None)
        told = cuda_kernels()
        assert isinstance(told, str)
        assert told.endswith("pip install cupy-cuda13x")
        assert "\n" not in told

    def test_built_for_another_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime = SimpleNamespace(runtimeGetVersion=lambda: 13000)
        monkeypatch.setattr(torch.version, "cuda", "12.6")
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
        told = cuda_kernels()
        assert isinstance(told, str)
        assert "CUDA 13" in told
        assert "pip install cupy-cuda12x" in told

    def test_torch_without_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        assert cuda_kernels() == "this torch was built without CUDA"
