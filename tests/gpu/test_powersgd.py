"""PowerSGD on a GPU: the checks that its kernels pass on the machine in numpy, and exchanges that only enqueue."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gradwire.collectives.compression.codec import NUMBERS
from gradwire.collectives.compression.powersgd import PowerSGD, PowerSGDState
from gradwire.collectives.kernels.cuda.kernels import CudaKernels, TorchKernels, cuda_kernels
from tests.cuda_machine.matrices import KINDS, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SHAPES = [(40, 30), (300, 257), (40, 30), (7,), (64, 4, 3, 3), (1031, 520), (300, 257)]
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def kernels() -> CudaKernels:
    found = cuda_kernels(GPU)
    if not isinstance(found, CudaKernels):
        pytest.skip("needs CuPy for torch's CUDA")
    return found


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_do_as_the_reference(kernels: CudaKernels, kind: str, dtype: torch.dtype) -> None:
    cases = (4, 129, 132, 0, 3), (32, 70, 1001, 1, 3), (1, 5000, 257, 0, 3), (2, 1, 4, 3, 500)
    for rank, rows, columns, shift, batch in cases:
        assert check(kernels, "cuda", rank, rows, columns, kind, dtype, shift, batch) == []


def test_plain_torch() -> None:
    """What does the work where there is no CuPy."""
    assert check(TorchKernels(), "cuda", 4, 129, 132) == []


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def exchange(state: PowerSGDState, tensors: list[Tensor]) -> list[Tensor]:
    for _ in state.exchange(tensors):
        pass
    return tensors


@pytest.fixture
def tf32() -> Iterator[None]:
    """Let torch multiply matrices with 10 bits of each number, as many do."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_results_are_those_of_the_cpu(kernels: CudaKernels, dtype: torch.dtype) -> None:
    states = [PowerSGD().new_state(SHAPES, device) for device in (torch.device("cpu"), GPU)]
    for step in range(3):
        expected, found = (
            exchange(state, [tensor.to(device) for tensor in gradients(step, dtype)])
            for state, device in zip(states, ("cpu", "cuda"), strict=True)
        )
        for there, here in zip(found, expected, strict=True):
            torch.testing.assert_close(there.cpu(), here, rtol=1e-3 if dtype is torch.float32 else 2e-2, atol=1e-3)


def test_errors_are_exact_with_any_precision_of_products(kernels: CudaKernels, tf32: None) -> None:
    state = PowerSGD().new_state(SHAPES, GPU)
    given = [tensor.cuda() for tensor in gradients(0, torch.float32)]
    received = exchange(state, [tensor.clone() for tensor in given])
    for index, (gradient, result) in enumerate(zip(given, received, strict=True)):
        if kept := state.kept(index):
            torch.testing.assert_close(result + kept[0].view_as(result), gradient, rtol=1e-5, atol=1e-5)


def test_nothing_waits_for_the_gpu(kernels: CudaKernels) -> None:
    state = PowerSGD().new_state(SHAPES, GPU)
    tensors = [tensor.cuda() for tensor in gradients(0, torch.bfloat16)]
    exchange(state, tensors)  # compiles the kernels
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        exchange(state, tensors)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_in_a_graph(kernels: CudaKernels) -> None:
    """Captured once, then replayed on other gradients."""
    captured, direct = (PowerSGD().new_state(SHAPES, GPU) for _ in range(2))
    tensors = [tensor.cuda() for tensor in gradients(0, torch.float32)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        exchange(PowerSGD().new_state(SHAPES, GPU), [tensor.clone() for tensor in tensors])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchange(captured, tensors)
    for step in range(3):
        given = [tensor.cuda() for tensor in gradients(step, torch.float32)]
        for tensor, gradient in zip(tensors, given, strict=True):
            tensor.copy_(gradient)
        graph.replay()
        for replayed, done in zip(tensors, exchange(direct, given), strict=True):
            torch.testing.assert_close(replayed, done, rtol=1e-4, atol=1e-4)
