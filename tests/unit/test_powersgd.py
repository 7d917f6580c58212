"""PowerSGD: factors of gradients summed over ranks, which here are states in one process."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.collectives.compression.powersgd import PowerSGD, PowerSGDState
from gradwire.collectives.kernels.cpu import entries as cpu_kernels
from gradwire.collectives.kernels.cuda.kernels import CudaKernels
from gradwire.collectives.kernels.reference import matrices as reference
from tests.cuda_machine import MachineLaunch
from tests.cuda_machine.cases import bits
from tests.cuda_machine.matrices import KINDS, check, factors

CPU = torch.device("cpu")
SHAPES = [(40, 30), (7,), (40, 30), (16, 4, 3, 3), (3, 5), (), (50, 40), (0, 9)]


def exchange(states: Sequence[PowerSGDState], inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the result of ranks that take their steps together, once it is seen to be the same on all of them."""
    results = [[tensor.clone() for tensor in tensors] for tensors in inputs]
    for sums in zip(*map(PowerSGDState.exchange, states, results), strict=True):
        total = torch.stack(sums).sum(0)
        for mine in sums:
            mine.copy_(total)
    for other in results[1:]:
        assert all(map(torch.equal, map(bits, other), map(bits, results[0])))
    return results[0]


def gradients(rank: int, step: int, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(tuple(shape), generator=generator) for shape in shapes]


def of_rank(rank: int, rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)


def kept(state: PowerSGDState) -> list[tuple[Tensor, dict[str, Tensor]]]:
    return [found for index in range(len(SHAPES)) if (found := state.kept(index)) is not None]


def errors(state: PowerSGDState) -> list[Tensor]:
    return [error for error, _ in kept(state)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_results_and_errors_add_up_to_the_gradients(size: int, rank: int) -> None:
    """Summed over ranks and steps; exactly for what is not compressed."""
    codec = PowerSGD(rank)
    states = [codec.new_state(SHAPES, CPU) for _ in range(size)]
    given, received = (list(map(torch.zeros, SHAPES)) for _ in range(2))
    for step in range(6):
        inputs = [gradients(r, step) for r in range(size)]
        result = exchange(states, inputs)
        for i, shape in enumerate(SHAPES):
            total = torch.stack([inputs[r][i] for r in range(size)]).sum(0)
            if not codec.compresses(shape):
                assert torch.equal(result[i], total)
            given[i] += total
            received[i] += result[i]
    left = {
        shape: sum(error for state in states for error in errors(state) if len(error) == shape[0])
        for shape in SHAPES
        if shape
    }
    for shape in {shape for shape in SHAPES if codec.compresses(shape)}:
        alike = [i for i, other in enumerate(SHAPES) if other == shape]
        lost = sum(given[i] - received[i] for i in alike)
        assert isinstance(lost, Tensor)
        torch.testing.assert_close(lost.view(shape[0], -1), left[shape], rtol=1e-4, atol=1e-3)


def test_which_tensors_are_compressed() -> None:
    assert [shape for shape in SHAPES if PowerSGD(6).compresses(shape)] == [(40, 30), (40, 30), (50, 40)]
    assert [shape for shape in SHAPES if PowerSGD(1).compresses(shape)] == [(40, 30), (40, 30), (16, 4, 3, 3), (50, 40)]
    assert not PowerSGD(1).compresses((10, 0))
    assert not PowerSGD(1).compresses((1000, 1))


def test_wire_bytes_are_what_is_summed() -> None:
    """In two sums, or one where there is nothing to compress."""
    for shapes, sums in (SHAPES, 2), ([(3,), (2, 2)], 1), ([], 1):
        codec = PowerSGD(2)
        sizes = [4 * each.numel() for each in codec.new_state(shapes, CPU).exchange(gradients(0, 0, shapes))]
        assert len(sizes) == sums
        assert sum(sizes) == codec.wire_bytes(shapes)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_sum_of_that_rank_is_exact(rank: int) -> None:
    """The ranks' own gradients have another: with feedback they add up."""
    codec, shape = PowerSGD(rank), (60, 50)
    other = of_rank(6, *shape, seed=5)
    inputs = [[of_rank(rank, *shape, seed=1) + other], [-other]]
    result = exchange([codec.new_state([shape], CPU) for _ in range(2)], inputs)
    torch.testing.assert_close(result[0], inputs[0][0] + inputs[1][0], rtol=1e-4, atol=1e-4)


def test_iteration_goes_on_to_the_largest_singular_values() -> None:
    generator = torch.Generator().manual_seed(2)
    u = torch.linalg.qr(torch.randn(60, 50, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(50, 50, generator=generator)).Q
    values = 0.8 ** torch.arange(50)
    gradient = u * values @ v.T
    state = PowerSGD(4).new_state([gradient.shape], CPU)
    [first] = exchange([state], [[gradient]])
    for _ in range(30):
        for error in errors(state):
            error.zero_()  # the matrix stays the same
        [last] = exchange([state], [[gradient]])
    best = float(values[4:].norm())
    assert best * (1 - 1e-4) <= float((gradient - last).norm()) <= best * 1.01 < float((gradient - first).norm())


def test_errors_stay_bounded_where_ranks_differ() -> None:
    codec, shape = PowerSGD(2), (40, 40)
    states = [codec.new_state([shape], CPU) for _ in range(2)]
    common, own = of_rank(2, *shape, seed=1), of_rank(2, *shape, seed=2)
    for _ in range(40):
        exchange(states, [[common + own], [common - own]])
    for state in states:
        assert float(errors(state)[0].norm()) < 45 * float(own.norm())


SINGLE = torch.zeros(40, 30).index_put((torch.tensor(7), torch.tensor(9)), torch.tensor(-3.0))


@pytest.mark.parametrize(
    "gradient",
    [torch.zeros(40, 30), of_rank(1, 40, 30, 3), of_rank(2, 40, 30, 3) * 1e-36, of_rank(2, 40, 30, 3) * 1e34, SINGLE],
    ids=["zeros", "one rank", "tiny", "huge", "a single number"],
)
def test_odd_gradients(gradient: Tensor) -> None:
    state, later = PowerSGD(4).new_state([gradient.shape], CPU), of_rank(4, 40, 30, 4)
    for _ in range(3):
        [result] = exchange([state], [[gradient]])
        assert float((result - gradient).double().norm()) <= 1e-5 * float(gradient.double().norm())
    for error in errors(state):
        error.zero_()
    [result] = exchange([state], [[later]])
    assert float((result - later).norm()) <= 1e-3 * float(later.norm())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_all_ranks_and_does_not_stay(bad: float) -> None:
    codec, shapes = PowerSGD(2), [(40, 30), (40, 30), (9,)]
    states = [codec.new_state(shapes, CPU) for _ in range(2)]
    exchange(states, [gradients(r, 0, shapes) for r in range(2)])
    inputs = [gradients(r, 1, shapes) for r in range(2)]
    inputs[1][0][3] = bad
    result = exchange(states, inputs)
    assert result[0].isnan().all()
    assert result[1].isfinite().all()
    for state in states:
        assert all(tensor.isfinite().all() for error, more in kept(state) for tensor in (error, *more.values()))
        assert [bool(error.any()) for error in errors(state)] == [False, True]
    assert exchange(states, [gradients(r, 2, shapes) for r in range(2)])[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_exchanged_as_float32_and_rounded_once(dtype: torch.dtype) -> None:
    codec = PowerSGD(2)
    halves, whole = ([codec.new_state(SHAPES, CPU) for _ in range(2)] for _ in range(2))
    for step in range(3):
        inputs = [[tensor.to(dtype) for tensor in gradients(rank, step)] for rank in range(2)]
        rounded = exchange(halves, inputs)
        exact = exchange(whole, [[tensor.float() for tensor in tensors] for tensors in inputs])
        assert all(torch.equal(half, number.to(dtype)) for half, number in zip(rounded, exact, strict=True))
    for one, other in zip(halves, whole, strict=True):
        assert all(map(torch.equal, errors(one), errors(other)))


class Counter(TorchDispatchMode):
    """Counts the operators that would launch something on a GPU, and stops where the host would wait for one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, "the host reads numbers"
        self.count += not (func.is_view or func is torch.ops.aten.empty.memory_format)
        return func(*args, **kwargs or {})


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> MachineLaunch:
    """Let states on the CPU use the kernels of a GPU."""
    launch = MachineLaunch()
    monkeypatch.setattr("gradwire.collectives.compression.powersgd.kernels_for", lambda device: CudaKernels(launch))
    return launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gets_the_results_of_the_cpu(
    launch: MachineLaunch, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    on_gpu = [PowerSGD(2).new_state(SHAPES, CPU) for _ in range(2)]
    monkeypatch.undo()
    on_cpu = [PowerSGD(2).new_state(SHAPES, CPU) for _ in range(2)]
    for step in range(2):
        inputs = [[tensor.to(dtype) for tensor in gradients(rank, step)] for rank in range(2)]
        for found, expected in zip(exchange(on_gpu, inputs), exchange(on_cpu, inputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=0.02 if dtype is torch.bfloat16 else 1e-4, atol=1e-4)
    for one, other in zip(on_gpu, on_cpu, strict=True):
        for found, expected in zip(errors(one), errors(other), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def launches(launch: MachineLaunch, rank: int, *shapes: Sequence[int]) -> int:
    """Return how many operators and kernels an exchange launches."""
    state, tensors, before = PowerSGD(rank).new_state(shapes, CPU), list(map(torch.ones, shapes)), len(launch.launched)
    with Counter() as counter:
        for _ in state.exchange(tensors):
            pass
    return counter.count + len(launch.launched) - before


def test_launches_depend_only_on_the_number_of_shapes(launch: MachineLaunch) -> None:
    """And no number is read on the host."""
    one, two, vectors = (40, 30), (50, 44), (7,)
    assert launches(launch, 4, *[one] * 6, *[two] * 6) == launches(launch, 1, one, two) == 14
    assert launches(launch, 2, one) == 7
    assert launches(launch, 2, one, *[vectors] * 5) == launches(launch, 2, one, vectors) == 9


def test_tensors_are_checked() -> None:
    state = PowerSGD(1).new_state([(40, 30)], CPU)
    for wrong in torch.zeros(40, 30, dtype=torch.float64), torch.zeros(30, 40).t(), torch.zeros(40, 30, device="meta"):
        with pytest.raises(ValueError, match="powersgd"):
            list(state.exchange([wrong]))
    mixed = PowerSGD(1).new_state([(3,), (4,)], CPU)
    with pytest.raises(ValueError, match="all float32"):
        list(mixed.exchange([torch.zeros(3), torch.zeros(4, dtype=torch.float16)]))
    with pytest.raises(ValueError, match="do not have the shapes"):
        list(state.exchange([torch.zeros(30, 40)]))
    with pytest.raises(ValueError, match="rank must be"):
        PowerSGD(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [1, 2, 4, 5])
@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 1000])
def test_the_kernels_do_as_the_reference(rows: int, rank: int, kind: str) -> None:
    assert check(cpu_kernels, "cpu", rank, rows, 33, kind) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_take_halves(dtype: torch.dtype) -> None:
    assert check(cpu_kernels, "cpu", 4, 127, 33, dtype=dtype) == []


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_orthonormal_or_zero(kind: str) -> None:
    vectors = factors(4, 500, kind)
    cpu_kernels.powersgd_orthonormalize(vectors)
    products = vectors @ vectors.transpose(1, 2)
    expected = torch.eye(4).repeat(3, 1, 1)
    if kind == "dependent":
        expected[:, 3] = 0
    elif kind == "zeros":
        expected[0] = 0
    elif kind == "not finite":
        assert not vectors[0].isfinite().all()
        assert not vectors[2].isfinite().all()
        products, expected = products[1:2], expected[1:2]
    torch.testing.assert_close(products, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rows", "columns"), [(37, 5000), (70, 5008), (132, 2001)])
def test_the_product_is_one(rows: int, columns: int) -> None:
    """Large ones whose rows begin where vectors may be stored are written past the caches."""
    left, right, out, expected = (torch.randn(1, *shape) for shape in ((4, rows), (4, columns), *[(rows, columns)] * 2))
    assert out.data_ptr() % 64 == 0
    assert (out.numel() >= 1 << 18) is (rows > 37)
    cpu_kernels.powersgd_multiply(left, right, [*out])
    reference.powersgd_multiply(left, right, [*expected])
    assert torch.equal(bits(out), bits(expected))
    torch.testing.assert_close(out, left.transpose(1, 2) @ right)
