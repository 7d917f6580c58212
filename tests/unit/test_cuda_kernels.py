"""The CUDA kernels, as NVRTC compiles them, on a machine in numpy, against the reference, byte for byte."""

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.collectives.compression import dense
from gradwire.collectives.compression.codec import NUMBERS, Codec
from gradwire.collectives.compression.dense import Dense, Int8
from gradwire.collectives.compression.sparse import ChunkTopK, RandomK, Sparse, TopK
from gradwire.collectives.kernels.cuda import launch as cuda
from gradwire.collectives.kernels.cuda.compiling import compile_kernel as compile_by_cupy
from gradwire.collectives.kernels.cuda.compiling import source
from gradwire.collectives.kernels.cuda.kernels import CudaKernels, TorchKernels, cuda_kernels
from gradwire.collectives.kernels.cuda.launch import CupyLaunch
from tests.cuda_machine import MachineLaunch, Order
from tests.cuda_machine.cases import CHUNKED, CODECS, DENSE, KINDS, SPARSE, SPARSE_NUMELS, check
from tests.cuda_machine.matrices import KINDS as MATRICES
from tests.cuda_machine.matrices import check as check_matrices
from tests.cuda_machine.nvrtc import compile_kernel
from tests.harness import wide, wide_rows

#: Codecs whose kernels run, with more in them, for other codecs of DENSE.
PLAIN = (dense.Float16(), dense.Float8(), Int8(), dense.Int4(), dense.OneBit(), dense.QSGD(), dense.TernGrad())

FEW_KINDS = ("gaussian", "ties", "not finite")


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """What torch.empty gives holds numbers that no kernel could mistake for zeros."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize("codec", [*wide(*PLAIN), *(codec for codec in DENSE if codec not in PLAIN)], ids=repr)
def test_dense(codec: Dense) -> None:
    assert check(CudaKernels(MachineLaunch()), "cpu", codec) == []


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        (Int8(), torch.bfloat16),
        (TopK(), torch.float16),
        (RandomK(), torch.bfloat16),
        (ChunkTopK(), torch.float16),
        *wide_rows(*((codec, dtype) for codec in CODECS for dtype in (torch.bfloat16, torch.float16))),
    ],
    ids=repr,
)
def test_halves(codec: Codec, dtype: torch.dtype) -> None:
    """Numbers of 16 bits, at addresses where four of them are loaded at once, and at others."""
    numels = (129, 1533, 1500) if isinstance(codec, Dense) else (4097, 4100)
    assert check(CudaKernels(MachineLaunch()), "cpu", codec, numels, FEW_KINDS, dtype) == []


@pytest.mark.wide
@pytest.mark.parametrize("codec", [dense.Float8(), Int8(block=1024, stochastic=True)], ids=repr)
def test_dense_on_another_architecture(codec: Dense) -> None:
    assert check(CudaKernels(MachineLaunch("compute_90")), "cpu", codec, (129, 1500)) == []


@pytest.mark.parametrize(
    ("architecture", "order", "numels", "kinds"),
    [
        ("compute_80", Order.TOGETHER, SPARSE_NUMELS[:-1], FEW_KINDS),
        *wide_rows(
            ("compute_80", Order.EVEN, SPARSE_NUMELS[-1:], FEW_KINDS[1:]),
            ("compute_80", Order.ODD, SPARSE_NUMELS[-1:], FEW_KINDS),
            ("compute_80", Order.TOGETHER, SPARSE_NUMELS[-1:], KINDS),
            ("compute_90", Order.TOGETHER, SPARSE_NUMELS[:-1], FEW_KINDS),
        ),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else getattr(value, "value", value),
)
@pytest.mark.parametrize("codec", SPARSE, ids=repr)
def test_sparse(
    codec: Sparse, architecture: str, order: Order, numels: tuple[int, ...], kinds: tuple[str, ...]
) -> None:
    """In any order of the warps: where one needs what another has done, it waits for it."""
    assert check(CudaKernels(MachineLaunch(architecture, order)), "cpu", codec, numels, kinds) == []


@pytest.mark.parametrize(
    ("codec", "order"),
    [(CHUNKED[0], Order.TOGETHER), *wide_rows((CHUNKED[1], Order.EVEN), (CHUNKED[2], Order.ODD))],
    ids=str,
)
def test_chunks(codec: ChunkTopK, order: Order) -> None:
    assert check(CudaKernels(MachineLaunch(order=order)), "cpu", codec, kinds=FEW_KINDS) == []


@pytest.mark.parametrize(
    ("rank", "rows", "columns", "kind", "dtype", "order"),
    [
        (4, 129, 132, "gaussian", torch.float32, Order.TOGETHER),
        (3, 40, 1001, "dependent", torch.float32, Order.EVEN),
        (19, 33, 70, "gaussian", torch.bfloat16, Order.ODD),  # more vectors than are projected at a time
        (2, 1, 260, "not finite", torch.float16, Order.TOGETHER),
        (1, 17, 128, "zeros", torch.bfloat16, Order.EVEN),
        (2, 130, 4, "denormal", torch.float32, Order.ODD),
        *wide_rows(
            *(
                (4, 129, 132, kind, dtype, Order.TOGETHER)
                for kind in MATRICES
                for dtype in (torch.float32, torch.float16)
            )
        ),
    ],
    ids=lambda value: getattr(value, "value", str(value)),
)
@pytest.mark.parametrize("shift", [0, 1])
def test_matrices(rank: int, rows: int, columns: int, kind: str, dtype: torch.dtype, order: Order, shift: int) -> None:
    kernels = CudaKernels(MachineLaunch(order=order))
    assert check_matrices(kernels, "cpu", rank, rows, columns, kind, dtype, shift) == []


def test_more_matrices_than_a_launch_takes() -> None:
    launch = MachineLaunch()
    assert check_matrices(CudaKernels(launch), "cpu", 1, 2, 3, batch=450) == []
    assert launch.launched.count("accumulate<float>") == 2


class FewBlocks(CudaKernels):
    blocks = 2


@pytest.mark.parametrize("codec", SPARSE, ids=repr)
def test_blocks_of_several_chunks(codec: Sparse) -> None:
    assert check(FewBlocks(MachineLaunch()), "cpu", codec, (40_001,), ("ties",)) == []


def test_blocks_that_no_warp_holds() -> None:
    launch = MachineLaunch()
    assert check(CudaKernels(launch), "cpu", Int8(block=48), (100,)) == []
    assert launch.launched == []


def test_nothing_is_done_for_nothing() -> None:
    for codec in CODECS:
        assert check(CudaKernels(MachineLaunch()), "cpu", codec, (0,), FEW_KINDS[:1]) == []


@pytest.mark.parametrize("architecture", ["compute_80", *wide("sm_80", "sm_90")])
def test_every_kernel_compiles_without_a_warning(architecture: str) -> None:
    """To PTX and to machine code, and all of those that the sources have.

    The machine, which knows no local memory, sees to spills.
    """
    launched = set()

    def note(family: str, kernel: str, *_: Any, **__: Any) -> None:
        launched.add((family, kernel))

    for codec in CODECS:
        for dtype in NUMBERS if architecture.startswith("sm") else NUMBERS[:1]:
            check(CudaKernels(note), "cpu", codec, (1, 3), FEW_KINDS[:1], dtype)  # which finds nothing computed
    for dtype in NUMBERS if architecture.startswith("sm") else NUMBERS[:1]:
        check_matrices(CudaKernels(note), "cpu", 1, 2, 2, dtype=dtype)
    for family in ("quantize", "sparse", "matrices"):
        written = set(re.findall(r"__global__ void __launch_bounds__\(THREADS\) (\w+)\(", source(family)))
        assert written == {kernel.split("<")[0] for of, kernel in launched if of == family}
    alike = {re.sub(r"\d+|true|false", "", kernel): (family, kernel) for family, kernel in sorted(launched)}
    for family, kernel in alike.values():
        assert compile_kernel(family, kernel, architecture).log == "", kernel


def test_cupy_compiles_the_same() -> None:
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    code, name = compile_by_cupy(nvrtc, "quantize", "encode<Int8<256, false>, true, float>", "sm_80")
    assert len(code) > 1000
    assert "encode" in name
    with pytest.raises(RuntimeError, match="no_such_codec"):
        compile_by_cupy(nvrtc, "quantize", "encode<no_such_codec, true, float>", "sm_80")


def test_cupy_launches_on_the_stream_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And loads a kernel once for each device, and makes the context of a thread that has none."""
    loaded, launched, contexts = [], [], [0]

    class Module:
        def load(self, code: bytes) -> None:
            self.code = code

        def get_function(self, name: str) -> Any:
            return SimpleNamespace(ptr=(self.code, name))

    def launch_kernel(function: Any, *rest: int) -> None:
        *sizes, stream, parameters, extra = rest
        assert contexts[-1]
        content = ctypes.string_at(ctypes.c_void_p.from_address(parameters).value or 0, 2)
        launched.append((*function, sizes, stream, content, extra))

    def code_of(cupy: Any, family: str, kernel: str, architecture: str) -> tuple[bytes, str]:
        loaded.append((family, kernel, architecture))
        return architecture.encode(), kernel.upper()

    cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            function=SimpleNamespace(Module=Module),
            driver=SimpleNamespace(launchKernel=launch_kernel, ctxGetCurrent=lambda: contexts[-1]),
            runtime=SimpleNamespace(free=lambda address: contexts.append(1)),
        )
    )
    monkeypatch.setattr(cuda, "code_of", code_of)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    calls = [(0, 0), (1, 0), (0, 5), (0, 0)]  # devices, and the handles of their current streams
    handles = iter([handle for _, handle in calls])
    monkeypatch.setattr(cuda, "current_stream_handle", lambda device: next(handles))
    launch = CupyLaunch(cupy)
    for device, _ in calls:
        launch("sparse", "mark", 5, bytes([device, 2]), [SimpleNamespace(device=torch.device("cuda", device))])
    assert loaded == [("sparse", "mark", "sm_90"), ("sparse", "mark", "sm_91")]
    assert len(contexts) == 2
    assert launched == [
        (f"sm_9{device}".encode(), "MARK", [5, 1, 1, 256, 1, 1, 0], stream, bytes([device, 2]), 0)
        for device, stream in calls
    ]


class TestWithoutKernels:
    """One line says what to install, and plain torch does the work."""

    @pytest.fixture(autouse=True)
    def torch_with_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.6")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 - 2 * device.index, 5))

    def told(self, index: int = 0) -> str:
        with pytest.warns(UserWarning, match="plain torch") as warnings:
            kernels = cuda_kernels(torch.device("cuda", index))
        assert isinstance(kernels, TorchKernels)
        (warning,) = warnings
        assert "\n" not in str(warning.message)
        return str(warning.message)

    def test_cupy_is_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cupy", None)
        assert self.told().endswith(": pip install cupy-cuda12x")

    def test_cupy_does_not_load(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "cupy.py").write_text(
            "try:\n    import no_such_library\nexcept ImportError as error:\n    raise ImportError('\\n===\\n') from error\n"
        )
        monkeypatch.delitem(sys.modules, "cupy", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        told = self.told()
        assert "no_such_library" in told
        assert "pip install cupy-cuda12x" in told

    def test_cupy_is_built_for_another_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime = SimpleNamespace(runtimeGetVersion=lambda: 13020)
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
        told = self.told()
        assert "built for CUDA 13, torch for CUDA 12" in told
        assert "pip install cupy-cuda12x" in told

    def test_the_gpu_is_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The one in use: an old card beside it does not count."""
        monkeypatch.setitem(sys.modules, "cupy", None)
        assert "capability 8.0, cuda:1 has 7.5" in self.told(1)
        assert "capability" not in self.told(0)

    def test_plain_torch_has_every_function(self) -> None:
        functions = [name for name in dir(CudaKernels) if re.fullmatch(r"[a-z].*(_encode|_decode|sgd_\w+)", name)]
        assert len(functions) > 20
        assert all(callable(getattr(TorchKernels(), name)) for name in functions)

    def test_torch_without_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        assert cuda_kernels(torch.device("cuda", 0)) == "this torch was built without CUDA"
