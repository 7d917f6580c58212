"""Training on a GPU that two ranks share, over gloo: the same bits as on the CPU, whatever exchanges the gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from tests.harness import Worlds
from tests.ranks.training import assert_equal, copies, in_world

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

WIDTHS = (70_001, 3_000, 700)
STEPS = 4
LR = 0.25  # a power of two: a fused multiply-add then rounds as a product and a sum do


class Dot(nn.Module):
    """A weight, whose gradient is exactly what the module is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, given: Tensor) -> Tensor:
        return (self.weight * given).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dots = nn.ModuleList(Dot(width) for width in WIDTHS)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([dot(given) for dot, given in zip(self.dots, gradients, strict=True)]).sum()


def gradients(step: int, device: str) -> list[Tensor]:
    """Return this rank's gradients of a step, the same numbers on every device."""
    generator = torch.Generator().manual_seed(100 * step + hvd.rank())
    return [torch.randn(width, generator=generator).to(device) for width in WIDTHS]


def with_optimizer(device: str, **options: Any) -> list[Tensor]:
    model = Model().to(device)
    sgd = torch.optim.SGD(model.parameters(), LR)
    if options.get("rule") is hvd.rules.NextForward:
        options["rule"] = hvd.rules.NextForward(model)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(gradients(step, device)).backward()
        optimizer.step()
    optimizer.close()
    return [weight.cpu() for weight in copies(model.parameters())]


def with_hook(device: str, codec: str) -> list[Tensor]:
    model = Model().to(device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.2)
    hook = hvd.ddp_comm_hook(codec)
    wrapped.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(gradients(step, device)).backward()
        optimizer.step()
    hook.close()
    return [weight.cpu() for weight in copies(model.parameters())]


def from_a_commit(device: str) -> list[Tensor]:
    model = Model().to(device)
    sgd = torch.optim.SGD(model.parameters(), LR, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression="int8")
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(gradients(step, device)).backward()
            optimizer.step()
            if step == 1:
                state.commit()
        state.restore()

    train(state)
    optimizer.close()
    return [weight.cpu() for weight in copies(model.parameters())]


WAYS: dict[str, Callable[[str], list[Tensor]]] = {
    "dense": with_optimizer,
    "int8": partial(with_optimizer, compression="int8"),
    "onebit": partial(with_optimizer, compression="onebit"),
    "topk": partial(with_optimizer, compression="topk"),
    "fp16": partial(with_optimizer, compression="fp16"),
    "next_forward": partial(with_optimizer, rule=hvd.rules.NextForward),
    "shards": partial(with_optimizer, rule=hvd.rules.Sharded()),
    "hook": partial(with_hook, codec="none"),
    "hook, int8": partial(with_hook, codec="int8"),
    "local updates": partial(with_optimizer, rule=hvd.rules.LocalUpdates(every=2)),
    "commit": from_a_commit,
}


@in_world
def trained(way: str, device: str) -> list[Tensor]:
    return WAYS[way](device)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_as_on_the_cpu(ranks: Worlds, way: str) -> None:
    world = ranks(2)
    expected = world.run(trained, way, "cpu")
    for found in world.run(trained, way, "cuda"):
        assert_equal(found, expected[0])


@in_world
def trained_over(backend: str) -> list[Tensor]:
    """Train under DDP on a GPU of this rank's own."""
    group = dist.new_group(backend=backend)
    model = Model().cuda()
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    on_cpu = torch.ones(3)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(gradients(step, "cuda")).backward()
        optimizer.step()
        if backend == "gradwire":
            dist.all_reduce(on_cpu, group=group)  # beside those that go to NCCL
    weights = [weight.cpu() for weight in copies(model.parameters())]
    dist.destroy_process_group(group)
    return weights


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch built with NCCL")
def test_the_backend_gives_cuda_tensors_to_nccl(ranks: Worlds) -> None:
    world = ranks(1)
    assert_equal(world.run(trained_over, "gradwire")[0], world.run(trained_over, "nccl")[0])
