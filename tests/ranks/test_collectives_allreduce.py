"""allreduce and grouped_allreduce: every algorithm at every world size gives the same exact answers."""

import hashlib

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import Communicator
from tests.harness import EXCHANGE_TIMEOUT_S, ON_EVERY_TRANSPORT, Worlds, wide
from tests.ranks.exact import (
    ALLREDUCES,
    DTYPES,
    FLOATING,
    SEVERAL_SEGMENTS,
    WORLDS,
    Checks,
    communicator,
    contribution,
    on_host,
    reduced,
    reductions,
)

pytestmark = ON_EVERY_TRANSPORT

SIZES_OF_AUTO = (4_000, 40_000, 300_000, 2_200_000)


def exact(algorithm: str) -> list[str]:
    checks = Checks()
    with communicator() as comm:
        for dtype, op, numel in reductions(comm.size):
            with checks.case(dtype=dtype, op=op, numel=numel):
                tensor = contribution(comm.rank, comm.size, numel, dtype, op)
                comm.allreduce(tensor, op, algorithm=algorithm)
                checks.equal(tensor, reduced(comm.size, numel, dtype, op))
    return checks.failures


def scaled(algorithm: str) -> list[str]:
    checks = Checks()
    with communicator() as comm:
        for dtype in FLOATING:
            for op in ("sum", "average", "min", "max"):
                for prescale, postscale in ((0.5, 1.0), (1.0, 2.0), (0.5, 4.0)):
                    with checks.case(dtype=dtype, op=op, prescale=prescale, postscale=postscale):
                        tensor = contribution(comm.rank, comm.size, 37, dtype, op)
                        comm.allreduce(tensor, op, prescale=prescale, postscale=postscale, algorithm=algorithm)
                        checks.equal(tensor, reduced(comm.size, 37, dtype, op) * (prescale * postscale))
    return checks.failures


def views(algorithm: str) -> list[str]:
    """Tensors that are not contiguous, and what lies between their elements."""
    checks = Checks()
    with communicator() as comm:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            rows, columns = comm.size + 1, 41
            values = contribution(comm.rank, comm.size, rows * columns, dtype).view(rows, columns)
            expected = reduced(comm.size, rows * columns, dtype).view(rows, columns)
            with checks.case(dtype=dtype, view="transposed"):
                tensor = values.t().contiguous().t()
                assert not tensor.is_contiguous()
                comm.allreduce(tensor, algorithm=algorithm)
                checks.equal(tensor, expected)
            with checks.case(dtype=dtype, view="every second column"):
                padded = torch.full((rows, 2 * columns), 7, dtype=dtype)
                padded[:, ::2] = values
                comm.allreduce(padded[:, ::2], algorithm=algorithm)
                checks.equal(padded[:, ::2], expected)
                checks.equal(padded[:, 1::2], torch.full((rows, columns), 7, dtype=dtype))
            with checks.case(dtype=dtype, view="no dimension"):
                scalar = contribution(comm.rank, comm.size, 1, dtype)[0]
                comm.allreduce(scalar, algorithm=algorithm)
                checks.equal(scalar, reduced(comm.size, 1, dtype)[0])
            with checks.case(dtype=dtype, view="no elements"):
                empty = torch.empty((3, 0, 2), dtype=dtype)
                comm.allreduce(empty, algorithm=algorithm)
                checks.equal(empty, torch.empty((3, 0, 2), dtype=dtype))
    return checks.failures


def grouped(algorithm: str) -> list[str]:
    checks = Checks()
    with communicator() as comm:
        numels = (3, 0, SEVERAL_SEGMENTS, 1, comm.size + 1)
        for op in ("sum", "average", "max"):
            dtypes = [dtype for dtype in DTYPES if dtype is not torch.bool or op != "average"]
            kinds = [(dtypes[i % len(dtypes)], numels[i % len(numels)]) for i in range(2 * len(dtypes) + 1)]
            with checks.case(op=op):
                tensors = [contribution(comm.rank, comm.size, numel, dtype, op) for dtype, numel in kinds]
                strided = contribution(comm.rank, comm.size, 40, torch.float32, op).view(8, 5).t()
                comm.grouped_allreduce([*tensors, strided], op, algorithm=algorithm)
            for tensor, (dtype, numel) in zip(tensors, kinds, strict=True):
                with checks.case(op=op, dtype=dtype, numel=numel):
                    checks.equal(tensor, reduced(comm.size, numel, dtype, op))
            with checks.case(op=op, view="transposed"):
                checks.equal(strided, reduced(comm.size, 40, torch.float32, op).view(8, 5).t())
        with checks.case(prescale=0.5, postscale=4.0):
            tensors = [contribution(comm.rank, comm.size, 37, dtype) for dtype in FLOATING]
            comm.grouped_allreduce(tensors, prescale=0.5, postscale=4.0, algorithm=algorithm)
            for tensor in tensors:
                checks.equal(tensor, 2 * reduced(comm.size, 37, tensor.dtype))
    return checks.failures


def every_row_of_the_table(host_of: str) -> list[str]:
    """'auto' on messages of the sizes that its table tells apart, where rank r is on the host host_of[r]."""
    checks = Checks()
    with on_host(host_of[dist.get_rank()]):
        comm = Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    with comm:
        rows = {rule.algorithm for rule in comm.tables["allreduce"]}
        assert rows == {comm.chosen("allreduce", nbytes) for nbytes in SIZES_OF_AUTO}
        for nbytes in SIZES_OF_AUTO:
            with checks.case(nbytes=nbytes):
                tensor = contribution(comm.rank, comm.size, nbytes // 4, torch.float32)
                comm.allreduce(tensor)
                checks.equal(tensor, reduced(comm.size, nbytes // 4, torch.float32))
    return checks.failures


def digests_of_random_sums(algorithm: str) -> list[str]:
    """One digest of the bits of each result."""
    digests = []
    with communicator() as comm:
        generator = torch.Generator().manual_seed(comm.rank)
        for dtype in FLOATING:
            for op in ("sum", "average"):
                tensor = torch.randn(SEVERAL_SEGMENTS, generator=generator).to(dtype)
                comm.allreduce(tensor, op, algorithm=algorithm)
                digests.append(hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest())
    return digests


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", [*ALLREDUCES, "native", "auto"])
class TestEveryAlgorithm:
    def test_exact(self, ranks: Worlds, world: int, algorithm: str) -> None:
        assert ranks(world).run(exact, algorithm) == [[]] * world

    def test_bits_are_the_same_on_all_ranks_and_in_every_run(self, ranks: Worlds, world: int, algorithm: str) -> None:
        first, second = (ranks(world).run(digests_of_random_sums, algorithm) for _ in range(2))
        assert first == [first[0]] * world
        assert second == first


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ["rsag", "native", "auto"])
class TestWhatIsAroundTheAlgorithm:
    def test_scaled(self, ranks: Worlds, world: int, algorithm: str) -> None:
        assert ranks(world).run(scaled, algorithm) == [[]] * world

    def test_views(self, ranks: Worlds, world: int, algorithm: str) -> None:
        assert ranks(world).run(views, algorithm) == [[]] * world

    def test_grouped(self, ranks: Worlds, world: int, algorithm: str) -> None:
        assert ranks(world).run(grouped, algorithm) == [[]] * world


@pytest.mark.parametrize("host_of", ["aa", "ab", "aaaa", "abcd", "aabb", "aaabbcc", *wide("aaaaaaa", "abcdefg")])
def test_auto_by_size_and_hosts(ranks: Worlds, host_of: str) -> None:
    assert ranks(len(host_of)).run(every_row_of_the_table, host_of) == [[]] * len(host_of)
