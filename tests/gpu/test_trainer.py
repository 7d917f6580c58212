"""Training on a GPU that two ranks share, over gloo: the same bits as on the CPU, whatever exchanges the gradients. Over NCCL,
the host waits for nothing."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from gradwire.collectives import Communicator
from tests.gpu.test_cuda import WITHOUT_NCCL
from tests.harness import EXCHANGE_TIMEOUT_S, Worlds
from tests.ranks.training import assert_equal, copies, in_world

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SHAPES = (70_001,), (128, 64), (96, 50), (700,)  # the matrices are for codecs
STEPS = 4
LR = 0.25  # a power of two: a fused multiply-add then rounds as a product and a sum do


class Dot(nn.Module):
    """A weight, whose gradient is exactly what the module is given."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape))

    def forward(self, given: Tensor) -> Tensor:
        return (self.weight * given).sum()


class Model(nn.Module):
    """A weight of each shape. branches: whether every other weight is used on a second stream, if there is a GPU."""

    def __init__(self, *, branches: bool = False) -> None:
        super().__init__()
        self.dots = nn.ModuleList(Dot(shape) for shape in SHAPES)
        self._branches = branches
        self._side: torch.cuda.Stream | None = None

    def forward(self, gradients: list[Tensor]) -> Tensor:
        if not self._branches or not gradients[0].is_cuda:
            return torch.stack([dot(given) for dot, given in zip(self.dots, gradients, strict=True)]).sum()
        main, side = torch.cuda.current_stream(), self._side or torch.cuda.Stream()
        self._side = side
        side.wait_stream(main)
        dots = []
        for place, (dot, given) in enumerate(zip(self.dots, gradients, strict=True)):
            with torch.cuda.stream(side) if place % 2 else nullcontext():
                dots.append(dot(given))
        main.wait_stream(side)
        for made in dots[1::2]:
            made.record_stream(main)
        return torch.stack(dots).sum()


def gradients(step: int, device: str) -> list[Tensor]:
    """Return this rank's gradients of a step, the same numbers on every device."""
    generator = torch.Generator().manual_seed(100 * step + hvd.rank())
    return [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]


def with_optimizer(
    device: str, dtype: torch.dtype = torch.float32, *, branches: bool = False, **options: Any
) -> list[Tensor]:
    model = Model(branches=branches).to(device, dtype)
    sgd = torch.optim.SGD(model.parameters(), LR)
    if options.get("rule") is hvd.rules.NextForward:
        options["rule"] = hvd.rules.NextForward(model)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        model([given.to(dtype) for given in gradients(step, device)]).backward()
        optimizer.step()
    optimizer.close()
    return [weight.cpu() for weight in copies(model.parameters())]


def with_scaler(device: str) -> list[Tensor]:
    """Scale by a power of two, and let the fused optimizer unscale."""
    model = Model().to(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), LR, fused=True), model.named_parameters())
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(gradients(step, device))).backward()
        scaler.step(optimizer)
        scaler.update()
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
    "bfloat16": partial(with_optimizer, dtype=torch.bfloat16),
    "bfloat16, int8": partial(with_optimizer, dtype=torch.bfloat16, compression="int8"),
    "branches": partial(with_optimizer, branches=True),
    "branches, int8": partial(with_optimizer, branches=True, compression="int8"),
    "GradScaler": with_scaler,
    "next_forward": partial(with_optimizer, rule=hvd.rules.NextForward),
    "shards": partial(with_optimizer, rule=hvd.rules.Sharded()),
    "hook": partial(with_hook, codec="none"),
    "hook, int8": partial(with_hook, codec="int8"),
    "local updates": partial(with_optimizer, rule=hvd.rules.LocalUpdates(every=2)),
    "delayed local updates": partial(with_optimizer, rule=hvd.rules.LocalUpdates(every=2, delay=1)),
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


OVER_NCCL: dict[str, dict[str, Any]] = {
    "dense": {},
    "int8": {"compression": "int8"},
    "powersgd": {"compression": "powersgd"},
    "shards": {"rule": hvd.rules.Sharded()},
    "next_forward": {"rule": hvd.rules.NextForward},
}


@in_world
def steps_without_a_wait(way: str) -> None:
    """Take steps over NCCL in which any call that makes the host wait raises an error, once all is set up."""
    model, options = Model().cuda(), dict(OVER_NCCL[way])
    if way == "next_forward":
        options["rule"] = hvd.rules.NextForward(model)
    given = [gradients(step, "cuda") for step in range(2 * STEPS)]
    with Communicator(dist.new_group(backend="nccl"), timeout_s=EXCHANGE_TIMEOUT_S) as communicator:
        sgd = torch.optim.SGD(model.parameters(), LR)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), process_set=communicator, **options)
        try:
            for step, each in enumerate(given):
                if step == STEPS:
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                optimizer.zero_grad()
                model(each).backward()
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.close()


@pytest.mark.parametrize("way", OVER_NCCL)
@WITHOUT_NCCL
def test_the_host_waits_for_nothing(ranks: Worlds, way: str) -> None:
    ranks(1).run(steps_without_a_wait, way)


@in_world
def capturing() -> None:
    model = Model().cuda()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), LR), model.named_parameters())
    given = gradients(0, "cuda")
    for _ in range(3):
        optimizer.zero_grad()
        model(given).backward()
        optimizer.step()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(given).backward()
    optimizer.zero_grad()
    model(given).backward()
    optimizer.step()
    optimizer.close()


def test_no_graph_can_contain_an_exchange(ranks: Worlds) -> None:
    ranks(2).run(capturing)


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
