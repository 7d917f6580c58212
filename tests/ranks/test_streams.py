"""Every path of CUDA tensors on the simulated GPU (tests/simulated_gpu): the same bits as on the CPU, every use of memory ordered
after those before it, and no wait of the host where none belongs; over NCCL, and through the memory of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from gradwire.collectives import Communicator
from tests.harness import EXCHANGE_TIMEOUT_S, Worlds, wide_rows
from tests.ranks.training import assert_equal, copies, in_world
from tests.simulated_gpu import asynchronous, check, install, reports

STEPS, FIRST = 6, 4  # the first steps may connect and allocate
LR = 0.25  # a power of two, so that no rounding depends on fused operations


@pytest.fixture(scope="module", params=["nccl", "host"])
def gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Worlds with simulated GPUs, whose ranks exchange CUDA tensors over NCCL or through the memory of the host."""
    has_nccl = request.param == "nccl"
    worlds = Worlds(tmp_path_factory.mktemp("gpus"), {}, partial(install, nccl=has_nccl))
    yield worlds
    worlds.close()


#: Where the host may wait: for a thread that only enqueues, for the presence of the gradients of the last exchange, and for
#: hashes of replicas, which are compared rarely.
SHORTLY = tuple(f"gradwire.trainer.reducer.{name}" for name in ("streams", "presence", "replicas"))
#: Where it waits for an exchange through its own memory.
EXCHANGING = ("gradwire.collectives.engine.work", "gradwire.trainer.reducer.shards.gather")


def without_waits(
    device: str, step: int, *, earlier: bool = False, but: tuple[str, ...] = ()
) -> AbstractContextManager[None]:
    """Report waits in the block once all is set up. earlier: also those for work that was launched before. but: modules that may
    wait with NCCL, too."""
    if device == "cpu" or step < FIRST:
        return nullcontext()
    if dist.is_nccl_available():
        return asynchronous(earlier=earlier, but=(*SHORTLY, *but))
    return asynchronous(threads=False, earlier=earlier, but=(*SHORTLY, *EXCHANGING))


def communicator() -> Communicator:
    return Communicator(dist.new_group(), timeout_s=EXCHANGE_TIMEOUT_S)


def checked(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns. Raises AssertionError with what the simulated GPU has found in it."""
    reports()
    result = function(*args)
    torch.cuda.synchronize()
    check()
    return result


# Training


class Dots(nn.Module):
    """Weights on devices, whose gradients are exactly what the module is given."""

    def __init__(self, devices: list[str], dtype: torch.dtype) -> None:
        super().__init__()
        shapes = (3001,), (60, 70), (700,), (60, 70)  # codecs are for matrices of some size
        self.weights = nn.ParameterList(
            nn.Parameter(
                torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=dtype)
                .view(shape)
                .to(devices[place % len(devices)])
            )
            for place, shape in enumerate(shapes)
        )

    def forward(self, gradients: list[Tensor]) -> Tensor:
        dots = [(weight * given).sum() for weight, given in zip(self.weights, gradients, strict=True)]
        return torch.stack([dot.to(dots[0].device) for dot in dots]).sum()

    def gradients(self, step: int) -> list[Tensor]:
        """Return this rank's gradients of a step, the same numbers on every device."""
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        return [
            torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype) for weight in self.weights
        ]


def train(
    model: Dots, forward: Callable[..., Tensor], optimizer: torch.optim.Optimizer, but: tuple[str, ...] = ()
) -> list[Tensor]:
    """Return the weights after some steps. but: see without_waits()."""
    for step in range(STEPS):
        given = model.gradients(step)
        with without_waits(given[0].device.type, step, but=but):
            optimizer.zero_grad()
            forward(given).backward()
            optimizer.step()
    if isinstance(optimizer, hvd.DistributedOptimizer):
        optimizer.close()
    return [weight.cpu() for weight in copies(model.parameters())]


def with_optimizer(
    devices: list[str], dtype: torch.dtype = torch.float32, sgd: dict[str, Any] | None = None, **options: Any
) -> list[Tensor]:
    model = Dots(devices, dtype)
    if options.get("rule") is hvd.rules.NextForward:
        options["rule"] = hvd.rules.NextForward(model)
    inner = torch.optim.SGD(model.parameters(), LR, **(sgd or {}))
    return train(model, model, hvd.DistributedOptimizer(inner, model.named_parameters(), **options))


def with_scaler(devices: list[str]) -> list[Tensor]:
    model = Dots(devices, torch.float32)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), LR), model.named_parameters())
    scaler = torch.amp.GradScaler(devices[0], init_scale=4.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(model.gradients(step))).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.close()
    return [weight.cpu() for weight in copies(model.parameters())]


def with_hook(devices: list[str], codec: str) -> list[Tensor]:
    model = Dots(devices, torch.float32)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)
    hook = hvd.ddp_comm_hook(codec)
    wrapped.register_comm_hook(None, hook)
    # What a bucket has beside codes is prepared in each step, which lets NCCL connect again.
    but = () if codec == "none" else ("gradwire.collectives.transports.nccl",)
    weights = train(model, wrapped, torch.optim.SGD(model.parameters(), LR), but)
    hook.close()
    return weights


def with_backend(devices: list[str]) -> list[Tensor]:
    group = dist.new_group(backend="gradwire")
    model = Dots(devices, torch.float32)
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    weights = train(model, wrapped, torch.optim.SGD(model.parameters(), LR))
    dist.destroy_process_group(group)
    return weights


CODED = partial(with_optimizer, compression="int8")
WAYS: dict[str, Callable[[list[str]], list[Tensor]]] = {
    "dense": with_optimizer,
    "dense, bfloat16": partial(with_optimizer, dtype=torch.bfloat16),
    "fused": partial(with_optimizer, sgd={"fused": True}),
    "int8": CODED,
    "int8, bfloat16": partial(CODED, dtype=torch.bfloat16),
    "onebit": partial(with_optimizer, compression="onebit"),
    "topk": partial(with_optimizer, compression="topk"),
    "fp16": partial(with_optimizer, compression="fp16"),
    "powersgd": partial(with_optimizer, compression="powersgd"),
    "sharded": partial(with_optimizer, rule=hvd.rules.Sharded()),
    "next forward": partial(with_optimizer, rule=hvd.rules.NextForward),
    "local updates": partial(with_optimizer, rule=hvd.rules.LocalUpdates(every=2)),
    "GradScaler": with_scaler,
    "hook": partial(with_hook, codec="none"),
    "hook, int8": partial(with_hook, codec="int8"),
    "backend": with_backend,
}


@in_world
def trained(way: str, *devices: str) -> list[Tensor]:
    result: list[Tensor] = checked(WAYS[way], list(devices))
    return result


@pytest.mark.parametrize("way", WAYS)
def test_trains_as_on_the_cpu(gpus: Worlds, way: str, request: pytest.FixtureRequest) -> None:
    if way == "backend" and "host" in request.node.name:
        pytest.skip('the backend "gradwire" gives CUDA tensors to NCCL')
    world = gpus(2)
    expected = world.run(trained, way, "cpu")
    for found, same in zip(world.run(trained, way, "cuda"), expected, strict=True):
        assert_equal(found, same)


ON_TWO_DEVICES = ("dense", "int8", "powersgd", "sharded", "next forward")


@pytest.mark.parametrize(
    ("gpus", "way"),
    [
        *(("nccl", way) for way in ON_TWO_DEVICES),
        ("host", "int8"),
        *wide_rows(*(("host", way) for way in ON_TWO_DEVICES if way != "int8")),
    ],
    indirect=["gpus"],
)
def test_trains_on_two_devices(gpus: Worlds, way: str) -> None:
    world = gpus(2)
    expected = world.run(trained, way, "cpu")
    for found, same in zip(world.run(trained, way, "cuda:0", "cuda:1"), expected, strict=True):
        assert_equal(found, same)


@in_world
def with_shards(device: str) -> list[Tensor]:
    """Train with fully_shard, which writes gradients on a stream of its own."""
    mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64)).to(device)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh["shard"])
    sgd = torch.optim.SGD(model.parameters(), LR)
    options: dict[str, Any] = {"process_set": mesh["replicate"], "compression": "int8"}
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), **options)
    for step in range(STEPS):
        given = torch.full((4, 64), step + hvd.rank() + 1.0, device=device)
        with without_waits(device, step, but=("gradwire.collectives.transports.nccl",)):  # after a new layout
            optimizer.zero_grad()
            model(given).sum().backward()
            optimizer.step()
    optimizer.close()
    weights: list[Any] = list(model.parameters())
    return [weight.to_local().detach().cpu() for weight in weights]


def test_fully_shard(gpus: Worlds) -> None:
    world = gpus(2)
    expected = world.run(with_shards, "cpu")
    for found, same in zip(world.run(checked, with_shards, "cuda"), expected, strict=True):
        assert_equal(found, same)


# Verbs


def numbers(rank: int, numel: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of a rank, which the device computes."""
    return (torch.arange(numel, dtype=torch.float32, device=device) + 10 * rank).to(dtype)


def of_every_verb(comm: Communicator, device: str) -> Iterator[tuple[str, Callable[..., Any], list[Tensor]]]:
    """Yield the calls of all verbs, by a name, with the tensors that have their results."""
    rank, size = comm.rank, comm.size
    make = partial(numbers, rank, device=device)
    for op in ("sum", "average", "min", "product"):
        tensor = make(7)
        yield f"allreduce {op}", partial(comm.allreduce, tensor, op), [tensor]
    strided = make(14)
    yield "allreduce strided", partial(comm.allreduce, strided[::2]), [strided]
    for codec in ("int8", "fp16", "topk"):
        coded, half = make(700), make(700, dtype=torch.bfloat16)
        yield codec, partial(comm.allreduce, coded, compression=codec), [coded]
        yield f"{codec} bfloat16", partial(comm.allreduce, half, compression=codec), [half]
    corrected = make(700)
    feedback = comm.new_feedback("int8", 700, corrected.device)
    corrected.feedback = feedback  # type: ignore[attr-defined]  # a user keeps it for as long
    yield (
        "feedback",
        partial(comm.allreduce, corrected, compression="int8", feedback=feedback),
        [corrected, feedback.worker],
    )
    several = [make(5), make(3), make(4, dtype=torch.bfloat16)]
    yield "grouped_allreduce", partial(comm.grouped_allreduce, several), several
    part = make(3)
    yield "reduce_scatter", partial(comm.reduce_scatter, part, make(3 * size)), [part]
    reduced = make(6)
    yield "reduce", partial(comm.reduce, reduced, size - 1), [reduced] if rank == size - 1 else []
    shares = make(64 * size + 1)
    yield "reduce_shares", partial(comm.reduce_shares, shares), []  # the shares are others on a GPU
    yield "gather_shares", partial(comm.gather_shares, shares), [shares]
    everyone = make(4 * size)
    yield "allgather", partial(comm.allgather, everyone, make(4)), [everyone]
    told = make(5)
    yield "broadcast", partial(comm.broadcast, told, size - 1), [told]
    gathered = [make(4) for _ in range(size)]
    yield "gather", partial(comm.gather, make(4), gathered if rank == 0 else None, 0), gathered if rank == 0 else []
    scattered = make(4)
    yield (
        "scatter",
        partial(comm.scatter, scattered, [make(4) for _ in range(size)] if rank == 0 else None, 0),
        [scattered],
    )
    exchanged = make(2 * size)
    yield "alltoall", partial(comm.alltoall, exchanged, make(2 * size)), [exchanged]


def results_of_verbs(device: str, async_op: bool) -> dict[str, list[Tensor]]:
    """Return the results of every verb, each called on a stream that has just made its tensors. async_op: wait for all of them at
    the end, on another stream."""
    side = torch.cuda.Stream()
    results: dict[str, list[Tensor]] = {}
    with communicator() as comm:
        for again in range(2):
            running = []
            with torch.cuda.stream(side):
                for name, call, tensors in of_every_verb(comm, device):
                    # What must be copied is prepared each time, which lets NCCL connect again.
                    may_wait = "strided" in name or not (async_op or dist.is_nccl_available())
                    with nullcontext() if may_wait else without_waits(device, FIRST * again, earlier=True):
                        running.append((name, tensors, call(async_op=async_op)))
            if not async_op:
                torch.cuda.current_stream().wait_stream(side)
            for name, tensors, work in running:
                with without_waits(device, FIRST * again, earlier=True):
                    work.wait()
                for tensor in tensors:
                    tensor.record_stream(torch.cuda.current_stream())
                results[name] = [tensor.cpu() for tensor in tensors]
            comm.barrier()  # an operation of the host
            side.wait_stream(torch.cuda.current_stream())
    return results


@pytest.mark.parametrize("async_op", [False, True])
def test_every_verb(gpus: Worlds, async_op: bool) -> None:
    world = gpus(2)
    expected = world.run(checked, results_of_verbs, "cpu", async_op)
    for found, same in zip(world.run(checked, results_of_verbs, "cuda", async_op), expected, strict=True):
        for verb in same:
            assert_equal(found[verb], same[verb])


def messages(device: str) -> list[Tensor]:
    """Exchange messages with the other rank, in both directions at once."""
    with communicator() as comm:
        other = 1 - comm.rank
        comm.allreduce(numbers(0, 1, device))  # connects all ranks
        for again in range(2):
            mine, theirs = numbers(comm.rank, 9, device), numbers(5, 9, device)
            with without_waits(device, FIRST * again, earlier=True):
                # Over NCCL, both ranks begin with the same message.
                begin = [partial(comm.isend, mine, other), partial(comm.irecv, theirs, other)]
                for work in [each() for each in begin[:: 1 if comm.rank else -1]]:
                    work.wait()
                theirs += 1
        last = numbers(3, 4, device)
        if comm.rank == 0:
            comm.send(last, 1)
        else:
            comm.recv(last, 0)
        return [theirs.cpu(), last.cpu()]


def test_messages(gpus: Worlds) -> None:
    world = gpus(2)
    expected = world.run(checked, messages, "cpu")
    for found, same in zip(world.run(checked, messages, "cuda"), expected, strict=True):
        assert_equal(found, same)
