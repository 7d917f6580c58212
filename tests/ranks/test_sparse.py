"""Sparse allreduce against the sum of dense tensors."""

import pytest
import torch
from torch import Tensor

import gradwire as hvd
from tests.harness import wide
from tests.ranks.training import assert_same_on_all_ranks, on_ranks


def rows_of(rank: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of a table of 10 x 3: rank r touches 2 r of them, rank 0 none, and some of them twice. Sums and halves of these
    values are exact in every dtype."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    indices = torch.randint(0, 10, (1, 2 * rank), generator=generator)
    indices[:, 1::2] = indices[:, ::2]
    numbers = torch.randint(-8, 9, (2 * rank, 3), generator=generator)
    return torch.sparse_coo_tensor(indices, numbers.to(dtype), (10, 3))


@on_ranks(2, *wide(1, 4))
def test_sparse_allreduce_is_that_of_the_dense_tensors() -> None:
    size = hvd.size()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
        everyones = torch.stack([rows_of(rank, dtype).to_dense() for rank in range(size)]).double().sum(0)
        for op in (hvd.Sum, hvd.Average) if dtype.is_floating_point else (hvd.Sum,):
            given = rows_of(hvd.rank(), dtype)
            handle = hvd.sparse_allreduce_async(given, f"table {op}", op)
            result = hvd.synchronize(handle)
            assert handle() is result
            assert hvd.poll(handle)
            assert (result.dtype, result.shape, result.layout) == (dtype, (10, 3), torch.sparse_coo)
            assert result.is_coalesced()
            wanted = everyones / (size if op == hvd.Average else 1)
            eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0
            torch.testing.assert_close(result.to_dense().double(), wanted, rtol=2 * eps, atol=16 * eps)
            touched = {int(i) for rank in range(size) for i in rows_of(rank, dtype)._indices()[0]}
            assert result.indices()[0].tolist() == sorted(touched), "no row that none has touched"
            assert_same_on_all_ranks([result.values().view(torch.uint8), result.indices()])
            assert torch.equal(given.to_dense(), rows_of(hvd.rank(), dtype).to_dense()), "not in place"


@on_ranks(3)
def test_other_shapes() -> None:
    """None has anything; two sparse dimensions without dense ones; several at once, ended in another order."""
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 3), (10, 3))
    result = hvd.sparse_allreduce_async(empty, "empty", hvd.Average)()
    assert (result._nnz(), result.shape) == (0, (10, 3))
    matrix = torch.eye(3).to_sparse() * (hvd.rank() + 1)
    assert torch.equal(hvd.sparse_allreduce_async(matrix, "eye", hvd.Sum)().to_dense(), torch.eye(3) * 6)
    handles = [hvd.sparse_allreduce_async(rows_of(hvd.rank(), torch.float64, i), f"{i}", hvd.Sum) for i in range(3)]
    for i in (2, 0, 1):
        wanted = torch.stack([rows_of(rank, torch.float64, i).to_dense() for rank in range(hvd.size())]).sum(0)
        assert torch.equal(handles[i]().to_dense(), wanted)


@on_ranks(3)
def test_refusals() -> None:
    """Found before anything is sent: by one rank alone, or where the ranks differ by all; then all goes on."""
    sparse = rows_of(1, torch.float32)
    if hvd.rank() == 1:
        with pytest.raises(TypeError, match=r"rank 1: .* layout torch.sparse_coo, not torch.strided .*name='a table'"):
            hvd.sparse_allreduce_async(torch.ones(2), "a table", hvd.Sum)
        with pytest.raises(TypeError, match=r"layout torch.sparse_coo, not list"):
            hvd.sparse_allreduce_async([1], "a table", hvd.Sum)
        for op in (hvd.Max, hvd.Adasum, "mean"):
            with pytest.raises(ValueError, match=f"op of a sparse allreduce must be 'average' or 'sum', not '{op}'"):
                hvd.sparse_allreduce_async(sparse, "a table", op)
        with pytest.raises(TypeError, match=r"needs floating-point values, not torch.int64"):
            hvd.sparse_allreduce_async(rows_of(1, torch.int64), "a table", hvd.Average)
    given = sparse.double() if hvd.rank() == 2 else sparse
    with pytest.raises(
        ValueError, match=r"agree in shape, sparse dimensions and dtype: .*float32.*float64|float64.*32"
    ):
        hvd.sparse_allreduce_async(given, "a table", hvd.Sum)
    handle = hvd.sparse_allreduce_async(sparse, "a table", hvd.Sum)
    with pytest.raises(ValueError, match="sparse_allreduce: the name 'a table' is in flight already"):
        hvd.sparse_allreduce_async(sparse, "a table", hvd.Sum)
    assert torch.equal(handle().to_dense(), sparse.to_dense() * 3)
