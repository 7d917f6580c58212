"""The CUDA kernels on a GPU: the checks that they pass on the machine in numpy, and what only a GPU can show."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.collectives.compression.codec import NUMBERS, Codec
from gradwire.collectives.compression.dense import Dense, Int8
from gradwire.collectives.kernels.cuda.kernels import CudaKernels, TorchKernels, cuda_kernels
from tests.cuda_machine.cases import CODECS, DENSE, SPARSE, check, numbers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LARGE = 3_000_001


class WithoutWaits:
    """Kernels, whose calls raise RuntimeError if the host waits for the GPU."""

    def __init__(self, kernels: CudaKernels | TorchKernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._kernels, name)

        def call(*arguments: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                function(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call


@pytest.fixture(scope="module")
def kernels() -> CudaKernels:
    found = cuda_kernels(torch.device("cuda", 0))
    if not isinstance(found, CudaKernels):
        pytest.skip("needs CuPy for torch's CUDA")
    return found


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_same_bytes_as_the_reference(kernels: CudaKernels, codec: Codec) -> None:
    assert check(WithoutWaits(kernels), "cuda", codec) == []
    assert check(kernels, "cuda", codec, (LARGE,), ("gaussian", "ties", "few", "not finite")) == []
    if codec in SPARSE:
        assert check(kernels, "cuda", codec, (10 * LARGE,), ("gaussian",)) == []


@pytest.mark.parametrize("dtype", NUMBERS[1:], ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_halves(kernels: CudaKernels, codec: Codec, dtype: torch.dtype) -> None:
    """Without a float32 copy, at addresses where four numbers are loaded at once, and at others."""
    assert check(WithoutWaits(kernels), "cuda", codec, dtype=dtype) == []
    assert check(kernels, "cuda", codec, (LARGE - 1,), ("not finite",), dtype) == []


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_plain_torch(codec: Codec, dtype: torch.dtype) -> None:
    """What does the work where there is no CuPy."""
    numels = (1, 1500 if isinstance(codec, Dense) else 20_001)
    assert check(WithoutWaits(TorchKernels()), "cuda", codec, numels, dtype=dtype) == []


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_under_the_sanitizer(tool: str) -> None:
    script = """if True:
        import torch
        from gradwire.collectives.kernels.cuda.kernels import cuda_kernels
        from tests.cuda_machine.cases import CODECS, DENSE, check
        from tests.cuda_machine.matrices import check as check_matrices
        kernels = cuda_kernels(torch.device("cuda", 0))
        for codec in CODECS:
            numels = (3, 1500) if codec in DENSE else (20_001,)
            assert check(kernels, "cuda", codec, numels, ("ties", "not finite")) == []
        for kind in ("gaussian", "not finite"):
            assert check_matrices(kernels, "cuda", 19, 129, 132, kind) == []"""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", script]
    each_apart = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that no access strays into another tensor
    done = subprocess.run(command, env=each_apart, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("codec", DENSE + SPARSE, ids=repr)
def test_in_a_graph(kernels: CudaKernels, codec: Codec) -> None:
    """Captured once, then replayed on other numbers: nothing is synchronised, and nothing goes through the host."""
    numel = 100_000
    values, residual, out = (torch.zeros(numel, device="cuda") for _ in range(3))
    wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8, device="cuda")
    state = codec.new_state(numel, values.device)
    changed = [residual, out, wire, *(state or {}).values()]

    def step() -> None:
        codec.encode(values, wire, residual=residual, seed=1, state=state)
        codec.decode(wire, out)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(3):
        results = []
        for run in (graph.replay, step):
            values.copy_(numbers(numel, "gaussian", turn))
            for tensor in changed:
                tensor.zero_()
            run()
            run()
            results.append([tensor.clone() for tensor in changed])
        assert all(torch.equal(replayed, done) for replayed, done in zip(*results, strict=True))
        assert out.any()


@pytest.mark.timeout(400)
def test_no_kernel_is_compiled_after_precompile(kernels: CudaKernels, tmp_path: Path) -> None:
    """In later processes, with default settings."""
    compiles = """if True:
        import torch
        from gradwire.collectives.precompile import precompile_codecs
        precompile_codecs(torch.device("cuda", 0))"""
    forbids = """if True:
        from gradwire.collectives.kernels.cuda import compiling
        compiling.compile_kernel = None"""
    for script in (compiles, f"{forbids}\n{compiles}"):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=190
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.rglob("*.cubin"))


def test_in_a_thread_that_has_used_no_gpu(kernels: CudaKernels) -> None:
    codec, values = Int8(), torch.ones(1000, device="cuda")
    wire, other = (torch.zeros(codec.wire_bytes(1000), dtype=torch.uint8, device="cuda") for _ in range(2))
    kernels.int8_encode(values, None, wire, *codec.settings(), 0)
    thread = threading.Thread(target=kernels.int8_encode, args=(values, None, other, *codec.settings(), 0))
    thread.start()
    thread.join()
    assert torch.equal(wire, other)
    assert wire.any()


def test_on_the_current_stream(kernels: CudaKernels) -> None:
    """What was enqueued before it is seen, and what comes after sees its result."""
    codec, numel = Int8(), 1 << 20
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        values, product = torch.zeros(numel, device="cuda"), torch.ones(2048, 2048, device="cuda")
        for _ in range(20):
            product = product @ product / 2048
        values += product[0, 0]
        out = torch.empty_like(values)
        kernels.int8_encode(values, None, wire, *codec.settings(), 0)
        kernels.int8_decode(wire, out, *codec.settings(), False, 1.0)
        assert torch.equal(out, torch.ones_like(out))
