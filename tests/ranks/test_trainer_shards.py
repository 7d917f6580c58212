"""Sharded parameters (fully_shard, DTensor): the shards of replicas are exchanged, and nothing else may be."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import gradwire as hvd
from gradwire.trainer.reducer.compression import Compressor, ErrorFeedback
from tests.harness import wide
from tests.ranks.training import BATCH, STEPS, assert_close, assert_same_on_all_ranks, distributed, on_ranks

SIZE = 4


def two_by_two() -> DeviceMesh:
    """Ranks 0 and 1 share one replica, 2 and 3 the other."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def network(seed: int = 0) -> nn.Sequential:
    """With a matrix whose shards are large enough for a codec, and parameters that two ranks cannot share equally."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 160), nn.Tanh(), nn.Linear(160, 5), nn.Tanh(), nn.Linear(5, 1))


def sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Layer by layer, the last one with the whole."""
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def locals_of(model: nn.Module) -> list[Tensor]:
    return [p.to_local().detach() for p in model.parameters() if isinstance(p, DTensor)]


def inputs_of(step: int, part: int = 0, parts: int = 1) -> Tensor:
    """Of the global batch, one of `parts` pieces."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(BATCH, 64, generator=generator).chunk(parts)[part]


def loss_at(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = (model(inputs) - 1).square().mean()
    return loss


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@on_ranks(SIZE)
@pytest.mark.parametrize(
    ("passes", "set_to_none", "bucket_bytes"),
    [(2, False, 400)]
    + [pytest.param(*case, marks=pytest.mark.wide) for case in ((1, True, 25_000_000), (1, False, 1))],
)
def test_as_without_shards(passes: int, set_to_none: bool, bucket_bytes: int) -> None:
    """Replicas begin with the weights of the first one, by broadcast."""
    mesh = two_by_two()
    replicas = mesh.get_group("replicate")
    model = sharded(network(seed=mesh.get_coordinate()[0]), mesh)  # type: ignore[index]
    hvd.broadcast_parameters(locals_of(model), torch.distributed.get_global_rank(replicas, 0), process_set=replicas)
    optimizer = hvd.DistributedOptimizer(
        adamw(model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=passes,
        process_set=replicas,
        bucket_bytes=bucket_bytes,
    )
    alone = network()
    plain = adamw(alone.parameters())
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        for part in range(passes):
            (loss_at(model, inputs_of(step, hvd.rank() * passes + part, SIZE * passes)) / passes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert all(isinstance(p.grad, DTensor) for p in model.parameters())
        optimizer.step()
        plain.zero_grad()
        loss_at(alone, inputs_of(step)).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        plain.step()
    weights = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    assert_same_on_all_ranks(weights)
    assert_close(weights, alone.parameters(), rtol=1e-4, atol=1e-5)


def chunk_of(whole: Tensor, shard: int) -> Tensor:
    """As fully_shard divides: whole rows, the first rank's one more, or all."""
    chunks = whole.chunk(2)
    return chunks[shard] if shard < len(chunks) else whole[:0]


@pytest.mark.parametrize("compression", ["onebit", *wide("powersgd", ErrorFeedback("int4"))])
@on_ranks(SIZE)
def test_codecs(compression: Compressor) -> None:
    """Against an optimizer of plain parameters that are this rank's shards, to the bit; saved and loaded on the way."""
    mesh = two_by_two()
    replica, shard = mesh.get_coordinate()  # type: ignore[misc]
    options: dict[str, Any] = {
        "compression": compression,
        "policy": {"2.*": "onebit"},  # a shard of a bias that is on one rank alone too
        "process_set": mesh.get_group("replicate"),
        "bucket_bytes": 1,  # so that no order of arrival decides what is rounded together
    }
    twin, model = network(), sharded(network(), mesh)
    names = [name for name, _ in model.named_parameters()]
    plain = [nn.Parameter(local.clone()) for local in locals_of(model)]
    expected = hvd.DistributedOptimizer(adamw(plain), zip(names, plain, strict=True), **options)
    optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), model.named_parameters(), **options)
    for step in range(STEPS):
        halves = [
            torch.autograd.grad(loss_at(twin, inputs_of(step, 2 * replica + half, SIZE)), list(twin.parameters()))
            for half in range(2)
        ]
        expected.zero_grad()
        mine = [chunk_of((one + other) / 2, shard) for one, other in zip(*halves, strict=True)]
        torch.stack([(p * g).sum() for p, g in zip(plain, mine, strict=True)]).sum().backward()
        expected.step()

        optimizer.zero_grad()
        loss_at(model, inputs_of(step, hvd.rank(), SIZE)).backward()
        optimizer.step()
        for local, other in zip(locals_of(model), plain, strict=True):
            assert torch.equal(local, other)
        with torch.no_grad():
            for whole, parameter in zip(twin.parameters(), model.parameters(), strict=True):
                whole.copy_(parameter.full_tensor())  # type: ignore[operator]
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.close()
            optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), model.named_parameters(), **options)
            optimizer.load_state_dict(saved)
    neighbours = mesh.get_group("shard")
    others: list[Any] = [None, None]
    dist.all_gather_object(others, optimizer.state_dict(), group=neighbours)
    with pytest.raises(ValueError, match=r"the first that differs was .* at \(\d,\) of a mesh of shape \(2,\)"):
        optimizer.load_state_dict(others[1 - shard])


@on_ranks(SIZE)
def test_gradients_that_come_when_backward_has_ended() -> None:
    """Two models sharded each by itself: of the first, gradients come when backward has ended, after those of the second."""
    mesh = two_by_two()
    models = [fully_shard(nn.Linear(4, 4), mesh=mesh["shard"]) for _ in range(2)]
    parameters = [p for model in models for p in model.parameters()]
    for parameter in parameters:
        nn.init.ones_(parameter)
    optimizer = distributed(parameters, 0.1, process_set=mesh.get_group("replicate"), bucket_bytes=1)
    for _ in range(2):
        optimizer.zero_grad()
        models[1](models[0](torch.full((1, 4), float(hvd.rank())))).sum().backward()
        for parameter, expected in zip(parameters, (6.0, 4.0, 7.0, 1.0), strict=True):
            assert isinstance(parameter.grad, DTensor)
            assert torch.equal(parameter.grad.full_tensor(), torch.full(parameter.shape, expected))


@on_ranks(SIZE)
def test_a_replicated_parameter() -> None:
    """A parameter that a mesh replicates, whose gradient is still to be summed up over that mesh."""
    mesh = two_by_two()
    weight = nn.Parameter(distribute_tensor(torch.ones(3), mesh["shard"], [Replicate()]))
    optimizer = distributed([weight], process_set=mesh.get_group("replicate"))
    inputs = DTensor.from_local(torch.full((2, 3), float(hvd.rank())), mesh["shard"], [Shard(0)])
    (inputs * weight).sum().full_tensor().backward()
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.placements == weight.placements
    assert weight.grad.to_local().tolist() == [6.0] * 3  # the mean of 2 * (0 + 1) and 2 * (2 + 3)
    optimizer.step()
    assert weight.to_local().tolist() == [-5.0] * 3


@on_ranks(SIZE)
def test_different_shards_are_not_averaged() -> None:
    """Wherever ranks of the process set hold different shards, on all of them; nothing is left of what was refused."""
    mesh = two_by_two()
    model = sharded(network(), mesh)
    crossed = [dist.new_group(members) for members in ([0, 3], [1, 2])][hvd.rank() in (1, 2)]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    for process_set in (None, mesh.get_group("shard"), crossed):
        with pytest.raises(ValueError, match=r"of the process_set hold different shards of '0\.bias'") as caught:
            hvd.DistributedOptimizer(inner, model.named_parameters(), process_set=process_set)
        errors.append(caught.value)
    assert [str(error).split(" of the process_set")[0] for error in errors] == [f"rank {hvd.rank()}: ranks 0 and 1"] * 3
    optimizer = hvd.DistributedOptimizer(inner, process_set=mesh.get_group("replicate"))
    loss_at(model, inputs_of(0, hvd.rank(), SIZE)).backward()
    twin = network()
    loss_at(twin, inputs_of(0)).backward()
    for parameter, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.grad)
    optimizer.close()
