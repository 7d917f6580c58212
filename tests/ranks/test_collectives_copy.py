"""The verbs that move without reducing: allgather, gather, broadcast, scatter, alltoall."""

from collections.abc import Callable

import pytest
import torch

from gradwire.collectives.plan.algorithms import PLANNERS
from tests.harness import ON_EVERY_TRANSPORT, Worlds
from tests.ranks.exact import (
    DTYPES,
    SEVERAL_SEGMENTS,
    WORLDS,
    Checks,
    communicator,
    contribution,
    copies,
    uneven_parts,
)

pytestmark = ON_EVERY_TRANSPORT


def allgather_tensors(algorithm: str) -> list[str]:
    checks = Checks()
    with communicator() as comm:
        for dtype, numel in copies(comm.size):
            with checks.case(dtype=dtype, numel=numel):
                output = torch.zeros(comm.size * numel, dtype=dtype)
                comm.allgather(output, contribution(comm.rank, comm.size, numel, dtype), algorithm=algorithm)
                checks.equal(output, torch.cat([contribution(r, comm.size, numel, dtype) for r in range(comm.size)]))
        with checks.case(view="transposed"):
            source = contribution(comm.rank, comm.size, 40, torch.int32).view(5, 8).t()
            output = torch.zeros(5, comm.size * 8, dtype=torch.int32).t()
            comm.allgather(output, source, algorithm=algorithm)
            pieces = [contribution(r, comm.size, 40, torch.int32).view(5, 8).t() for r in range(comm.size)]
            checks.equal(output, torch.cat(pieces))
    return checks.failures


def allgather_lists(algorithm: str) -> list[str]:
    """One tensor from each rank, of equal or different sizes, some without elements."""
    checks = Checks()
    with communicator() as comm:
        rank, size = comm.rank, comm.size
        for numels in uneven_parts(size, algorithm):
            for dtype in DTYPES:
                with checks.case(numels=numels, dtype=dtype):
                    outputs = [torch.zeros(numel, dtype=dtype) for numel in numels]
                    comm.allgather(outputs, contribution(rank, size, numels[rank], dtype), algorithm=algorithm)
                    for peer, output in enumerate(outputs):
                        checks.equal(output, contribution(peer, size, numels[peer], dtype))
    return checks.failures


def gather(algorithm: str) -> list[str]:
    checks = Checks()
    with communicator() as comm:
        for index, (dtype, numel) in enumerate(copies(comm.size)):
            for dst in sorted({index % comm.size, comm.size - 1}):
                with checks.case(dtype=dtype, numel=numel, dst=dst):
                    outputs = None
                    if comm.rank == dst:
                        outputs = [torch.zeros(numel, dtype=dtype) for _ in range(comm.size)]
                    comm.gather(contribution(comm.rank, comm.size, numel, dtype), outputs, dst, algorithm=algorithm)
                    for peer, output in enumerate(outputs or []):
                        checks.equal(output, contribution(peer, comm.size, numel, dtype))
    return checks.failures


def scatter(algorithm: str) -> list[str]:
    checks = Checks()
    with communicator() as comm:
        for index, (dtype, numel) in enumerate(copies(comm.size)):
            for src in sorted({index % comm.size, comm.size - 1}):
                with checks.case(dtype=dtype, numel=numel, src=src):
                    sources = None
                    if comm.rank == src:
                        sources = [contribution(peer, comm.size, numel, dtype) for peer in range(comm.size)]
                    output = torch.zeros(numel, dtype=dtype)
                    comm.scatter(output, sources, src, algorithm=algorithm)
                    checks.equal(output, contribution(comm.rank, comm.size, numel, dtype))
    return checks.failures


def broadcast(algorithm: str) -> list[str]:
    checks = Checks()
    with communicator() as comm:
        for index, (dtype, numel) in enumerate(copies(comm.size)):
            for src in sorted({index % comm.size, comm.size - 1}):
                with checks.case(dtype=dtype, numel=numel, src=src):
                    tensor = contribution(comm.rank, comm.size, numel, dtype)
                    comm.broadcast(tensor, src, algorithm=algorithm)
                    checks.equal(tensor, contribution(src, comm.size, numel, dtype))
        for src in range(comm.size):
            with checks.case(src=src, view="transposed"):
                tensor = contribution(comm.rank, comm.size, 40, torch.float32).view(8, 5).t()
                comm.broadcast(tensor, src=src, algorithm=algorithm)
                checks.equal(tensor, contribution(src, comm.size, 40, torch.float32).view(8, 5).t())
    return checks.failures


def alltoall_equal(algorithm: str) -> list[str]:
    checks = Checks()
    with communicator() as comm:
        rank, size = comm.rank, comm.size
        for dtype in DTYPES:
            for rows in (0, 1, 37, 500):
                with checks.case(dtype=dtype, rows=rows):
                    output = torch.zeros(size * rows, dtype=dtype)
                    comm.alltoall(output, contribution(rank, size, size * rows, dtype), algorithm=algorithm)
                    parts = [
                        contribution(r, size, size * rows, dtype)[rank * rows : (rank + 1) * rows] for r in range(size)
                    ]
                    checks.equal(output, torch.cat(parts))
    return checks.failures


def alltoall_splits(algorithm: str) -> list[str]:
    """Rows of three columns, counts[i][j] of them from rank i to rank j."""
    checks = Checks()
    with communicator() as comm:
        rank, size = comm.rank, comm.size
        uneven = [[(i + 2 * j) % 4 * 50 for j in range(size)] for i in range(size)]
        to_next_only = [[10 * (j == (i + 1) % size) for j in range(size)] for i in range(size)]
        for counts in (uneven, to_next_only):
            sources = [contribution(r, size, 3 * sum(counts[r]), torch.int64).view(-1, 3) for r in range(size)]
            expected = torch.cat([sources[r].split(counts[r])[rank] for r in range(size)])
            received = [counts[r][rank] for r in range(size)]
            for dtype in DTYPES:
                with checks.case(counts=counts, dtype=dtype):
                    output = torch.zeros(len(expected), 3, dtype=dtype)
                    comm.alltoall(output, sources[rank].to(dtype), received, counts[rank], algorithm=algorithm)
                    checks.equal(output, expected.to(dtype))
            with checks.case(counts=counts, view="transposed"):
                output = torch.zeros(3, len(expected), dtype=torch.int64).t()
                source = sources[rank].t().contiguous().t()
                comm.alltoall(output, source, received, counts[rank], algorithm=algorithm)
                checks.equal(output, expected)
    return checks.failures


def laid_over(first: torch.Tensor, numel: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same elements, and a tensor of numel that begins `shift` elements after these in the same memory."""
    memory = torch.zeros(2 * (first.numel() + numel) + abs(shift))
    start = first.numel() + numel if shift < 0 else 0
    memory[start : start + first.numel()] = first
    return memory[start : start + first.numel()], memory[start + shift : start + shift + numel]


def alltoall_in_place(algorithm: str) -> list[str]:
    """An output that is the input, overlaps it, or lies between its elements."""
    checks = Checks()
    with communicator() as comm:
        rank, size = comm.rank, comm.size
        for numel in (1, 37, SEVERAL_SEGMENTS):
            parts = [contribution(r, size, size * numel, torch.float32) for r in range(size)]
            expected = torch.cat([part.split(numel)[rank] for part in parts])
            for shift in (0, 1, -1, numel):
                with checks.case(numel=numel, shift=shift):
                    source, output = laid_over(parts[rank], size * numel, shift)
                    comm.alltoall(output, source, algorithm=algorithm)
                    checks.equal(output, expected)
            with checks.case(numel=numel, view="columns"):
                columns = torch.stack([parts[rank], parts[rank]], 1)
                comm.alltoall(columns[:, 1], columns[:, 0], algorithm=algorithm)
                checks.equal(columns, torch.stack([parts[rank], expected], 1))
    return checks.failures


def allgather_in_place(algorithm: str) -> list[str]:
    """An input that is this rank's part of the output, or another part of it."""
    checks = Checks()
    with communicator() as comm:
        rank, size = comm.rank, comm.size
        for numel in (1, 37, SEVERAL_SEGMENTS):
            parts = [contribution(r, size, numel, torch.float32) for r in range(size)]
            for place in (rank * numel, 0, rank * numel + 1, (size - 1) * numel, -1):
                with checks.case(numel=numel, place=place):
                    source, output = laid_over(parts[rank], size * numel, -place)
                    comm.allgather(output, source, algorithm=algorithm)
                    checks.equal(output, torch.cat(parts))
    return checks.failures


def gather_in_place(algorithm: str) -> list[str]:
    checks = Checks()
    with communicator() as comm:
        parts = [contribution(r, comm.size, 37, torch.float32) for r in range(comm.size)]
        for shift in (0, 1):
            with checks.case(shift=shift):
                source, output = laid_over(parts[comm.rank], 37, shift)
                outputs = [output, *(torch.zeros(37) for _ in parts[1:])]
                comm.gather(source, outputs if comm.rank == 0 else None, 0, algorithm=algorithm)
                if comm.rank == 0:
                    for got, part in zip(outputs, parts, strict=True):
                        checks.equal(got, part)
    return checks.failures


def scatter_in_place(algorithm: str) -> list[str]:
    checks = Checks()
    with communicator() as comm:
        parts = [contribution(r, comm.size, 37, torch.float32) for r in range(comm.size)]
        for shift in (0, 1):
            with checks.case(shift=shift):
                source, output = laid_over(parts[0], 37, shift)
                inputs = [source, *parts[1:]] if comm.rank == 0 else None
                comm.scatter(output, inputs, 0, algorithm=algorithm)
                checks.equal(output, parts[comm.rank])
    return checks.failures


CASES = [
    (verb, function, algorithm)
    for verb, function in (
        ("allgather", allgather_tensors),
        ("allgather", allgather_lists),
        ("gather", gather),
        ("scatter", scatter),
        ("broadcast", broadcast),
        ("alltoall", alltoall_equal),
        ("alltoall", alltoall_splits),
        ("alltoall", alltoall_in_place),
        ("allgather", allgather_in_place),
        ("gather", gather_in_place),
        ("scatter", scatter_in_place),
    )
    for algorithm in (*PLANNERS[verb], "native", "auto")
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("function", "algorithm"),
    [pytest.param(function, algorithm, id=f"{function.__name__}-{algorithm}") for _, function, algorithm in CASES],
)
def test_exact(ranks: Worlds, world: int, function: Callable[[str], list[str]], algorithm: str) -> None:
    assert ranks(world).run(function, algorithm) == [[]] * world
