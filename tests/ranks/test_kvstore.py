"""KVStore: keys, lists of them and rows; sums to the bit, and the rounds that a pull sees."""

from __future__ import annotations

import functools
import io
import runpy
import threading
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire as hvd
from tests.harness import ABOVE_TRANSPORTS
from tests.pages import ROOT
from tests.ranks.training import on_ranks

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64)
SHAPES = ((), (0,), (1,), (3, 5), (70, 30))


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return small ones, whose sums are exact in all dtypes."""
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@ABOVE_TRANSPORTS
@on_ranks()
@pytest.mark.parametrize(
    ("size", "type", "servers"),
    [
        (3, "dist_device_sync", [1]),
        pytest.param(1, "dist_sync", None, marks=pytest.mark.wide),
    ],
)
def test_pushes_of_all_workers_are_summed_and_assigned(type: Any, servers: list[int] | None) -> None:
    rank, size = hvd.rank(), hvd.size()
    kv = hvd.servers.kvstore.create(type, servers=servers)
    assert (kv.type, kv.rank, kv.num_workers) == (type, rank, size)
    places = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    keys = [f"{place}" if place[0].is_floating_point else number for number, place in enumerate(places)]
    outs = [torch.full(shape, 77).to(dtype) for dtype, shape in places]
    kv.init(keys, [whole_numbers(shape, dtype, seed=rank) for dtype, shape in places])
    kv.pull(keys, outs)
    for out, (dtype, shape) in zip(outs, places, strict=True):
        assert torch.equal(out, whole_numbers(shape, dtype, seed=0))
    for step in (1, 2, 3):
        kv.push(keys, [whole_numbers(shape, dtype, seed=10 * step + rank) for dtype, shape in places])
        kv.pull(keys, outs)
        for out, (dtype, shape) in zip(outs, places, strict=True):
            total = sum(whole_numbers(shape, dtype, seed=10 * step + other) for other in range(size))
            assert torch.equal(out, torch.as_tensor(total, dtype=dtype))
    report = kv.report()
    assert report.updates >= 3 * len(keys)
    kv.barrier()
    report = kv.report()
    assert (report.updates, report.staleness) == (3 * len(keys), {0: 3 * len(keys) * size})
    kv.close()
    kv.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire-server")]


@on_ranks(3)
def test_pushes_of_16_bits_are_rounded_once() -> None:
    kv, out = hvd.servers.KVStore("dist_sync"), torch.zeros(1, dtype=torch.float16)
    kv.init("a", torch.zeros(1, dtype=torch.float16))
    kv.pushpull("a", torch.full((1,), 2048.0 if hvd.rank() == 0 else 1.0, dtype=torch.float16), out=out)
    assert out.item() == 2050  # in float16, 2048 + 1 is 2048
    kv.close()


@on_ranks(2)
def test_lists_of_keys_and_values_mean_what_they_do_in_mxnet() -> None:
    kv = hvd.servers.KVStore("dist_sync")
    size, ones = hvd.size(), torch.ones(2, 3)
    out, more = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float32)
    kv.broadcast("a", torch.full((2, 1), 5.0 + hvd.rank()).expand(2, 3), out=[out, more])
    assert torch.equal(out, 5 * ones)
    assert torch.equal(more, 5 * ones)
    kv.push("a", [ones, 2 * ones, (3 * ones).to_sparse()])
    kv.pull("a", out)
    assert torch.equal(out, 6 * size * ones)
    value = [ones.clone(), 2 * ones]
    kv.pushpull("a", value)
    assert all(torch.equal(each, 3 * size * ones) for each in value)
    kv.init([3, "b"], [torch.zeros(1), torch.zeros(2)])
    outs = [torch.zeros(1), [torch.zeros(2), torch.zeros(2)]]
    kv.pushpull([3, "b"], [torch.ones(1), [torch.ones(2), torch.ones(2)]], out=outs)
    assert outs[0] == size
    assert all(torch.equal(each, torch.full((2,), 2.0 * size)) for each in outs[1])
    weight = torch.nn.Parameter(torch.zeros(2))
    kv.pull("b", weight)
    assert torch.equal(weight.detach(), outs[1][0])
    sparse = torch.zeros(2, 3).to_sparse()
    kv.pull("a", [sparse, out])
    assert sparse.to_dense().count_nonzero() == 0
    with pytest.raises(ValueError, match="row_sparse_pull"):
        kv.pull("a", sparse, ignore_sparse=False)
    broadcast, rows = functools.partial(kv.broadcast, out=out), functools.partial(kv.row_sparse_pull, row_ids=out)
    for call in (kv.push, kv.pull, kv.pushpull, broadcast, rows):
        with pytest.raises(ValueError, match="priority=-1: only 0 is allowed"):
            call("a", out, priority=-1)
    assert kv.is_capable("optimizer")
    kv.close()


@on_ranks(3)
def test_a_pull_sees_as_many_rounds_as_its_rank_has_pushed() -> None:
    """Push the rounds of every rank in an order of its own, some without pulling in between."""
    kv = hvd.servers.KVStore("dist_sync")
    rank, size, out = hvd.rank(), hvd.size(), torch.zeros(4)
    kv.init(["a", "b"], [torch.zeros(4), torch.zeros(4)])
    kv.set_optimizer(functools.partial(torch.optim.SGD, lr=1.0))
    for key in ("a", "b") if rank % 2 == 0 else ("b", "a"):
        for _ in range(3):
            kv.push(key, torch.full((4,), float(rank + 1)))
    once = size * (size + 1) / 2
    for key in ("a", "b"):
        kv.pull(key, out)
        assert torch.equal(out, torch.full((4,), -3 * once))  # all three rounds, and nothing else
    for step in range(4, 9):
        kv.push("a", torch.full((4,), float(rank + 1)))
        if rank == 0 or step % 2 == 0:
            kv.pull("a", out)
            assert torch.equal(out, torch.full((4,), -step * once))
    kv.close()


@on_ranks(2)
def test_rows_are_pulled_alone() -> None:
    kv = hvd.servers.KVStore("dist_sync")
    table = torch.arange(40.0).view(10, 4)
    kv.init(["t", "u"], [table, -table])
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 4), (10, 4))
    ids = torch.tensor([7, 2, 7, hvd.rank()])
    kv.row_sparse_pull("t", out=sparse, row_ids=ids)
    assert sparse.coalesce().indices().tolist() == [sorted({7, 2, hvd.rank()})]
    assert torch.equal(sparse.coalesce().values(), table[sparse.coalesce().indices()[0]])
    dense = torch.full((10, 4), -1.0)
    kv.row_sparse_pull("t", out=dense, row_ids=ids.int())
    chosen = torch.zeros(10, dtype=torch.bool)
    chosen[ids] = True
    assert torch.equal(dense[chosen], table[chosen])
    assert (dense[~chosen] == -1).all()
    one, other = torch.zeros(10, 4), torch.zeros(10, 4)
    kv.row_sparse_pull(["t", "u"], out=[one, other], row_ids=[torch.tensor([1]), torch.tensor([3, 9])])
    assert one.count_nonzero(1).nonzero().flatten().tolist() == [1]
    assert other.count_nonzero(1).nonzero().flatten().tolist() == [3, 9]
    kv.row_sparse_pull("t", out=[one, other], row_ids=[torch.tensor([5]), torch.tensor([], dtype=torch.int64)])
    assert torch.equal(one[5], table[5])
    kv.push("u", table)
    kv.row_sparse_pull("u", out=other, row_ids=torch.tensor([4]))  # after the push
    assert torch.equal(other[4], hvd.size() * table[4])
    for row_ids, error, said in (
        (None, TypeError, "tensor of whole numbers"),
        (torch.tensor([0.5]), TypeError, "tensor of whole numbers"),
        (torch.tensor([3, 10]), ValueError, "from 0 to 9, and 10 is not"),
        (torch.tensor([-1]), ValueError, "from 0 to 9, and -1 is not"),
        ([torch.tensor([0])] * 3, ValueError, "not 3"),
    ):
        with pytest.raises(error, match=said):
            kv.row_sparse_pull("t", out=dense, row_ids=row_ids)
    kv.close()


@on_ranks(1, initialized=False)
def test_a_local_store_needs_no_world() -> None:
    """Use a store without init(), as MXNet's example programs begin."""
    for type in hvd.servers.kvstore.TYPES[:2]:
        kv = hvd.servers.kvstore.create(type)
        assert (kv.rank, kv.num_workers, kv.type) == (0, 1, type)
        out = torch.zeros(2)
        kv.init(3, torch.ones(2))
        kv.push(3, [torch.ones(2), 2 * torch.ones(2)])
        kv.pull(3, out=out)
        assert torch.equal(out, 3 * torch.ones(2))
        value = torch.full((2,), 8.0)
        kv.push(3, value)
        value.zero_()  # it was the caller's again
        kv.pull(3, out=out)
        assert torch.equal(out, torch.full((2,), 8.0))
        kv.set_optimizer(torch.optim.SGD)
        kv.push(3, torch.ones(2))
        kv.pull(3, out=out)
        assert torch.equal(out, torch.full((2,), 8.0) - torch.tensor(1e-3))
        with pytest.raises(ValueError, match="sends nothing"):
            kv.set_gradient_compression({"type": "2bit"})
        kv.barrier()
        kv.close()
    with pytest.raises(ValueError, match=r"call hvd\.init"):
        hvd.servers.kvstore.create("dist_sync")


@on_ranks(2, initialized=False)
def test_the_example_learns(tmp_path: Path) -> None:
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(said):
        patched.chdir(tmp_path)
        runpy.run_path(str(ROOT / "docs" / "examples" / "kvstore.py"), run_name="__main__")
    losses = [float(line.split("loss ")[1]) for line in said.getvalue().splitlines() if line.startswith("step")]
    if dist.get_rank() == 0:
        assert len(losses) == 4
        assert losses[-1] < losses[0] / 2
        assert {path.name for path in tmp_path.iterdir()} == {"optimizer.states", "model.pt"}
