"""What the benchmark knows of each collective, in a world that is played by one process."""

import pytest
import torch

from gradwire.bench.micro.cases import CASES, Buffers, Case, Job
from gradwire.bench.micro.options import DTYPES
from gradwire.bench.micro.verification import count_wrong

CPU = torch.device("cpu")


def world(case: Case, size: int, dtype: torch.dtype, op: str, count: int) -> list[Buffers]:
    root = size - 1 if case.rooted else -1
    world = [case.prepare(Job(rank, size, count, dtype, op, root, CPU)) for rank in range(size)]
    for buffers in world:
        buffers.reset()
    return world


def play(case: Case, world: list[Buffers], op: str) -> None:
    size = len(world)
    inputs = [buffers.input for buffers in world]
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


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_expected_is_what_the_collective_means(case: Case, op: str, dtype: torch.dtype, size: int) -> None:
    ranks = world(case, size, dtype, op, count=5000)
    play(case, ranks, op)
    assert [count_wrong(buffers.output, buffers.expected) for buffers in ranks] == [0] * size


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_corrupted_element_is_counted(case: Case) -> None:
    ranks = world(case, 3, torch.float32, "sum", count=100)
    play(case, ranks, "sum")
    ranks[1].output[7] += 1
    assert [count_wrong(buffers.output, buffers.expected) for buffers in ranks] == [0, 1, 0]


@pytest.mark.parametrize("name", ["reduce_scatter", "allgather", "alltoall"])
def test_blocks_in_the_wrong_order_are_counted(name: str) -> None:
    ranks = world(CASES[name], 3, torch.int32, "sum", count=99)
    play(CASES[name], ranks, "sum")
    output = ranks[0].output
    output.copy_(output.roll(33))
    assert count_wrong(output, ranks[0].expected) > 90


@pytest.mark.parametrize(
    ("name", "size", "factor"),
    [
        ("allreduce", 1, 0.0),
        ("allreduce", 4, 1.5),
        ("reduce_scatter", 4, 0.75),
        ("allgather", 4, 0.75),
        ("alltoall", 4, 0.75),
        ("broadcast", 4, 1.0),
    ],
)
def test_busbw_factors(name: str, size: int, factor: float) -> None:
    assert CASES[name].busbw_factor(size) == factor


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bytes_are_of_the_whole_array(case: Case, size: int, dtype: torch.dtype) -> None:
    """Check that bytes are never more than asked for, and less only by what cannot be shared out evenly."""
    job = Job(0, size, case.count(1000, size, dtype), dtype, "max", 0, CPU)
    assert 1000 - size * dtype.itemsize < case.nbytes(job) <= 1000
    buffers = case.prepare(job)
    assert case.nbytes(job) == max(buffers.input.nbytes, buffers.output.nbytes)


def test_the_least_is_one_element_a_rank() -> None:
    assert CASES["allgather"].count(8, 5, torch.float32) == 1
    assert CASES["allreduce"].count(1, 5, torch.float32) == 1
