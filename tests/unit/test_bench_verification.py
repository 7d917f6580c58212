"""The data of collectives that are measured, and of each one's results: exact in every dtype, unlike on every rank, and able to
catch what goes wrong."""

import pytest
import torch

from gradwire.bench.micro import verification
from gradwire.bench.micro.cases import CASES, IN_PLACE, BenchJob, Buffers, Case, torch_takes
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
SIZES = (1, 2, 5, 13)
BY_DEFINITION = {**verification.REDUCTIONS, "average": verification.REDUCTIONS["sum"]}
REDUCTIONS = [(op, dtype) for op in OPS for dtype in DTYPES.values() if not (op == "average" and dtype == torch.bool)]


CALLS = [(case, place) for case in CASES.values() for place in case.places]
each_call = pytest.mark.parametrize(("case", "place"), CALLS, ids=[f"{case.name}-{place}" for case, place in CALLS])


def job(dtype: torch.dtype, op: str, rank: int = 0, size: int = 3, count: int = 10, place: str = IN_PLACE) -> BenchJob:
    return BenchJob(rank, size, count, dtype, op, root=0, device=CPU, place=place)


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


@pytest.mark.parametrize("size", [2, 3])
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
    with pytest.raises(ValueError, match=r"sum of torch.int8 over 128 ranks .*: at most 127 ranks are allowed"):
        contribution_tile(0, 128, "sum", torch.int8)
    for op in ("min", "max", "product"):
        assert reduced_tile(128, op, torch.int8).max() <= 127


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype != torch.bool])
@each_call
def test_a_result_that_was_never_written_is_wrong_everywhere(case: Case, place: str, dtype: torch.dtype) -> None:
    buffers = case.prepare(job(dtype, "sum", rank=1, place=place))
    buffers.reset()
    if place == IN_PLACE and buffers.output.count_nonzero():
        assert count_wrong(buffers.output, buffers.expected) > 0
    else:
        assert count_wrong(buffers.output, buffers.expected) == buffers.expected.numel()


# What the benchmark knows of each collective, in a world that is played by one process


def world(case: Case, size: int, dtype: torch.dtype, op: str, count: int, place: str) -> list[Buffers]:
    root = size - 1 if case.rooted else -1
    world = [case.prepare(BenchJob(rank, size, count, dtype, op, root, CPU, place)) for rank in range(size)]
    for buffers in world:
        buffers.reset()
    return world


def play(case: Case, world: list[Buffers], op: str) -> None:
    size = len(world)
    inputs = [buffers.input.clone() for buffers in world]
    reduced = torch.empty(0)
    if case.reduces:
        stacked = torch.stack(inputs)
        reduced = stacked.amax(0) if op == "max" else stacked.sum(0, dtype=stacked.dtype)
    for rank, buffers in enumerate(world):
        result = {
            "allreduce": reduced,
            "reduce_scatter": reduced[rank * len(reduced) // size : (rank + 1) * len(reduced) // size],
            "allgather": torch.cat(inputs),
            "broadcast": inputs[-1],
            "alltoall": torch.cat([one[rank * len(one) // size : (rank + 1) * len(one) // size] for one in inputs]),
        }[case.name]
        buffers.output.copy_(result)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("op", ["sum", "max"])
@each_call
def test_expected_is_what_the_collective_means(case: Case, place: str, op: str, dtype: torch.dtype, size: int) -> None:
    ranks = world(case, size, dtype, op, 5000, place)
    play(case, ranks, op)
    assert [count_wrong(buffers.output, buffers.expected) for buffers in ranks] == [0] * size


@each_call
def test_one_corrupted_element_is_counted(case: Case, place: str) -> None:
    ranks = world(case, 3, torch.float32, "sum", 100, place)
    play(case, ranks, "sum")
    ranks[1].output[7] += 1
    assert [count_wrong(buffers.output, buffers.expected) for buffers in ranks] == [0, 1, 0]


@pytest.mark.parametrize("name", ["reduce_scatter", "allgather", "alltoall"])
def test_blocks_in_the_wrong_order_are_counted(name: str) -> None:
    ranks = world(CASES[name], 3, torch.int32, "sum", 99, CASES[name].places[0])
    play(CASES[name], ranks, "sum")
    output = ranks[0].output
    output.copy_(output.roll(33))
    assert count_wrong(output, ranks[0].expected) > 90


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("size", [1, 3, 8])
@each_call
def test_bytes_are_of_the_whole_array(case: Case, place: str, size: int, dtype: torch.dtype) -> None:
    """Check that bytes are never more than asked for, and less only by what cannot be shared out evenly."""
    job = BenchJob(0, size, case.count(1000, size, dtype), dtype, "max", 0, CPU, place)
    assert 1000 - size * dtype.itemsize < case.nbytes(job) <= 1000
    buffers = case.prepare(job)
    assert case.nbytes(job) == max(buffers.input.nbytes, buffers.output.nbytes)


def test_what_counts() -> None:
    expected = torch.tensor([1.0, 2.0, 3.0])
    assert [count_wrong(one, expected) for one in (expected.clone(), expected + 0.5, expected * torch.nan)] == [0, 3, 3]
    assert [exact_limit(dtype) for dtype in (torch.bfloat16, torch.float16, torch.int8)] == [256, 2048, 127]
    assert (CASES["allgather"].count(8, 5, torch.float32), CASES["allreduce"].count(1, 5, torch.float32)) == (1, 1)
    factors = {"allreduce": 1.5, "reduce_scatter": 0.75, "allgather": 0.75, "alltoall": 0.75, "broadcast": 1.0}
    assert {name: case.busbw_factor(4) for name, case in CASES.items()} == factors
    assert torch_takes(job(torch.float16, "sum"))
    assert not torch_takes(job(torch.int16, "sum"))
    for start, count in ((0, 1), (PERIOD - 1, 5), (3 * PERIOD + 7, 2 * PERIOD + 3)):
        window = (start + torch.arange(count)) % PERIOD
        assert torch.equal(expand(torch.arange(PERIOD), start, count, torch.int64, CPU), window)
