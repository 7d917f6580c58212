"""torch.set_default_device() and torch.set_default_dtype() change no result: of all verbs, codecs and rules, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.collectives.compression.registry import CODECS, make_codec
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.trainer.reducer.compression import NAMES
from tests.harness import wide
from tests.ranks import forms
from tests.ranks.test_growth import MAKERS, Make
from tests.ranks.training import copies, on_ranks

Results = dict[str, Any]
WIDTH = 300  # of the model: a matrix codec compresses its first matrix
STEPS = 3


@contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    """Make a dtype, and a device whose tensors have no elements, torch's defaults."""
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def numbers(seed: int, *shape: int, of: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator).to(of)


def own(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
    return numbers(100 + dist.get_rank(), *shape, of=of)


def zeros(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=of, device="cpu")


class Linear(nn.Module):
    """Multiply by given numbers."""

    def __init__(self, seed: int, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(seed, rows, columns) / columns**0.5)
        self.bias = nn.Parameter(zeros(rows))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weight, self.bias)


def model_of(seed: int = 0) -> nn.Sequential:
    return nn.Sequential(Linear(seed, WIDTH, WIDTH), nn.Tanh(), Linear(seed + 1, 3, WIDTH))


def trained(model: nn.Module, optimizer: Any) -> list[Tensor]:
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = numbers(1000 * step + dist.get_rank(), 8, WIDTH)
        (model(inputs) - inputs[:, :3]).square().mean().backward()
        optimizer.step()
    return copies(model.parameters())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# What is compared. Each function returns its results by name.


def verbs() -> Results:
    """The verbs of a Communicator, by every algorithm, and with every codec."""
    found: Results = {}
    with Communicator(timeout_s=20, segment_bytes=200) as comm:
        size, mine = comm.size, own(600)
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            given = (100 * mine).to(dtype)
            calls = [
                (verb, {"algorithm": name}) for verb in ("allreduce", "reduce", "broadcast") for name in PLANNERS[verb]
            ]
            prescale = 0.5 if given.is_floating_point() else 1.0
            calls += [("allreduce", {"op": op, "prescale": prescale}) for op in ("average", "min", "product")]
            for verb, options in calls:
                getattr(comm, verb)(tensor := given.clone(), **options)
                found[f"{verb} {options} {dtype}"] = tensor
        comm.reduce_scatter(part := zeros(600 // size), mine)
        comm.allgather(every := zeros(600 * size), mine)
        comm.gather(mine, gathered := [zeros(600) for _ in range(size)] if comm.rank == 0 else None)
        comm.scatter(scattered := zeros(600), gathered)
        comm.alltoall(exchanged := zeros(600), mine)
        counts = [200 + 200 * ((comm.rank + other) % 2) for other in range(size)]
        comm.alltoall(uneven := zeros(sum(counts)), own(sum(counts)), counts, counts)
        comm.reduce_shares(shared := mine.clone())
        comm.gather_shares(shared)
        comm.grouped_allreduce(group := [mine.clone(), own(7)])
        comm.barrier()
        comm.allreduce(later := mine.clone(), async_op=True).wait()
        comm.prepare_allreduce(again := mine.clone()).start().wait()
        sent = comm.isend(mine, (comm.rank + 1) % size)
        comm.recv(received := zeros(600), (comm.rank - 1) % size)
        sent.wait()
        found["moved"] = [part, every, gathered, scattered, exchanged, uneven, shared, group, later, again, received]
        found["objects"] = [
            comm.allgather_object({"rank": comm.rank}),
            comm.broadcast_object(mine if comm.rank == 0 else None),
            comm.gather_object(comm.rank, 1),
            comm.scatter_object([numbers(rank, 3) for rank in range(size)] if comm.rank == 0 else None),
        ]
        found["made"] = [comm.empty(3, 4).zero_(), comm.shared_empty(2, 2)]
        for codec in (name for name in CODECS if name != "none" and make_codec(name).takes_feedback):
            feedback = comm.new_feedback(codec, 600)
            for step, options in enumerate([{"feedback": feedback}] * 3 + [{"op": "average"}]):
                comm.allreduce(tensor := own(600) * (step + 1), compression=codec, step=step, **options)
                found[f"{codec} {step}"] = [tensor, feedback.state_dict()]
    return found


def backend() -> Results:
    """The verbs of torch.distributed's backend that make tensors of their own."""
    group, size = dist.new_group(backend="gradwire"), dist.get_world_size()
    dist.all_reduce(summed := own(50), group=group)
    dist.all_reduce(bits := (100 * own(9)).to(torch.int32), dist.ReduceOp.BXOR, group=group)
    dist.all_gather(every := [zeros(50) for _ in range(size)], own(50), group=group)
    dist.all_to_all(exchanged := [zeros(5) for _ in range(size)], list(own(size, 5)), group=group)
    rows = torch.tensor([[dist.get_rank(), 3]], dtype=torch.int64, device="cpu")
    sparse = torch.sparse_coo_tensor(rows, own(2), (5,), device="cpu")
    dist.all_reduce(sparse, group=group)
    dist.barrier(group=group)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, dist.get_rank(), group=group)
    dist.destroy_process_group(group)
    return {"backend": [summed, bits, every, exchanged, sparse.to_dense(), objects]}


def horovod() -> Results:
    """All forms of Horovod's verbs, and what else it offers."""
    found: Results = {}
    for name, form in forms.forms(*forms.VERBS, *forms.GROUPED).items():
        found[name] = forms.done(form(own(4 * hvd.size(), 3)))
    found["splits"] = hvd.alltoall(own(3), [1, 2] if hvd.rank() == 0 else [2, 1])
    rows = torch.tensor([[hvd.rank(), 2]], dtype=torch.int64, device="cpu")
    sparse = torch.sparse_coo_tensor(rows, own(2, 3), (4, 3), device="cpu")
    found["sparse"] = hvd.synchronize(hvd.sparse_allreduce_async(sparse, name="s", op=hvd.Sum)).to_dense()
    found["adasum"] = hvd.allreduce(own(70), op=hvd.Adasum)
    found["objects"] = [hvd.allgather_object(hvd.rank()), hvd.broadcast_object(own(2), 0)]
    model = model_of(hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), 0)
    found["broadcast"] = [parameter.detach() for parameter in model.parameters()]
    optimizer = sgd(model)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * (1 + hvd.rank())
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    found["optimizer"] = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    normalized = hvd.SyncBatchNorm(3, device="cpu", dtype=torch.float32)
    inputs = own(8, 3).requires_grad_()
    normalized(inputs).square().sum().backward()
    found["batch norm"] = [inputs.grad, normalized.running_var, normalized.weight.grad]
    hvd.join()
    return found


def outer(model: nn.Module) -> hvd.rules.LocalUpdates:
    return hvd.rules.LocalUpdates(every=2, outer=hvd.optimizers.DelayedNesterov(model.parameters(), lr=0.7, delay=2))


#: Beside what may not grow, optimizers of our own; and one of a rule whose result depends on no time.
MORE_MAKERS: dict[str, Make] = {
    "lamb": lambda m: hvd.DistributedOptimizer(hvd.optimizers.LAMB(m.parameters(), lr=0.01), m.named_parameters()),
    "lars": lambda m: hvd.DistributedOptimizer(hvd.optimizers.LARS(m.parameters(), lr=0.01), m.named_parameters()),
    "nesterov": lambda m: hvd.DistributedOptimizer(sgd(m), m.named_parameters(), rule=outer(m)),
    "hogwild": lambda m: hvd.servers.Hogwild(torch.optim.SGD(m.parameters(), lr=0.0), m.named_parameters()),
}


def training() -> Results:
    """With every codec and by every rule: the weights, and those of a training that goes on from a checkpoint."""
    found: Results = {}
    for name, make in (MAKERS | MORE_MAKERS).items():
        optimizer = make(model := model_of())
        weights = trained(model, optimizer)
        if name in NAMES:
            optimizer.load_state_dict(optimizer.state_dict())
            weights += trained(model, optimizer)
        optimizer.close()
        if name != "auto":  # times decide what it chooses
            found[name] = [*weights, *copies(model.parameters())]
    return found


def keys() -> Results:
    kv = hvd.servers.KVStore("dist_sync")
    kv.set_optimizer(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    kv.init("w", zeros(13, 7))
    kv.pushpull("w", own(13, 7), out=(out := zeros(13, 7)))
    kv.close()
    return {"kvstore": out}


def embeddings() -> Results:
    """Sparse gradients."""
    weight = nn.Parameter(numbers(3, 10, 4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])
    for step in range(3):
        rows = torch.tensor([hvd.rank() + step, 5], dtype=torch.int64, device="cpu")
        optimizer.zero_grad()
        nn.functional.embedding(rows, weight, sparse=True).square().sum().backward()
        optimizer.step()
    optimizer.close()
    return {"embedding": weight.detach()}


def ddp() -> Results:
    """The hook of DDP, with codecs of buffers and of matrices."""
    found: Results = {}
    for codec in ("int8", "powersgd"):
        model = DistributedDataParallel(model_of())
        model.register_comm_hook(None, hvd.ddp_comm_hook(codec))
        found[f"ddp {codec}"] = trained(model, sgd(model))
    return found


def elastic() -> Results:
    """A commit in memory, and what is restored from it."""
    model, sampler = model_of(), hvd.elastic.ElasticSampler(range(12), shuffle=False)
    state = hvd.elastic.TorchState(model, sgd(model), sampler=sampler, batch=3)
    state.commit()
    with torch.no_grad():
        model[0].weight.zero_()
    state.batch = 5
    state.restore()
    return {"elastic": [model[0].weight.detach(), state.batch, list(sampler)]}


def differences(one: Any, other: Any, name: str) -> Iterator[str]:
    """Yield the names of what differs by a bit, or in its dtype or device."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        if not alike or not torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other))):
            yield f"{name}: {other.dtype} {list(other.shape)} on {other.device}"
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            yield from differences(one[key], other[key], f"{name} {key}")
    elif isinstance(one, (list, tuple)):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{name}[{number}]")
    elif one != other:
        yield f"{name}: {other!r} instead of {one!r}"


PARTS = (verbs, backend, horovod, training, keys, embeddings, ddp, elastic)


@pytest.mark.parametrize("dtype", [torch.float16, *wide(torch.float64)])
@on_ranks(2)
def test_defaults_of_torch_change_nothing(dtype: torch.dtype) -> None:
    for part in PARTS:
        wanted = part()
        with defaults(dtype):
            found = part()
        assert not list(differences(wanted, found, f"{part.__name__} under {dtype}"))
