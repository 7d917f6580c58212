"""The compiled reductions against torch's own, bit for bit."""

import ctypes

import pytest
import torch

from gradwire.collectives.kernels import cpu_arithmetic, layout
from gradwire.collectives.reduction import DTYPES

pytest.importorskip("numba")


NUMELS = (0, 1, 2, 15, 16, 17, 63, 1000, 4099)
TORCH = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
CARRIED = [dtype for dtype in DTYPES if dtype is not torch.bool]


def numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random ones; among floats, also infinities, the smallest, the largest and zeros."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (numel,), dtype=dtype, generator=generator)
    values = (torch.randn(numel, generator=generator, dtype=torch.float64) * 100).to(dtype)
    info_f = torch.finfo(dtype)
    special = torch.tensor([float("inf"), info_f.smallest_normal, info_f.max, 0.0, info_f.tiny / 4], dtype=dtype)
    places = torch.randint(0, max(1, numel), (min(numel, 20),), generator=generator)
    values[places] = special[torch.arange(len(places)) % len(special)]
    return values


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, with one NaN for all."""
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.contiguous().view(torch.uint8)


def run(destination: torch.Tensor, source: torch.Tensor, op: int, divisor: int = 1) -> None:
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(cpu_arithmetic(destination.dtype).address)
    function(destination.data_ptr(), source.data_ptr(), destination.numel(), op, divisor)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("op", TORCH)
@pytest.mark.parametrize("dtype", CARRIED, ids=str)
def test_reductions(dtype: torch.dtype, op: str, offset: int) -> None:
    for numel in NUMELS:
        a, b = numbers(numel + offset, dtype, 1)[offset:], numbers(numel + offset, dtype, 2)[offset:]
        expected = TORCH[op](a, b)
        run(a, b, layout.OPS[op])
        assert torch.equal(bits(a), bits(expected)), numel


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("dtype", CARRIED, ids=str)
def test_division(dtype: torch.dtype, size: int) -> None:
    for numel in NUMELS:
        a = numbers(numel, dtype, 3)
        expected = a.clone().div_(size, rounding_mode=None if dtype.is_floating_point else "trunc")
        run(a, a, layout.DIVIDE, size)
        assert torch.equal(bits(a), bits(expected)), numel


def test_every_bfloat16_and_float16_survives_widening() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        for other in (0.0, 1.0, 3.0e-5, -123.0):
            a, b = every.clone(), torch.full_like(every, other)
            expected = a + b
            run(a, b, layout.OPS["sum"])
            assert torch.equal(bits(a), bits(expected)), (dtype, other)
