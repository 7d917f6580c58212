"""The backend "gradwire" of torch.distributed, beside gloo in the same processes and as programs have it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_localSGD
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, PeerLost, cores
from tests.harness import ON_EVERY_TRANSPORT, Worlds, wide_rows
from tests.interpreter import python
from tests.ranks.programs import ended, launch_text, start

#: What torch's verbs do with a group, this rank's number and the number of ranks; they return what was written.
Verb = Callable[[dist.ProcessGroup, int, int], Any]


def numbers(rank: int, count: int = 12, dtype: torch.dtype = torch.float32) -> Tensor:
    return ((torch.arange(count) * 7 + rank * 5) % 11).to(dtype)


def reduced(op: Any, dtype: torch.dtype = torch.float32) -> Verb:
    def verb(group: dist.ProcessGroup, rank: int, size: int) -> Tensor:
        tensor = numbers(rank, 12, dtype)
        dist.all_reduce(tensor, op, group=group)
        return tensor

    return verb


def coalesced(group: dist.ProcessGroup, rank: int, size: int) -> list[Tensor]:
    tensors = [numbers(rank, count) for count in (1, 5, 7)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    return tensors


def gathered(group: dist.ProcessGroup, rank: int, size: int) -> list[Any]:
    into, lists = torch.empty(size * 12), [torch.empty(12) for _ in range(size)]
    works = [
        dist.all_gather_into_tensor(into, numbers(rank), group=group, async_op=True),
        dist.all_gather(lists, numbers(rank), group=group, async_op=True),
    ]
    rooted = [torch.empty(12) for _ in range(size)] if rank == size - 1 else None
    dist.gather(numbers(rank), rooted, dst=size - 1, group=group)
    for work in works:
        assert work.wait() is work.wait() is True
        assert work.is_completed()
    return [into, lists, rooted or []]


def scattered(group: dist.ProcessGroup, rank: int, size: int) -> list[Tensor]:
    one, part, mine = torch.empty(4), torch.empty(4), torch.empty(12)
    dist.reduce_scatter_tensor(one, numbers(rank, 4 * size), group=group)
    dist.reduce_scatter(part, list(numbers(rank, 4 * size).split(4)), dist.ReduceOp.MAX, group=group)
    dist.scatter(mine, [numbers(each) for each in range(size)] if rank == 0 else None, src=0, group=group)
    return [one, part, mine]


def both_ways(rank: int, size: int) -> list[list[tuple[int, int]]]:
    """Return the pairs (sender, receiver) in which a rank sends, and those in which it receives."""
    return [[(rank, other) for other in range(size)], [(other, rank) for other in range(size)]]


def exchanged(group: dist.ProcessGroup, rank: int, size: int) -> list[Tensor]:
    rows, theirs = ([1 + (2 * one + other) % 3 for one, other in pairs] for pairs in both_ways(rank, size))
    single, uneven = torch.empty(2 * size, 3), torch.empty(sum(theirs), 3)
    dist.all_to_all_single(single, numbers(rank, 6 * size).view(-1, 3), group=group)
    dist.all_to_all_single(uneven, numbers(rank, 3 * sum(rows)).view(-1, 3), theirs, rows, group=group)
    return [single, uneven]


def exchange_lists(group: dist.ProcessGroup, rank: int, size: int) -> None:
    """Check lists of unequal parts. Gloo takes only lists of equal parts, and with torch 2.11 no lists."""
    rows, theirs = ([1 + (2 * one + other) % 3 for one, other in pairs] for pairs in both_ways(rank, size))
    landed = [torch.empty(count) for count in theirs]
    dist.all_to_all(landed, [numbers(rank + other, count) for other, count in enumerate(rows)], group=group)
    for other, tensor in enumerate(landed):
        assert torch.equal(tensor, numbers(rank + other, theirs[other]))


def sent(group: dist.ProcessGroup, rank: int, size: int) -> list[Any]:
    following, before = (rank + 1) % size, (rank - 1) % size
    early, landed = torch.zeros(100_000), torch.zeros(100_000)
    sending = dist.isend(numbers(rank, 100_000), group=group, group_dst=following, tag=3)
    dist.barrier(group)  # a message that is still to be received holds up no operation
    sender = dist.recv(early, group=group, group_src=before, tag=3)
    operations = [
        dist.P2POp(dist.isend, numbers(rank + 1, 100_000), group=group, group_peer=following),
        dist.P2POp(dist.irecv, landed, group=group, group_peer=before),
    ]
    for work in [sending, *dist.batch_isend_irecv(operations)]:
        work.wait()
    return [early, landed, sender]


def functionally(group: dist.ProcessGroup, rank: int, size: int) -> list[Tensor]:
    made = [
        functional.all_reduce(numbers(rank), "sum", group),
        functional.all_gather_tensor(numbers(rank), 0, group),
        functional.reduce_scatter_tensor(numbers(rank, 4 * size), "sum", 0, group),
        functional.all_to_all_single(numbers(rank, 4 * size), None, None, group),
        functional.broadcast(numbers(rank), 0, group),
        *functional.all_reduce_coalesced([numbers(rank), numbers(rank, 3)], "max", group),
    ]
    return [each + 0 for each in made]


def objects(group: dist.ProcessGroup, rank: int, size: int) -> list[Any]:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank}, group=group)
    given = [rank, "first"] if rank == 0 else [None, None]
    dist.broadcast_object_list(given, src=0, group=group)
    return [everyone, given]


def odd(group: dist.ProcessGroup, rank: int, size: int) -> list[Tensor]:
    """Reduce what is not a dense real tensor."""
    complex_numbers = torch.complex(numbers(rank), numbers(rank + 1))
    dist.all_reduce(complex_numbers, group=group)
    sparse = torch.sparse_coo_tensor([[rank, size]], [1.0, 2.0], (size + 1,), check_invariants=True)
    dist.all_reduce(sparse, group=group)
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX):  # not those of the real and imaginary parts
        with pytest.raises((TypeError, RuntimeError)):
            dist.reduce(complex_numbers.clone(), group_dst=0, op=op, group=group)
        with pytest.raises((TypeError, RuntimeError)):
            dist.reduce_scatter_tensor(complex_numbers[:1].clone(), complex_numbers[:size].clone(), op, group)
    return [complex_numbers, sparse.to_dense()]


VERBS: dict[str, Verb] = {
    **{str(op): reduced(op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)},
    **{str(op): reduced(op, torch.int32) for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)},
    **{f.__name__: f for f in (coalesced, gathered, scattered, exchanged, sent, functionally, objects, odd)},
}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else [*map(plain, value)] if isinstance(value, list) else value


def compare_with_gloo() -> None:
    """Do everything with both backends; the numbers are such that the order of a sum does not matter."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "gradwire")}
    for name, verb in VERBS.items():
        expected, found = (plain(verb(group, rank, size)) for group in groups.values())
        assert found == expected, name
    exchange_lists(groups["gradwire"], rank, size)
    assert dist.get_backend(groups["gradwire"]) == "gradwire"
    small = numbers(rank, 3 * size).to(torch.float8_e4m3fn).view(size, 3)  # which gloo does not know
    swapped = torch.empty_like(small)
    dist.all_to_all_single(swapped, small, [1] * size, [1] * size, group=groups["gradwire"])
    assert torch.equal(
        swapped.float(), torch.stack([numbers(each, 3 * size).view(size, 3)[rank] for each in range(size)])
    )
    dist.broadcast(small, 0, group=groups["gradwire"])
    assert torch.equal(small.float(), numbers(0, 3 * size).view(size, 3))
    with Communicator(groups["gradwire"], timeout_s=10) as communicator:  # as over gloo
        assert communicator.allgather_object(rank) == list(range(size))
    for group in groups.values():
        dist.destroy_process_group(group)


@ON_EVERY_TRANSPORT
@pytest.mark.parametrize("size", [2, 3])
def test_every_verb_does_what_gloo_does(ranks: Worlds, size: int) -> None:
    ranks(size).run(compare_with_gloo)


SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import async_save, load
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import gradwire

dist.init_process_group("gradwire")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)).double()


model, alone = made(), made()
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
model.set_allocate_memory_from_process_group_for_comm(True)
optimizer, reference = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, alone))
generator = torch.Generator().manual_seed(1)
for _ in range(5):
    inputs = torch.randn(8, 8, dtype=torch.float64, generator=generator)
    mine = inputs.chunk(2)[mesh["dp"].get_local_rank()]
    for trained, batch, step in ((model, mine, optimizer), (alone, inputs, reference)):
        step.zero_grad()
        (trained(batch) - batch.flip(1)).square().mean().backward()
        step.step()
for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-9, atol=1e-12)
trained = [parameter.full_tensor() for parameter in model.parameters()]
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
async_save(get_model_state_dict(model), checkpoint_id="checkpoint").result()
for way in ("from rank 0", "from the checkpoint"):
    torch.nn.init.zeros_(model[0].weight)
    if way == "from rank 0":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole if dist.get_rank() == 0 else {}, options=options)
    else:
        load(get_model_state_dict(model), checkpoint_id="checkpoint")
    for parameter, before in zip(model.parameters(), trained, strict=True):
        assert torch.equal(parameter.full_tensor(), before), way
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("gradwire")  # again, in the same store
dist.barrier()
print("done")  # and an end without destroy_process_group
"""


def test_shards_and_tensor_parallelism(tmp_path: Path) -> None:
    assert launch_text(SHARDED, tmp_path, processes=4).count("done") == 4


#: What waits for rank 1, each in a group of its own: after an error, a group is broken.
AWAITING: dict[str, Callable[[dist.ProcessGroup], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group, async_op=True),
    "all_gather": lambda group: dist.all_gather(
        [torch.ones(9) for _ in range(3)], torch.ones(9), group=group, async_op=True
    ),
    "send": lambda group: dist.isend(torch.ones(4_000_000), group=group, group_dst=1),
    "recv": lambda group: dist.irecv(torch.ones(1), group=group, group_src=1),
}


def begin(name: str, group: dist.ProcessGroup) -> Callable[[], object]:
    """Begin an operation and return its wait. A message to a rank whose end is known may fail at once: its wait raises that."""
    try:
        wait: Callable[[], object] = AWAITING[name](group).wait
    except PeerLost as error:
        failure = error

        def wait() -> object:
            raise failure

    return wait


def lose_a_rank(how: signal.Signals) -> None:
    groups = {name: dist.new_group(backend="gradwire") for name in (*AWAITING, "ddp")}
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=groups["ddp"])
    for group in groups.values():
        dist.barrier(group)
        group.set_timeout(timedelta(seconds=3))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), how)
    waits = {name: begin(name, groups[name]) for name in AWAITING}
    with pytest.raises(RuntimeError, match="rank 1"):
        model(torch.ones(1, 4)).sum().backward()
    for name, wait in waits.items():
        with pytest.raises(PeerLost if how == signal.SIGKILL else CollectiveTimeout, match="rank 1") as caught:
            wait()
        assert isinstance(caught.value, dist.DistBackendError), name
        assert caught.value.ranks == (1,), name
        with pytest.raises(CollectiveError):  # again, as it is broken
            AWAITING[name](groups[name]).wait()
    dist.destroy_process_group(groups["send"])


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        ("shared_memory", signal.SIGKILL),
        ("sockets", signal.SIGSTOP),
        *wide_rows(("sockets", signal.SIGKILL), ("shared_memory", signal.SIGSTOP)),
        *wide_rows(*(("process_group", how) for how in (signal.SIGKILL, signal.SIGSTOP))),
    ],
    indirect=["ranks"],
)
def test_a_rank_that_is_lost_is_named(ranks: Worlds, how: signal.Signals) -> None:
    world = ranks.fresh(3)
    world.start(lose_a_rank, how)
    outcomes = world.collect(40, ranks=[0, 2])
    world.kill()
    assert [outcome.status for outcome in outcomes] == ["returned"] * 2, "\n".join(map(str, outcomes))


LEFT_ALONE = """
import os, signal, sys
import torch
import torch.distributed as dist
import gradwire

rank = int(sys.argv[1])
dist.init_process_group("gradwire", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
under_way = [dist.isend(torch.ones(4_000_000), 1), dist.all_reduce(torch.ones(100_000), async_op=True)]
dist.all_reduce(torch.ones(1))
"""


def test_who_is_left_alone_ends_with_the_error(tmp_path: Path) -> None:
    """Without destroy_process_group, and with operations that nobody waits for."""
    script = tmp_path / "script.py"
    script.write_text(LEFT_ALONE)
    processes = [start([python(), str(script), str(rank), str(tmp_path / "store")], tmp_path) for rank in range(2)]
    (survivor, said), (killed, _) = map(ended, processes)
    assert (survivor, killed) == (1, -signal.SIGKILL), said
    assert "PeerLost" in said
    assert "lost rank 1" in said


def drop_works() -> list[float]:
    group = dist.new_group(backend="gradwire")
    tensors = [torch.ones(10_000) for _ in range(50)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group, async_op=True)
    received = torch.zeros(1_000_000)
    if dist.get_rank() == 0:
        dist.isend(torch.ones(1_000_000), group=group, group_dst=1)  # longer than what the link takes at once
        time.sleep(1)
    else:
        dist.recv(received, group=group, group_src=0)
    last = torch.ones(1)
    future = dist.all_reduce(last, group=group, async_op=True).get_future()
    (value,) = future.then(lambda done: done.value()).wait()
    assert value is last
    dist.destroy_process_group(group)
    return [float(tensor.sum()) for tensor in [*tensors, received]]


def test_works_that_are_dropped_are_done(ranks: Worlds) -> None:
    assert ranks(2).run(drop_works) == [[20_000.0] * 50 + [received] for received in (0.0, 1e6)]


def await_what_never_arrives(end: str) -> str:
    group = dist.new_group(backend="gradwire")
    work = dist.irecv(torch.zeros(3), group=group, group_src=1 - dist.get_rank())
    assert work is not None
    future = work.get_future()
    dist.barrier(group)
    getattr(group, end)()
    assert future.done()
    with pytest.raises(RuntimeError) as caught:
        future.wait()
    return str(caught.value)


@pytest.mark.parametrize("end", ["shutdown", "abort"])
def test_the_future_of_a_message_ends_with_the_group(ranks: Worlds, end: str) -> None:
    for said in ranks(2).run(await_what_never_arrives, end):
        assert "recv" in said


def come_late() -> str:
    group = dist.new_group(backend="gradwire")
    said = ""
    if dist.get_rank() == 0:
        with pytest.raises(TimeoutError, match="waiting for rank 1") as caught:
            group.monitored_barrier(timedelta(seconds=0.5))  # type: ignore[attr-defined]
        said = str(caught.value)
    dist.barrier()
    dist.destroy_process_group(group)
    return said


def test_monitored_barrier_names_who_is_missing(ranks: Worlds) -> None:
    assert "not done after 0.5 s" in ranks(2).run(come_late)[0]


def queue_before_barriers() -> None:
    """Rank 1 is later for the queued operations than the barriers after them allow, and misses the last barrier."""
    group, rank = dist.new_group(backend="gradwire"), dist.get_rank()
    tensor, last = torch.ones(3), torch.ones(3)
    group.barrier().wait()  # later ones are calls that both ranks know
    works = []
    for _ in range(2):
        time.sleep(1.5 * rank)
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=1.0)
    options.asyncOp = True
    barrier = group.barrier(options)
    works.append(dist.all_reduce(last, group=group, async_op=True))
    for work in (*works, barrier):
        work.wait()
    assert tensor.tolist() == [4.0] * 3
    assert last.tolist() == [2.0] * 3
    time.sleep(1.5 * rank)
    dist.all_reduce(last, group=group, async_op=True)
    if rank == 0:
        with pytest.raises(TimeoutError, match=r"barrier.* not done after 1 s waiting for rank 1"):
            group.barrier(options).wait()
    dist.barrier()
    dist.destroy_process_group(group)


def test_the_timeout_of_a_barrier_is_that_of_no_other_operation(ranks: Worlds) -> None:
    ranks(2).run(queue_before_barriers)


LARGE = 4_000_000  # elements, whose exchange takes longer than to register a function


def call_from_futures() -> None:
    """Functions of futures call collectives, wait for them, and wait for those that were called before."""
    group, rank = dist.new_group(backend="gradwire"), dist.get_rank()
    first, inner, last = (torch.full((LARGE,), float(rank + each)) for each in range(3))

    def began(tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, group=group, async_op=True)

    def summed_after(done: Any) -> Tensor:
        assert_all(done.value()[0], 1.0)
        dist.broadcast(inner, 0, group=group)
        return began(inner).get_future().then(lambda done: done.value()[0] * 2).wait()

    inside = began(first).get_future().then(summed_after)
    later = began(last)  # runs after what the function calls, on all ranks
    dist.barrier(group)
    assert later.is_completed()
    assert_all(inside.wait(), 4.0)
    assert_all(last, 5.0)

    def awaits(done: Any) -> float:
        waited.wait()
        return float(last[0])

    for tensor in (first, last):
        tensor.fill_(1.0)
    future, waited = began(first).get_future(), began(last)
    assert future.then(awaits).wait() == 2.0

    received, other = torch.zeros(1), torch.zeros(1)
    futures = [dist.irecv(each, group=group, group_src=1 - rank).get_future() for each in (received, other)]  # type: ignore[union-attr]
    both = futures[0].then(lambda done: futures[1].wait()[0] + done.value()[0])
    for each in range(2):
        dist.send(torch.full((1,), float(each + 1)), group=group, group_dst=1 - rank)
    assert both.wait().tolist() == [3.0]
    dist.destroy_process_group(group)


def assert_all(tensor: Tensor, value: float) -> None:
    assert torch.equal(tensor, torch.full_like(tensor, value))


@ON_EVERY_TRANSPORT
def test_functions_of_futures_may_call_collectives_and_wait(ranks: Worlds) -> None:
    ranks(2).run(call_from_futures)


class Layers(nn.Module):
    """Layers, of which the last is unused in every other call."""

    def __init__(self, *, checkpoints: bool | None = None) -> None:
        """checkpoints: use_reentrant of a checkpoint for each layer but the first; None: no checkpoints."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.calls, self.checkpoints = 0, checkpoints

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        first, *others = self.layers[:-1] if self.calls % 2 else self.layers
        x = first(inputs)
        for layer in others:
            x = layer(x) if self.checkpoints is None else checkpoint(layer, x, use_reentrant=self.checkpoints)
        return x  # type: ignore[no-any-return]


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def train_by_ddp(
    backend: str,
    hook: Callable[..., Any] | None = None,
    state: Callable[[dist.ProcessGroup], Any] | None = None,
    *,
    make: Callable[[], nn.Module] = chain,
    accumulates: bool = False,
    joins: bool = False,
    prepare: Callable[[dist.ProcessGroup, nn.Module], object] = lambda group, model: None,
    register: Callable[[DistributedDataParallel], object] = lambda ddp: None,
    steps: int = 6,
    **options: bool,
) -> list[Tensor]:
    """Return the parameters after a few steps by DDP, perhaps with a hook, in several buckets. Over gloo, hooks exchange one
    bucket after the other: the order of its exchanges is another on each rank otherwise."""
    group = dist.new_group(backend=backend)

    def awaited(future: Any) -> Any:
        future.wait()
        return future

    torch.manual_seed(1)
    model = make()
    prepare(group, model)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01, **options)  # type: ignore[arg-type]
    if hook is not None and state is not None:
        one_by_one = lambda state, bucket: awaited(hook(state, bucket))  # noqa: E731  # DDP refuses other annotations
        ddp.register_comm_hook(state(group), hook if backend == "gradwire" else one_by_one)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    register(ddp)
    with ddp.join(enable=joins):
        for step in range(steps + joins * dist.get_rank()):
            torch.manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            if accumulates:
                with ddp.no_sync():
                    ddp(torch.randn(8, 64)).square().mean().backward()
            ddp(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
    if backend != "gloo":  # whose destructor waits, with the GIL, for a thread that may wait for the GIL
        dist.destroy_process_group(group)
    return [parameter.detach() for parameter in model.parameters()]


class Reentrant(nn.Module):
    """Layers in a checkpoint, whose backward() runs inside of another and ends with the last bucket, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = chain(), nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        return self.last(checkpoint(self.inner, inputs, use_reentrant=True))  # type: ignore[no-any-return]


class ReentrantTable(nn.Module):
    """A table with sparse gradients in a checkpoint: the last gradient is one that is not exchanged at the end of backward()."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(16, 64, sparse=True), nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        rows = torch.arange(len(inputs))
        return self.last(checkpoint(lambda x: x + self.table(rows), inputs, use_reentrant=True))  # type: ignore[no-any-return]


def wait_in_backward(group: dist.ProcessGroup, model: nn.Module) -> None:
    """Let a hook in backward() wait for a future, and another hook call a collective."""

    def awaits(gradient: Tensor) -> Tensor:
        work = dist.all_reduce(gradient.clone(), group=group, async_op=True)
        (total,) = work.get_future().then(lambda done: done.value()).wait()
        return total  # type: ignore[no-any-return]

    def calls(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=group)
        return total

    parameters = list(model.parameters())
    parameters[1].register_hook(awaits)
    parameters[0].register_hook(calls)


def train_in_backward(group: dist.ProcessGroup, model: nn.Module) -> None:
    """Let a hook on an accumulated gradient train another model by DDP."""
    other = DistributedDataParallel(chain(), process_group=group, static_graph=True, bucket_cap_mb=0.01)  # type: ignore[arg-type]

    def trains(parameter: Tensor) -> None:
        with torch.enable_grad():
            other(torch.full((8, 64), float(dist.get_rank()))).square().mean().backward()
        mean = next(other.parameters()).grad
        assert parameter.grad is not None
        assert mean is not None
        parameter.grad += mean

    list(model.parameters())[-2].register_post_accumulate_grad_hook(trains)


#: Ways to train by DDP: options of train_by_ddp().
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True, "make": Layers},
    "static": {"static_graph": True, "gradient_as_bucket_view": True},
    "no_sync": {"accumulates": True},
    "join": {"joins": True, "find_unused_parameters": True, "make": Layers},
    "checkpoints": {"make": partial(Layers, checkpoints=False), "find_unused_parameters": True},
    "reentrant": {"make": Reentrant},
    "reentrant, static": {"make": lambda: nn.Sequential(Reentrant(), Reentrant()), "static_graph": True},
    "reentrant, sparse": {"make": ReentrantTable},
    "waits": {"prepare": wait_in_backward},
    "trains": {"prepare": train_in_backward},
}


#: Cores without and with some to spare: DDP's buckets are exchanged at the end of backward(), or beside it.
CORES = {"end": 1.0, "beside": 64.0}


def compare_ddp() -> None:
    for name, options in WAYS.items():
        expected = train_by_ddp("gloo", **options)
        for when, count in CORES.items():
            with patch.object(cores, "available", return_value=count):
                found = train_by_ddp("gradwire", **options)
            assert all(map(torch.equal, found, expected)), (name, when)


@ON_EVERY_TRANSPORT
def test_ddp_has_the_sums_of_gloo(ranks: Worlds) -> None:
    ranks(2).run(compare_ddp)


def in_two_buckets(group: dist.ProcessGroup) -> tuple[DistributedDataParallel, Tensor, Tensor]:
    """Return a model whose gradients are buckets, the weight of the first bucket, and that of the second."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.125)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    for _ in range(2):  # DDP changes its buckets after the first step
        ddp(torch.ones(1, 64)).sum().backward()
        ddp.zero_grad()
    second, first = model.parameters()
    return ddp, first, second


def fail_on_a_rank() -> None:
    """Rank 1 has no core to spare, and its backward() fails before the end. Rank 0 waits in backward() for the first bucket."""
    rank, group = dist.get_rank(), dist.new_group(backend="gradwire")
    with patch.object(cores, "available", return_value=CORES["end" if rank else "beside"]):
        ddp, first, second = in_two_buckets(group)
        before = torch.ones(1)

        def fails(gradient: Tensor) -> None:
            assert first.grad is not None
            if rank == 1:
                before.copy_(first.grad[0, 0])
            while rank == 0 and first.grad[0, 0] != 24.0:  # the mean of 16 and 32, which DDP has divided before the sum
                time.sleep(0.001)
            raise ZeroDivisionError

        hook = second.register_hook(fails)
        with pytest.raises(ZeroDivisionError):
            ddp(torch.full((1, 64), 2.0 * (1 + rank))).sum().backward()
        hook.remove()
        if rank == 1:
            assert before == 16.0  # this rank's half: nothing was exchanged beside backward()
        dist.barrier()
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2.0] * 3
        ddp, first, second = in_two_buckets(group)
        ddp(torch.full((1, 64), 2.0 * (1 + rank))).sum().backward()
        assert first.grad is not None
        assert_all(first.grad, 24.0)
        dist.destroy_process_group(group)


def test_exchanges_begin_when_backward_fails(ranks: Worlds) -> None:
    ranks(2).run(fail_on_a_rank)


def power_sgd(group: dist.ProcessGroup) -> powerSGD.PowerSGDState:
    return powerSGD.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1.0)


HOOKS: dict[str, tuple[Callable[..., Any], Callable[[dist.ProcessGroup], Any]]] = {
    "allreduce": (default_hooks.allreduce_hook, lambda group: group),
    "fp16": (default_hooks.fp16_compress_hook, lambda group: group),
    "PowerSGD": (powerSGD.powerSGD_hook, power_sgd),
    "fp16 in PowerSGD": (default_hooks.fp16_compress_wrapper(powerSGD.powerSGD_hook), power_sgd),
}


def check_quantized(hook: Callable[..., Any], channels: int) -> None:
    """Compare a quantizing hook with its formula. Over gloo, it fails."""
    group = dist.new_group(backend="gradwire")
    gradients = [torch.randn(64, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    model = nn.Linear(64, 64, bias=False)
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(group, hook)
    ddp(torch.eye(64)).backward(gradients[dist.get_rank()].t())
    expected = torch.zeros(64 * 64)
    for gradient in gradients:
        padding = 0 if channels == 1 else 512  # which the hook adds
        rows = nn.functional.pad(gradient.view(-1), (0, padding)).view(channels, -1)
        low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)
        zero = -torch.round(low / scale)
        expected += ((torch.clamp(torch.round(rows / scale) + zero, 0, 255) - zero) * scale).view(-1)[: 64 * 64] / 2
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad.view(-1), expected)
    dist.destroy_process_group(group)


def compare_hooks() -> None:
    for name, (hook, state) in HOOKS.items():
        found, expected = (train_by_ddp(backend, hook, state) for backend in ("gradwire", "gloo"))
        assert all(map(torch.equal, found, expected)), name
    for hook, channels in (
        (quantization_hooks.quantization_pertensor_hook, 1),
        (quantization_hooks.quantization_perchannel_hook, 9),
    ):
        check_quantized(hook, channels)
    group, alone = dist.new_group(backend="gradwire"), dist.new_subgroups(1, backend="gradwire")[0]
    local = post_localSGD.PostLocalSGDState(group, alone, start_localSGD_iter=1)
    bf16 = lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)  # noqa: E731  # DDP refuses it on CPUs
    for hook, state in ((bf16, group), (post_localSGD.post_localSGD_hook, local)):
        model = nn.Linear(12, 1, bias=False)
        ddp = DistributedDataParallel(model, process_group=group)
        ddp.register_comm_hook(state, hook)
        for step in range(2):
            model.zero_grad()
            ddp(numbers(dist.get_rank() + step).view(1, 12)).sum().backward()
            mean = (numbers(step) + numbers(step + 1)) / 2  # halves of small whole numbers, which bfloat16 has
            gradient = numbers(dist.get_rank() + step) if state is local and step == 1 else mean
            assert model.weight.grad is not None
            assert torch.equal(model.weight.grad.view(-1), gradient), hook


def test_the_hooks_of_torch_do_what_they_do_over_gloo(ranks: Worlds) -> None:
    ranks(2).run(compare_hooks)
