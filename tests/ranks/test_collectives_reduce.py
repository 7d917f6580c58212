"""reduce and reduce_scatter: to one rank, or a piece to each."""

import pytest
import torch

from gradwire.collectives.plan.algorithms import PLANNERS
from tests.harness import ON_EVERY_TRANSPORT, Worlds
from tests.ranks.exact import WORLDS, Checks, communicator, contribution, reduced, reductions, uneven_parts

pytestmark = ON_EVERY_TRANSPORT

DTYPES_OF_EVERY_KIND = (torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.bool)


def reduce_exact(algorithm: str) -> list[str]:
    """The destination goes round; elsewhere the tensor stays as it was."""
    checks = Checks()
    with communicator() as comm:
        for index, (dtype, op, numel) in enumerate(reductions(comm.size)):
            dst = index % comm.size
            with checks.case(dtype=dtype, op=op, numel=numel, dst=dst):
                tensor = contribution(comm.rank, comm.size, numel, dtype, op)
                expected = reduced(comm.size, numel, dtype, op) if comm.rank == dst else tensor.clone()
                comm.reduce(tensor, dst, op, algorithm=algorithm)
                checks.equal(tensor, expected)
        for dst in range(comm.size):
            with checks.case(dst=dst, view="transposed"):
                tensor = contribution(comm.rank, comm.size, 40, torch.float32).view(8, 5).t()
                expected = reduced(comm.size, 40, torch.float32).view(8, 5).t() if comm.rank == dst else tensor.clone()
                comm.reduce(tensor, dst=dst, algorithm=algorithm)
                checks.equal(tensor, expected)
    return checks.failures


def reduce_scatter_exact(algorithm: str) -> list[str]:
    checks = Checks()
    with communicator() as comm:
        rank, size = comm.rank, comm.size
        for dtype, op, numel in reductions(size):
            with checks.case(dtype=dtype, op=op, numel=numel):
                source = contribution(rank, size, size * numel, dtype, op)
                before = source.clone()
                output = torch.zeros(numel, dtype=dtype)
                comm.reduce_scatter(output, source, op, algorithm=algorithm)
                checks.equal(output, reduced(size, size * numel, dtype, op)[rank * numel : (rank + 1) * numel])
                checks.equal(source, before)
        for place in range(0, (size - 1) * 37 + 1, 36):
            with checks.case(place=place):
                source = contribution(rank, size, size * 37, torch.float32)
                comm.reduce_scatter(source[place : place + 37], source, algorithm=algorithm)
                checks.equal(
                    source[place : place + 37], reduced(size, size * 37, torch.float32)[rank * 37 : (rank + 1) * 37]
                )
        with checks.case(view="transposed"):
            source = contribution(rank, size, size * 40, torch.float32).view(5, size * 8).t()
            output = torch.zeros(5, 8).t()
            comm.reduce_scatter(output, source, algorithm=algorithm)
            whole = reduced(size, size * 40, torch.float32).view(5, size * 8).t()
            checks.equal(output, whole[rank * 8 : (rank + 1) * 8])
    return checks.failures


def reduce_scatter_lists(algorithm: str) -> list[str]:
    """One tensor for each rank, of equal or different sizes, some without elements."""
    checks = Checks()
    with communicator() as comm:
        rank, size = comm.rank, comm.size
        for numels in uneven_parts(size, algorithm):
            for dtype in DTYPES_OF_EVERY_KIND:
                for op in ("sum", "max"):
                    with checks.case(numels=numels, dtype=dtype, op=op):
                        sources = list(contribution(rank, size, sum(numels), dtype, op).split(numels))
                        output = torch.zeros(numels[rank], dtype=dtype)
                        comm.reduce_scatter(output, sources, op, algorithm=algorithm)
                        checks.equal(output, reduced(size, sum(numels), dtype, op).split(numels)[rank])
    return checks.failures


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", [*PLANNERS["reduce"], "native", "auto"])
def test_reduce(ranks: Worlds, world: int, algorithm: str) -> None:
    assert ranks(world).run(reduce_exact, algorithm) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", [*PLANNERS["reduce_scatter"], "native", "auto"])
class TestReduceScatter:
    def test_tensors(self, ranks: Worlds, world: int, algorithm: str) -> None:
        assert ranks(world).run(reduce_scatter_exact, algorithm) == [[]] * world

    def test_lists(self, ranks: Worlds, world: int, algorithm: str) -> None:
        assert ranks(world).run(reduce_scatter_lists, algorithm) == [[]] * world
