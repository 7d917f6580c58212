"""KVStore: sums and optimizers' steps to the bit, rounds, codes, files, workers that are slow, and ranks that are lost."""

from __future__ import annotations

import functools
import io
import os
import runpy
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire as hvd
from gradwire.collectives import CollectiveError, CollectiveTimeout, PeerLost
from gradwire.collectives.compression.registry import CODECS
from gradwire.trainer.servers.key_value.compression import Encoder, codec_of
from gradwire.trainer.servers.key_value.keys import KeySpec
from tests.harness import ON_EVERY_TRANSPORT, World, meet, wide
from tests.pages import ROOT
from tests.ranks.training import assert_survived, on_ranks

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64)
KNOWN_S = 60.0  # in which the end of a rank is known at last
SHAPES = ((), (0,), (1,), (3, 5), (70, 30))


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return small ones, whose sums are exact in all dtypes."""
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@ON_EVERY_TRANSPORT
@on_ranks()
@pytest.mark.parametrize(
    ("size", "type", "servers"),
    [
        (3, "dist_device_sync", [1]),
        pytest.param(2, "dist_sync", None, marks=pytest.mark.wide),
        pytest.param(1, "dist_sync", None, marks=pytest.mark.wide),
        pytest.param(4, "dist_sync", None, marks=pytest.mark.wide),
    ],
)
def test_pushes_of_all_workers_are_summed_and_assigned(type: Any, servers: list[int] | None) -> None:
    rank, size = hvd.rank(), hvd.size()
    kv = hvd.kvstore.create(type, servers=servers)
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
    kv, out = hvd.KVStore("dist_sync"), torch.zeros(1, dtype=torch.float16)
    kv.init("a", torch.zeros(1, dtype=torch.float16))
    kv.pushpull("a", torch.full((1,), 2048.0 if hvd.rank() == 0 else 1.0, dtype=torch.float16), out=out)
    assert out.item() == 2050  # in float16, 2048 + 1 is 2048
    kv.close()


@on_ranks(2)
def test_lists_of_keys_and_values_mean_what_they_do_in_mxnet() -> None:
    kv = hvd.KVStore("dist_sync")
    size, ones = hvd.size(), torch.ones(2, 3)
    out, more = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float32)
    kv.broadcast("a", ones * (5 + hvd.rank()), out=[out, more])
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
    kv = hvd.KVStore("dist_sync")
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


def gradients_of(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in ((13, 7), (7,), (5, 3, 2))]


def start() -> list[Tensor]:
    return [torch.linspace(-1, 1, gradient.numel()).view(gradient.shape) for gradient in gradients_of(0, 0)]


def stepped(factory: Callable[[list[Tensor]], torch.optim.Optimizer], size: int, steps: int) -> list[Tensor]:
    """Return what torch makes of the gradients, summed in the order of ranks."""
    weights = start()
    optimizer = factory(weights)
    for step in range(steps):
        for number, weight in enumerate(weights):
            weight.grad = gradients_of(step, 0)[number]
            for rank in range(1, size):
                weight.grad += gradients_of(step, rank)[number]
        optimizer.step()
    return weights


FACTORIES = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
}


@pytest.mark.parametrize(("name", "sets_first"), [("momentum", True), ("adamw", False)])
@on_ranks(3)
def test_an_optimizer_steps_as_torchs_does_bit_for_bit(name: str, sets_first: bool) -> None:
    kv = hvd.KVStore("dist_sync")
    keys, outs = ["w", 7, "v"], start()
    if sets_first:
        kv.set_optimizer(FACTORIES[name])
    kv.init(keys, start())
    if not sets_first:
        kv.set_optimizer(FACTORIES[name])
    for step in range(5):
        kv.pushpull(keys, gradients_of(step, hvd.rank()), out=outs)
    for out, wanted in zip(outs, stepped(FACTORIES[name], hvd.size(), 5), strict=True):
        assert torch.equal(out, wanted)
    kv.close()


@on_ranks(2)
def test_states_go_through_a_file_bit_for_bit(tmp_path: Path) -> None:
    keys, factory, path = ["w", 7, "v"], FACTORIES["adamw"], tmp_path / "states"

    def trained(kv: hvd.KVStore, steps: range) -> list[Tensor]:
        outs = start()
        for step in steps:
            kv.pushpull(keys, gradients_of(step, hvd.rank()), out=outs)
        return outs

    first = hvd.KVStore("dist_sync")
    first.init(keys, start())
    with pytest.raises(ValueError, match="call set_optimizer"):
        first.save_optimizer_states(path)
    first.set_optimizer(factory)
    weights = trained(first, range(3))
    first.save_optimizer_states(path)
    wanted = trained(first, range(3, 6))
    second = hvd.KVStore("dist_sync", servers=[1])  # other servers, and the keys in another order
    second.init(list(reversed(keys)), list(reversed(weights)))
    second.set_optimizer(factory)
    second.load_optimizer_states(path)
    for out, other in zip(trained(second, range(3, 6)), wanted, strict=True):
        assert torch.equal(out, other)

    (tmp_path / "taken").mkdir(exist_ok=True)
    for use, at, on_rank_0, said in (
        (second.load_optimizer_states, f"{path}.no", FileNotFoundError, r"states\.no"),
        (second.save_optimizer_states, tmp_path / "nowhere" / "states", OSError, "nowhere"),
        (second.save_optimizer_states, "", ValueError, r"empty name|could not write \."),
        (second.save_optimizer_states, tmp_path / "taken", OSError, "taken"),
    ):
        with pytest.raises(ValueError if hvd.rank() else on_rank_0, match=said):
            use(at)
    for use in (second.save_optimizer_states, second.load_optimizer_states):
        for wrong in (None, 3, b"states"):  # on one rank, and the other one does not wait
            with pytest.raises(
                TypeError if hvd.rank() else ValueError,
                match="needs the path of a file, a str" if hvd.rank() else "because rank 1 cannot",
            ):
                use(wrong if hvd.rank() else path)  # type: ignore[arg-type]
    kept = torch.load(path, weights_only=True)
    hvd.barrier()
    if hvd.rank() == 0:
        torch.save({**kept, "states": {**kept["states"], 7: {"state": 3}}}, path)  # which rank 1 holds
    hvd.barrier()
    with pytest.raises(ValueError, match="a state that AdamW cannot load" if hvd.rank() else "because rank 1"):
        second.load_optimizer_states(path)
    if hvd.rank() == 0:
        torch.save(kept, path)
    after = tmp_path / "after"
    second.save_optimizer_states(after)
    same = torch.load(after, weights_only=True)["states"]
    for name in keys:  # nothing was loaded: it stands where both stores stood after their last steps
        assert same[name]["state"][0]["step"] == 6
    second.init("new", torch.zeros(1))
    with pytest.raises(ValueError, match="no state of key 'new'; it has"):
        second.load_optimizer_states(path)
    second.set_optimizer(FACTORIES["momentum"])
    with pytest.raises(ValueError, match="SGD, but of gradwire key-value store 1 and AdamW"):
        second.load_optimizer_states(path)
    if hvd.rank() == 0:
        torch.save([1], path)
    hvd.barrier()
    with pytest.raises(ValueError, match="not a file of save_optimizer_states"):
        second.load_optimizer_states(path)
    hvd.barrier()
    first.close()
    second.close()
    assert {path.name for path in tmp_path.iterdir()} == {"states", "taken", "after"}


@on_ranks(2)
def test_rows_are_pulled_alone() -> None:
    kv = hvd.KVStore("dist_sync")
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


CODED = [{"type": "2bit", "threshold": 0.5}, {"type": "topk", "ratio": 0.05}, {"type": "int8"}, {"type": "randomk"}]
REST = [{"type": name} for name in CODECS if name not in ("none", "topk", "int8", "randomk")]


@pytest.mark.parametrize("params", [*CODED, *wide(*REST)], ids=lambda params: params["type"])
@on_ranks(2)
def test_pushes_travel_as_codes_with_error_feedback(params: dict[str, Any]) -> None:
    """See that what is assigned is the sum of what the codes of all ranks decode to, which a rank can compute by itself."""
    rank, size, numel, steps = hvd.rank(), hvd.size(), 5000, 3
    kv = hvd.KVStore("dist_sync")
    kv.init(["w", "n", "e"], [torch.zeros(50, 100), torch.zeros(3, dtype=torch.int64), torch.zeros(0)])
    kv.set_gradient_compression(params)
    kv.pushpull("e", torch.zeros(0))

    def pushed(step: int, other: int) -> Tensor:
        return torch.randn(50, 100, generator=torch.Generator().manual_seed(10 * step + other))

    codec = codec_of(params)
    spec = KeySpec("w", 0, torch.Size((50, 100)), torch.float32, 0)
    encoders = [Encoder(codec, other) for other in range(size)]
    for step in range(steps):
        out, decoded = torch.zeros(50, 100), torch.empty(numel)
        count = torch.tensor([1, 2, 3])
        kv.pushpull(["w", "n"], [pushed(step, rank), count], out=[out, count])
        total = torch.zeros(numel)
        for other, encoder in enumerate(encoders):
            number, wire = encoder.encode(spec, pushed(step, other))
            codec.at(number).decode(wire, decoded)
            total += decoded
        assert torch.equal(out.flatten(), total)
        assert torch.equal(count, size * torch.tensor([1, 2, 3]))  # as it is
    with pytest.raises(ValueError, match="set already"):
        kv.set_gradient_compression(params)
    kv.close()


@on_ranks(2)
def test_two_bits_are_mxnets() -> None:
    """Do MXNet's 2bit by hand: threshold, 0 or -threshold, and the rest is kept."""
    kv = hvd.KVStore("dist_sync")
    kv.init(0, torch.zeros(5))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    out, size = torch.zeros(5), hvd.size()
    for value, wanted in (
        ([0.25, 0.5, -0.5, -2.0, 0.0], [0.0, 0.5, -0.5, -0.5, 0.0]),
        ([0.25, 0.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, -0.5, 0.0]),
        ([0.25, -0.25, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -0.5, 0.0]),
        ([0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -0.5, 0.0]),
        ([0.0, 0.0, 0.0, float("nan"), float("inf")], [0.0, 0.0, 0.0, float("nan"), float("nan")]),
        ([0.0, 0.0, 0.0, 0.5, 0.25], [0.0, 0.0, 0.0, 0.5, 0.0]),
    ):
        kv.pushpull(0, torch.tensor(value), out=out)
        torch.testing.assert_close(out, size * torch.tensor(wanted), rtol=0, atol=0, equal_nan=True)
    kv.close()


@on_ranks(3)
def test_asynchronous_workers_wait_for_nobody_and_no_update_is_lost() -> None:
    """Begin on the last rank when the others have pushed and pulled ten times, without which they cannot have waited for it; then
    push at once, where two updates of a value at the same time would lose one of them."""
    kv = hvd.KVStore("dist_async", servers=[0])
    rank, size, out, ones = hvd.rank(), hvd.size(), torch.zeros(20000), torch.ones(20000)
    slow = rank == size - 1
    kv.init("w", torch.zeros(20000))
    kv.set_optimizer(functools.partial(torch.optim.SGD, lr=1.0))
    for step in range(1, 11 if not slow else 1):
        kv.pushpull("w", ones, out=out)
        assert out.max() <= -step  # its own are in it, others perhaps
    kv.barrier()
    if slow:
        kv.push("w", ones)
    kv.barrier()
    kv.pull("w", out)
    before, pushes = 10 * (size - 1), 20
    assert torch.equal(out, torch.full((20000,), -1.0 - before))
    report = kv.report()
    assert report.updates == before + 1
    assert report.contributions == {**dict.fromkeys(range(size - 1), 10), size - 1: 1}
    assert report.staleness[before] == 1  # as many updates late as all others have made
    hvd.barrier()
    for _ in range(pushes):
        kv.push("w", ones)
    kv.barrier()
    kv.pull("w", out)
    assert torch.equal(out, torch.full((20000,), -1.0 - before - pushes * size))
    assert kv.report().updates == before + 1 + pushes * size
    kv.close()


@on_ranks(3)
def test_who_is_done_is_waited_for_no_more() -> None:
    """End on one rank earlier: it is waited for no more, but what it has pushed before the others counts in its round."""
    kv = hvd.KVStore("dist_sync", servers=[0])
    rank, out = hvd.rank(), torch.zeros(2)
    kv.init("w", torch.zeros(2))
    rounds = 2 + rank
    for step in range(rounds):
        kv.push("w", torch.full((2,), 10.0**rank))
        if rank == 0 or step == rounds - 1:
            kv.pull("w", out)
            taking_part = [other for other in range(hvd.size()) if step < 2 + other]
            assert torch.equal(out, torch.full((2,), sum(10.0**other for other in taking_part)))
    kv.close()
    with pytest.raises(RuntimeError, match="closed"):
        kv.push("w", torch.zeros(2))


@on_ranks(1, initialized=False)
def test_a_local_store_needs_no_world() -> None:
    """Use a store without init(), as MXNet's example programs begin."""
    for type in hvd.kvstore.TYPES[:2]:
        kv = hvd.kvstore.create(type)
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
        hvd.kvstore.create("dist_sync")


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ArithmeticError("no step today")


def only_of_vectors(tensors: list[Tensor]) -> torch.optim.Optimizer:
    if tensors[0].ndim > 1:
        raise ArithmeticError("not today")
    return torch.optim.SGD(tensors, lr=1.0)


@on_ranks(2)
def test_what_cannot_be_meant_is_refused() -> None:
    rank = hvd.rank()
    for make, said in (
        (lambda: hvd.KVStore("dist"), "type must be one of 'local', 'device', 'dist_sync'"),  # type: ignore[arg-type]
        (lambda: hvd.KVStore("dist_sync", servers=[]), "servers must be"),
        (lambda: hvd.KVStore("dist_sync", servers=[2]), "servers must be ranks from 0 to 1"),
        (lambda: hvd.KVStore("dist_sync", servers=[rank]), r"servers is \[0\] on rank 0; \[1\] on rank 1"),
        (lambda: hvd.KVStore("dist_async" if rank else "dist_sync"), "asynchronous is False on rank 0; True on rank 1"),
    ):
        with pytest.raises(ValueError, match=said):
            make()
    kv = hvd.KVStore("dist_sync")
    w, n = torch.zeros(2, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(KeyError, match=r"key 'w' was never given to init.*; known are none"):
        kv.pull("w", w)
    kv.init(["w", 1], [w, n])
    with pytest.raises(KeyError, match=r"key '1' was never given to init.*; known are 'w', 1"):
        kv.push("1", w)
    for key, value, error, said in (
        ("w", w, ValueError, "key 'w' has been given to init.* before"),
        (["x", "x"], [w, w], ValueError, "'x' is given twice"),
        (["x", "y"], [w], ValueError, "a list as long as that of the keys, 2, not 1"),
        (["x"], w, ValueError, "not Tensor"),
        ("x", [w], TypeError, "must be a tensor"),
        (1.5, w, TypeError, "a key must be an int or a str, not 1.5"),
        (True, w, TypeError, "a key must be an int or a str"),
        ("x", torch.zeros(2 + rank), ValueError, r"differ between ranks: .*\[2\].* on rank 0; .*\[3\].* on rank 1"),
        ("x" if rank else "y", w, ValueError, "differ between ranks"),
    ):
        with pytest.raises(error, match=said):
            kv.init(key, value)
    with pytest.raises(ValueError, match="'w' has been given" if rank else "because rank 1 cannot.*'w' has been"):
        kv.init("w" if rank else "x", w)
    for key, value, error, said in (
        ("w", torch.zeros(3), ValueError, r"shape \[2, 2\] and dtype torch.float32, as init.*not \[3\]"),
        ("w", w.double(), ValueError, "not .* torch.float64"),
        ("w", [w, n], ValueError, "not .* torch.int64"),
        ("w", [], TypeError, "a tensor or a list of tensors"),
        ("w", 1.0, TypeError, "a tensor or a list of tensors"),
    ):
        with pytest.raises(error, match=said):
            kv.push(key, value)
        with pytest.raises(error, match=said):
            kv.pull(key, value)
        with pytest.raises(error, match=said):
            kv.pushpull(key, w, out=value)
    for optimizer, said in (
        (torch.optim.SGD([w], lr=1.0), "a function that makes an optimizer of a list of tensors"),
        ("sgd", "functools.partial"),
        (lambda tensors: None, "returned None"),
        (lambda: None, "raised TypeError"),
        (lambda tensors: torch.optim.SGD([w]), "an optimizer of other tensors"),
    ):
        with pytest.raises(TypeError, match=said):
            kv.set_optimizer(optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"key 1 has dtype torch\.int64"):
        kv.set_optimizer(torch.optim.SGD)
    with pytest.raises(NotImplementedError if rank else ValueError, match="meta" if rank else "because rank 1"):
        kv.init("x", torch.zeros(2, device="meta") if rank else torch.zeros(2))
    for params, said in (
        ({}, "one of '2bit', .*'topk'"),
        ("2bit", "one of '2bit'"),
        ({"type": "1bit"}, "one of '2bit', .*'topk'"),
        (
            {"type": ["topk"]} if rank == 0 else {"type": "topk"},
            "rank 0.*one of '2bit'" if rank == 0 else "because rank 0",
        ),
        ({"type": "topk", "ratio": "much"}, r"rank \d: gradient compression by .*much"),
        ({"type": "topk", "ratio": 0.5 if rank else [0.5]}, "because rank 0" if rank else r"rank 0: .*\[0\.5\]"),
        ({"type": "2bit", "ratio": 1}, "has no setting 'ratio'; it has threshold"),
        ({"type": "2bit", "threshold": 0}, "threshold must be a finite number > 0"),
        ({"type": "2bit", "threshold": 1 + rank}, "differ between ranks"),
        ({"type": "2bit" if rank else "none"}, "" if rank == 0 else "because rank 0 cannot"),
    ):
        with pytest.raises(ValueError, match=said):
            kv.set_gradient_compression(params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 'optimizer'"):
        kv.is_capable("flight")
    kv.pushpull("w", torch.ones(2, 2), out=w)  # it goes on after all that
    assert (w == hvd.size()).all()

    floating = hvd.KVStore("dist_sync", servers=[0])
    floating.init("w", w)
    with pytest.raises(ValueError, match=r"differ between ranks: SGD .*0\.1.* on rank 0; SGD .*0\.2.* on rank 1"):
        floating.set_optimizer(functools.partial(torch.optim.SGD, lr=0.1 * (1 + rank)))
    with pytest.raises(ValueError, match=r"no optimizer of key 'w', of shape \[2, 2\].*not today"):
        floating.set_optimizer(only_of_vectors)  # which only rank 0, the server, would have seen
    floating.set_optimizer(Broken)
    with pytest.raises(ValueError, match=r"key 'n' has dtype torch\.int64"):
        floating.init("n", n)
    floating.push("w", w)
    with pytest.raises(CollectiveError, match=r"pull of key 'w'.*no step today"):
        floating.pull("w", w)
    floating.set_optimizer(functools.partial(torch.optim.SGD, lr=1.0))
    floating.pushpull("w", torch.ones(2, 2), out=w)
    assert (w == 0).all()
    hvd.barrier()
    kv.close()
    floating.close()


def wait_in_vain() -> None:
    """Pull from rank 1, which serves and pushes nothing. Its server alone is impatient, so that it is sure to speak first."""
    hvd.init(timeout_s=60)
    kv = hvd.KVStore("dist_sync", servers=[1])
    kv.init("w", torch.zeros(2))
    if kv._group.keys is not None:
        kv._group.keys._timeout_s = 0.2
    meet("impatient")
    if hvd.rank() == 0:
        kv.push("w", torch.ones(2))
        with pytest.raises(
            CollectiveTimeout, match=r"rank 0: pull of key 'w' at the server on rank 1: not done"
        ) as caught:
            kv.pull("w", torch.zeros(2))
        assert (caught.value.waiting_for, caught.value.seconds) == ((1,), 0.2)
    meet("waited")
    kv.close(timeout_s=5)
    hvd.shutdown()


def test_a_pull_that_waits_in_vain_says_for_whom(failing_world: Callable[[int], World]) -> None:
    failing_world(2).run(wait_in_vain)


def lose_one(type: Any, dies: int) -> None:
    """Go on without one rank, or see the error that says that this cannot be."""
    hvd.init(timeout_s=60)
    kv = hvd.KVStore(type, servers=[0, 1])
    kv.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])  # at rank 0, at rank 1
    kv.set_optimizer(functools.partial(torch.optim.SGD, lr=1.0))
    outs = [torch.zeros(2), torch.zeros(2)]
    kv.pushpull(["a", "b"], [torch.ones(2), torch.ones(2)], out=outs)
    kv.barrier()
    meet("trained")
    if hvd.rank() == dies:
        os._exit(0)
    if type == "dist_sync":
        key, server = ("a", 0) if dies != 0 else ("b", 1)
        kv.push(key, torch.ones(2))
        at = "" if hvd.rank() == server else f" at the server on rank {server}| by rank {server}"
        with pytest.raises(hvd.QuorumLost, match=f"rank {hvd.rank()}: pull of key '{key}'({at}).*lost rank {dies}"):
            kv.pull(key, outs[0])
    elif dies == 1:
        with pytest.raises(PeerLost, match=f"rank {hvd.rank()}: .* key 'b' at the server on rank 1: lost rank 1"):
            push_until_it_fails(kv, "b", outs[1])
        kv.pushpull("a", torch.ones(2), out=outs[0])
        assert outs[0].max() <= -1 - hvd.size()  # one of each rank, and its own
    else:
        for step in range(1, 6):
            kv.pushpull(["a", "b"], [torch.ones(2), torch.ones(2)], out=outs)
            assert max(out.max() for out in outs) <= -hvd.size() - step
        until = time.monotonic() + KNOWN_S
        while kv.report().lost != (dies,):
            assert time.monotonic() < until
            time.sleep(0.05)
    meet("survived", [rank for rank in range(hvd.size()) if rank != dies])
    kv.close(timeout_s=20)


def push_until_it_fails(kv: hvd.KVStore, key: str, out: Tensor) -> None:
    """Push until the end of the server is known here, for some time at most."""
    until = time.monotonic() + KNOWN_S
    while time.monotonic() < until:
        kv.pushpull(key, torch.ones(2), out=out)


@pytest.mark.parametrize(("type", "dies"), [("dist_async", 2), ("dist_async", 1), ("dist_sync", 1)])
def test_a_rank_that_is_killed(failing_world: Callable[[int], World], type: str, dies: int) -> None:
    world = failing_world(3)
    world.start(lose_one, type, dies)
    assert_survived(world, [dies])


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
