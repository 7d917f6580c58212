"""The data that results are checked with: exact in every dtype, unlike on every rank, and able to catch what goes wrong."""

import pytest
import torch

from gradwire.bench.micro import verification
from gradwire.bench.micro.cases import CASES, Case, Job, torch_takes
from gradwire.bench.micro.options import DTYPES, OPS
from gradwire.bench.micro.verification import (
    PERIOD,
    contribution_tile,
    count_wrong,
    exact_limit,
    expand,
    own_tile,
    reduced_tile,
)

CPU = torch.device("cpu")
SIZES = (1, 2, 3, 5, 8, 13)
BY_DEFINITION = {**verification.REDUCTIONS, "average": verification.REDUCTIONS["sum"]}
REDUCTIONS = [(op, dtype) for op in OPS for dtype in DTYPES.values() if not (op == "average" and dtype == torch.bool)]


def job(dtype: torch.dtype, op: str, rank: int = 0, size: int = 3, count: int = 10) -> Job:
    return Job(rank, size, count, dtype, op, root=0, device=CPU)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 256), (torch.float16, 2048), (torch.int8, 127)])
def test_limit_of_exact_whole_numbers(dtype: torch.dtype, limit: int) -> None:
    assert exact_limit(dtype) == limit
    numbers = torch.arange(limit + 1)
    assert torch.equal(numbers.to(dtype).long(), numbers)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
def test_reducing_in_the_dtype_itself_gives_the_expected(op: str, dtype: torch.dtype, size: int) -> None:
    """Reduce in rank order, one contribution after the other, as a ring does: no partial result is rounded."""
    combine = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}.get(op, torch.add)
    total = contribution_tile(0, size, op, dtype).to(dtype)
    for rank in range(1, size):
        total = combine(total, contribution_tile(rank, size, op, dtype).to(dtype))
    if op == "average":
        total = total.div(size, rounding_mode=None if dtype.is_floating_point else "trunc")
    assert torch.equal(total, reduced_tile(size, op, dtype).to(dtype))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
def test_a_contribution_left_out_is_seen(op: str, dtype: torch.dtype, size: int) -> None:
    expected = reduced_tile(size, op, dtype)
    for left_out in range(size):
        others = torch.stack([contribution_tile(rank, size, op, dtype) for rank in range(size) if rank != left_out])
        without = others.amax(0) if op == "sum" and dtype == torch.bool else BY_DEFINITION[op](others).double()
        without = without / size if op == "average" else without
        assert not torch.equal(without.double(), expected.double())


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_data_that_is_only_moved_differs_between_neighbours(dtype: torch.dtype) -> None:
    tiles = [own_tile(rank, dtype).to(dtype) for rank in range(3)]
    assert all((tiles[rank] != tiles[rank + 1]).all() for rank in range(2))


def test_more_ranks_than_the_dtype_can_add_are_refused() -> None:
    assert contribution_tile(0, 127, "sum", torch.int8).max() == 1
    with pytest.raises(ValueError, match="cannot hold"):
        contribution_tile(0, 128, "sum", torch.int8)


@pytest.mark.parametrize("start", [0, 1, PERIOD - 1, PERIOD, 3 * PERIOD + 7])
@pytest.mark.parametrize("count", [1, 5, PERIOD, 2 * PERIOD + 3])
def test_expand_is_a_window_on_the_repeated_tile(start: int, count: int) -> None:
    tile = torch.arange(PERIOD)
    expected = (start + torch.arange(count)) % PERIOD
    assert torch.equal(expand(tile, start, count, torch.int64, CPU), expected)


def test_every_wrong_element_is_counted() -> None:
    expected = torch.tensor([1.0, 2.0, 3.0])
    assert count_wrong(expected.clone(), expected) == 0
    assert count_wrong(torch.tensor([1.0, 2.5, 3.0]), expected) == 1
    assert count_wrong(torch.full((3,), torch.nan), expected) == 3


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype != torch.bool])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_result_that_was_never_written_is_wrong_everywhere(case: Case, dtype: torch.dtype) -> None:
    buffers = case.prepare(job(dtype, "sum", rank=1))
    buffers.reset()
    if buffers.output is buffers.input and buffers.output.count_nonzero():
        assert count_wrong(buffers.output, buffers.expected) > 0
    else:
        assert count_wrong(buffers.output, buffers.expected) == buffers.expected.numel()


def test_gloo_is_not_asked_for_dtypes_it_lacks() -> None:
    assert torch_takes(job(torch.float16, "sum"))
    assert not torch_takes(job(torch.int16, "sum"))
