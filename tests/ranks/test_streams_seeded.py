"""Wrong orders that are seeded in the paths of test_streams.py, a line each: the simulated GPU finds them all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch

import gradwire as hvd
from tests.harness import Worlds
from tests.ranks import test_streams as paths
from tests.simulated_gpu import reports
from tests.simulated_gpu.seeds import Seed, first, instead, on_default_stream, shared, without

gpus = paths.gpus

NCCL, HOST = "nccl", "host"


def verbs() -> None:
    """Call some verbs on a stream that has just made their tensors, twice; read the results on another one."""
    side, reader = torch.cuda.Stream(), torch.cuda.Stream()
    with paths.communicator() as comm:
        for step in (0, paths.FIRST):
            with torch.cuda.stream(side):
                tensors = [paths.numbers(comm.rank, 700, "cuda") for _ in range(4)]
                everyone = tensors[0].repeat(comm.size)
                calls = [
                    partial(comm.allreduce, tensors[1], "average"),
                    partial(comm.allreduce, tensors[2], compression="int8"),
                    partial(comm.allgather, everyone, tensors[0]),
                    partial(comm.allreduce, tensors[3]),
                ]
                with paths.without_waits("cuda", step, earlier=True):
                    works = [call(async_op=True) for call in calls]
            with torch.cuda.stream(reader):
                for work in works:
                    work.wait()
                for tensor in (*tensors, everyone):
                    tensor.record_stream(reader)
                    tensor.sum()
            side.wait_stream(reader)


def two_communicators() -> None:
    """Run two operations beside each other."""
    with paths.communicator() as one, paths.communicator() as other:
        tensors = [paths.numbers(0, 700, "cuda") for _ in range(2)]
        works = [
            comm.allreduce(tensor, compression="int8", async_op=True)
            for comm, tensor in zip((one, other), tensors, strict=True)
        ]
        for work in works:
            work.wait()


def messages() -> None:
    paths.messages("cuda")


def beside(path: Callable[..., object], *args: Any, **options: Any) -> None:
    """Run a path on another stream than the default one."""
    with torch.cuda.stream(torch.cuda.Stream()):
        path(["cuda"], *args, **options)


def dropped_tensors() -> None:
    """Begin operations on tensors that are deleted at once."""
    with paths.communicator() as comm:
        codecs = None, "int8", "int8"
        works = [comm.allreduce(paths.numbers(0, 50, "cuda"), compression=codec, async_op=True) for codec in codecs]
        for work in works:
            work.wait()


class Back(torch.autograd.Function):
    """Returns its input; in backward, the default stream is the current one from then on."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_stream(torch.cuda.default_stream())
        return gradient.clone()


def gradients_of_streams() -> None:
    """Exchange gradients that two streams have written, as fully_shard does."""
    first, second = (torch.nn.Parameter(torch.ones(50, device="cuda")) for _ in range(2))
    side = torch.cuda.Stream()

    def reduce(weight: Any) -> None:
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(side)
        weight.grad.mul_(2)

    first.register_post_accumulate_grad_hook(reduce)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], 0.5), [("first", first), ("second", second)])
    for _ in range(3):
        optimizer.zero_grad()
        (Back.apply(second * 2) + first * 2).sum().backward()
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.close()


STEPS = partial(beside, paths.with_optimizer)
CODED = partial(STEPS, compression="int8")
FORWARD = partial(STEPS, rule=hvd.rules.NextForward)
SHARDED = partial(STEPS, rule=hvd.rules.Sharded())
HOOK = partial(beside, paths.with_hook, codec="int8")
ENGINE, COPIES, CROSSED = (
    "collectives.engine.streams",
    "collectives.engine.host_copies",
    "collectives.transports.crossing",
)
BUCKET, NEXT = "trainer.reducer.bucket Bucket", "trainer.rules.next_forward DeferredSteps"


def waits_too() -> None:
    torch.cuda.current_stream().synchronize()


def reads_a_number() -> None:
    torch.ones(1, device="cuda").item()


def copies_a_number() -> None:
    torch.tensor([1.0], device="cuda")


def copies_back(own: Callable[..., Any]) -> Callable[..., Any]:
    """Change HostCopies.copy_out(): it copies in the other direction."""
    return lambda self: self.copy_back()


def does_nothing(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *given: None


def blocks(own: Callable[..., Any]) -> Callable[..., Any]:
    """Change the wait for messages of NCCL: it waits as torch does by itself."""
    return lambda self, deadline: self.work.wait()


#: How the names of rows end that have the seed of another row, over the host.
ALIKE = ", host"
#: What is wrong, how CUDA tensors travel, what runs, and what makes it wrong.
SEEDS: list[tuple[str, str, Callable[[], None], Seed]] = [
    # The engine
    ("no wait for the producer", NCCL, verbs, without("wait_event", "streams.py _within")),
    ("no wait for the producer, host", HOST, verbs, without("wait_event", "streams.py _within")),
    ("no event of the producer", NCCL, verbs, without("record", "streams.py __init__")),
    ("the consumer does not wait", NCCL, verbs, without("wait_event", "streams.py order")),
    ("the consumer does not wait, host", HOST, verbs, without("wait_event", "streams.py order")),
    ("the optimizer does not wait", NCCL, STEPS, without("wait_event", "streams.py order")),
    ("no event of the end", NCCL, verbs, without("record", "streams.py _within")),
    ("on the stream of the caller", NCCL, verbs, without("stream", "streams.py _within")),
    ("tensors are not kept", NCCL, dropped_tensors, without("record_stream", "streams.py uses")),
    ("tensors are not kept, host", HOST, dropped_tensors, without("record_stream", "streams.py uses")),
    (
        "codes on another stream",
        NCCL,
        CODED,
        instead("collectives.transports.codes CodedNumbers.work", on_default_stream),
    ),
    (
        "scratch of another Communicator",
        NCCL,
        two_communicators,
        instead("collectives.transports.loop Scratch.take", shared),
    ),
    ("divided on another stream", NCCL, verbs, instead("collectives.transports.native finish", on_default_stream)),
    # Copies through the memory of the host
    ("copied before it is computed", HOST, verbs, without("wait_stream", "host_copies.py copy_out")),
    ("copied on the wrong stream", HOST, verbs, without("stream", "host_copies.py copy_out")),
    ("no event of a copy", HOST, verbs, without("record", "host_copies.py copy_out")),
    ("sent before it is copied", HOST, verbs, instead(f"{COPIES} HostCopies.await_out", does_nothing)),
    ("copied back on another stream", HOST, verbs, instead(f"{COPIES} HostCopies.copy_back", on_default_stream)),
    ("copied back before the exchange", HOST, verbs, instead(f"{COPIES} HostCopies.copy_out", copies_back)),
    ("codes copied before they are made", HOST, CODED, without("wait_stream", "crossing.py stage")),
    ("codes sent before they are copied", HOST, CODED, instead(f"{CROSSED} Crossed.before_post", does_nothing)),
    ("codes copied on the wrong stream", HOST, CODED, without("stream", "crossing.py stage")),
    ("no event of the codes", HOST, CODED, without("record", "crossing.py stage")),
    (
        "decoded on another stream",
        HOST,
        CODED,
        instead("collectives.transports.codes CodedNumbers.work", on_default_stream),
    ),
    ("codes arrive on another stream", HOST, CODED, instead(f"{CROSSED} Crossed.arrived", on_default_stream)),
    # Waits of the host
    ("the issue synchronizes", NCCL, verbs, instead(f"{ENGINE} DeviceOperation.uses", first(waits_too))),
    ("the issue synchronizes, host", HOST, verbs, instead(f"{ENGINE} DeviceOperation.uses", first(waits_too))),
    ("the end synchronizes", NCCL, STEPS, instead(f"{ENGINE} DeviceOperation.order", first(waits_too))),
    ("a number is read", NCCL, STEPS, instead(f"{BUCKET}.launch", first(reads_a_number))),
    ("a number is copied", NCCL, CODED, instead(f"{BUCKET}.finalize", first(copies_a_number))),
    ("messages block", NCCL, messages, instead("collectives.transports.nccl _Enqueued.wait", blocks)),
    # The trainer
    ("gradients of another stream", NCCL, gradients_of_streams, without("wait_stream", "streams.py join")),
    ("presence is read early", NCCL, STEPS, without("synchronize", "presence.py end")),
    ("no event of the presence", NCCL, STEPS, without("record", "presence.py begin")),
    ("the hook does not wait for DDP", NCCL, HOOK, without("wait_stream", "streams.py streams")),
    ("updated on another stream", NCCL, FORWARD, instead(f"{NEXT}._update", on_default_stream)),
    (
        "gathered on another stream",
        NCCL,
        SHARDED,
        instead("trainer.reducer.shards.gather ShardGather.gather", on_default_stream),
    ),
]


def found(path: Callable[[], None], seed: Seed) -> list[str]:
    """Return what is found in a path, with the kind first."""
    paths.STEPS, paths.FIRST = 4, 3
    hvd.init()
    reports()
    try:
        with suppress(AssertionError, RuntimeError), seed():  # what a wrong order makes of it
            path()
        torch.cuda.synchronize()
        return list(map(str, reports()))
    finally:
        hvd.shutdown()


def found_in(name: str) -> list[str]:
    return found(*next((path, seed) for each, _, path, seed in SEEDS if each == name))


@pytest.mark.parametrize(
    ("gpus", "name"),
    [pytest.param(how, name, marks=[pytest.mark.wide] if name.endswith(ALIKE) else []) for name, how, _, _ in SEEDS],
    indirect=["gpus"],
)
def test_is_found(gpus: Worlds, name: str) -> None:
    assert all(gpus(2).run(found_in, name))


def found_in_paths() -> list[str]:
    return [each for path in dict.fromkeys(path for _, _, path, _ in SEEDS) for each in found(path, nullcontext)]


def test_nothing_is_found_in_the_same_paths(gpus: Worlds) -> None:
    assert gpus(2).run(found_in_paths) == [[], []]
