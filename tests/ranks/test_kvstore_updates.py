"""How pushes update a KVStore: optimizers' steps and their files, and codes with error feedback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as hvd
from gradwire.collectives.compression.registry import CODECS
from gradwire.trainer.reducer.compression import Encoding
from gradwire.trainer.servers.packing import Packing, Sender
from gradwire.trainer.servers.two_bit import codec_of
from tests.harness import wide
from tests.ranks.training import on_ranks


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
    kv = hvd.servers.KVStore("dist_sync")
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

    def trained(kv: hvd.servers.KVStore, steps: range) -> list[Tensor]:
        outs = start()
        for step in steps:
            kv.pushpull(keys, gradients_of(step, hvd.rank()), out=outs)
        return outs

    first = hvd.servers.KVStore("dist_sync")
    first.init(keys, start())
    with pytest.raises(ValueError, match="call set_optimizer"):
        first.save_optimizer_states(path)
    first.set_optimizer(factory)
    weights = trained(first, range(3))
    first.save_optimizer_states(path)
    wanted = trained(first, range(3, 6))
    second = hvd.servers.KVStore("dist_sync", servers=[1])  # other servers, and the keys in another order
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
            with pytest.raises(TypeError if hvd.rank() else ValueError):
                use(wrong if hvd.rank() else path)  # type: ignore[arg-type]
    kept = torch.load(path, weights_only=True)
    hvd.barrier()
    if hvd.rank() == 0:
        torch.save({**kept, "states": {**kept["states"], 7: {"state": 3}}}, path)  # which rank 1 holds
    hvd.barrier()
    with pytest.raises(ValueError, match="rank 1 was given a state that cannot be loaded"):
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


CODED = [{"type": "2bit", "threshold": 0.5}, {"type": "topk", "ratio": 0.05}, {"type": "int8"}, {"type": "randomk"}]
REST = [{"type": name} for name in CODECS if name not in ("none", "topk", "int8", "randomk")]


@pytest.mark.parametrize("params", [*CODED, *wide(*REST)], ids=lambda params: params["type"])
@on_ranks(2)
def test_pushes_travel_as_codes_with_error_feedback(params: dict[str, Any]) -> None:
    """See that what is assigned is the sum of what the codes of all ranks decode to, which a rank can compute by itself."""
    rank, size, numel, steps = hvd.rank(), hvd.size(), 5000, 3
    kv = hvd.servers.KVStore("dist_sync")
    kv.init(["w", "n", "e"], [torch.zeros(50, 100), torch.zeros(3, dtype=torch.int64), torch.zeros(0)])
    kv.set_gradient_compression(params)
    kv.pushpull("e", torch.zeros(0))

    def pushed(step: int, other: int) -> Tensor:
        return torch.randn(50, 100, generator=torch.Generator().manual_seed(10 * step + other))

    codec = codec_of(params)
    packing = Packing([torch.zeros(50, 100)], [Encoding(codec, codec.needs_feedback)])
    senders = [Sender(packing, 0, other) for other in range(size)]
    for step in range(steps):
        out, decoded = torch.zeros(50, 100), torch.empty(numel)
        count = torch.tensor([1, 2, 3])
        kv.pushpull(["w", "n"], [pushed(step, rank), count], out=[out, count])
        total = torch.zeros(numel)
        for other, sender in enumerate(senders):
            _, (wire,) = sender.encode([pushed(step, other)])
            codec.at(step).decode(wire, decoded)
            total += decoded
        assert torch.equal(out.flatten(), total)
        assert torch.equal(count, size * torch.tensor([1, 2, 3]))  # as it is
    with pytest.raises(ValueError, match="set already"):
        kv.set_gradient_compression(params)
    kv.close()


@on_ranks(2)
def test_two_bits_are_mxnets() -> None:
    """Do MXNet's 2bit by hand: threshold, 0 or -threshold, and the rest is kept."""
    kv = hvd.servers.KVStore("dist_sync")
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
