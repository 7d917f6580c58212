"""Gradients that several streams of a simulated GPU write (tests/simulated_gpu), and sparse ones that a rank learns of later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives.torch_internals import when_backward_ends
from gradwire.trainer.reducer import bucket
from gradwire.trainer.reducer.streams import Background, WritingStreams
from gradwire.trainer.rules.next_forward import DeferredSteps
from tests.harness import Worlds
from tests.ranks.training import assert_equal, copies, in_world
from tests.simulated_gpu import check, install, reports

STEPS, WIDTH = 4, 80


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Worlds with simulated GPUs, whose ranks exchange CUDA tensors over NCCL."""
    worlds = Worlds(tmp_path_factory.mktemp("gpus"), {}, partial(install, nccl=True))
    yield worlds
    worlds.close()


class OnStream(torch.autograd.Function):
    """Lets what comes before it in the forward have its backward on a stream, as autograd does by the stream of the forward; the
    simulated GPU does not. after: the stream of what comes after it."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, stream: Any, after: Any) -> Tensor:
        ctx.streams = stream, after
        return made.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        stream, after = ctx.streams
        torch.cuda.set_stream(stream)
        if stream is not after:
            stream.wait_stream(after)
            gradient.record_stream(stream)
        return gradient, None, None


class Assigned(torch.autograd.Function):
    """Multiplies by a weight, and gives it its gradient as fully_shard does: on a stream of its own, which the caller's stream
    follows when backward() ends, with its hooks called by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, side: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.side = weight, side
        return x @ weight.detach().t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,), weight, main, side = ctx.saved_tensors, ctx.weight, torch.cuda.current_stream(), ctx.side
        if side is not None:
            when_backward_ends(lambda: main.wait_stream(side))
            side.wait_stream(main)
            for tensor in (x, gradient):
                tensor.record_stream(side)
        with nullcontext() if side is None else torch.cuda.stream(side):
            weight.grad = gradient.t() @ x
            for hook in weight._post_accumulate_grad_hooks.values():
                hook(weight)
        return gradient @ weight.detach(), None, None


class Branches(nn.Module):
    """Two layers that a GPU computes on two streams, and one after both. spare: whether there is a fourth layer. assigned:
    whether the last one is Assigned."""

    def __init__(self, *, spare: bool, assigned: bool) -> None:
        super().__init__()
        self.assigned = assigned
        torch.manual_seed(0)
        self.near, self.far, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.spare = nn.Linear(WIDTH, WIDTH) if spare else None
        self.side: Any = None

    def forward(self, x: Tensor, *, spare: bool = False) -> Tensor:
        if not x.is_cuda:
            both = self.near(x) + self.far(x)
        else:
            main, self.side = torch.cuda.current_stream(), self.side or torch.cuda.Stream()
            self.side.wait_stream(main)
            near = OnStream.apply(self.near(x), main, main)
            with torch.cuda.stream(self.side):
                far = OnStream.apply(self.far(x), self.side, main)
            main.wait_stream(self.side)
            for tensor, stream in ((far, main), (x, self.side)):
                tensor.record_stream(stream)
            both = near + far
        out = Assigned.apply(both, self.last.weight, self.side) + self.last.bias if self.assigned else self.last(both)
        return (out if self.spare is None or not spare else out + self.spare(x)).square().mean()


WAYS: dict[str, dict[str, Any]] = {
    "dense": {},
    "int8": {"compression": "int8"},
    "next forward": {"rule": hvd.rules.NextForward},
    "sharded": {"rule": hvd.rules.Sharded()},
    "absent": {},
    "in parts": {"backward_passes_per_step": 2},
    "assigned": {},
}


def trained(way: str, device: str, wrong: AbstractContextManager[Any]) -> list[Tensor]:
    """Train, on a stream of this test's own; with "absent", ranks lack the gradient of a layer in turns."""
    reports()
    main = torch.cuda.Stream()
    torch.cuda.set_stream(main)
    model, options = Branches(spare=way == "absent", assigned=way == "assigned").to(device), dict(WAYS[way])
    if way == "next forward":
        options["rule"] = hvd.rules.NextForward(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=False)
    with wrong:
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), bucket_bytes=1 << 20, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(optimizer.backward_passes_per_step):
                drawn = torch.Generator().manual_seed(100 * step + 10 * part + hvd.rank())
                x = torch.randn(4, WIDTH, generator=drawn).to(device)
                model(x, spare=(step + hvd.rank()) % 2 == 0).backward()
                torch.cuda.set_stream(main)
                if model.side is not None:
                    main.wait_stream(model.side)  # as autograd does
            optimizer.step()
        optimizer.close()
    weights = [weight.cpu() for weight in copies(model.parameters())]
    torch.cuda.set_stream(torch.cuda.default_stream())
    return weights


@in_world
def compared(way: str) -> None:
    expected = trained(way, "cpu", nullcontext())
    found = trained(way, "cuda", nullcontext())
    check()
    assert_equal(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_two_streams(gpus: Worlds, way: str) -> None:
    gpus(2).run(compared, way)


#: Wrong orders, each with a way that must show it.
SEEDS: dict[str, tuple[str, Any, str, Any]] = {
    "a launch waits for no other stream": ("dense", WritingStreams, "join", lambda self: None),
    "a launch does not wait for the stream of an assigned gradient": (
        "assigned",
        WritingStreams,
        "join",
        lambda self: None,
    ),
    "memory of other streams is not kept": ("int8", bucket, "keep_for", lambda stream, tensors: None),
    "a forward follows no update": ("next forward", DeferredSteps, "_follow_updates", lambda self, module: None),
    "a thread runs on its own streams": ("absent", Background, "streams", lambda self, devices: []),
}


@in_world
def seeded(seed: str) -> set[str]:
    way, holder, name, wrong = SEEDS[seed]
    trained(way, "cuda", patch.object(holder, name, wrong))
    return {each.kind for each in reports()}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_order_is_found(gpus: Worlds, seed: str) -> None:
    for kinds in gpus(2).run(seeded, seed):
        assert kinds & {"order", "freed"}


LATE: dict[str, dict[str, Any]] = {
    "the next step": {},
    "int8": {"compression": "int8"},
    "sum": {"op": hvd.Sum},
    "close": {},
    "state_dict": {},
}


@in_world
def refused(way: str) -> None:
    """On rank 1 the gradient is sparse. Rank 0, where it is dense, has taken its step before it learns that."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(64, 64, device="cuda"))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), **LATE[way])
    for _ in range(2):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"dense on rank 0.*sparse_as_dense"):  # noqa: PT012
        if hvd.rank() == 1:
            weight.grad = torch.ones(64, 64, device="cuda").to_sparse(1)
        else:
            weight.sum().backward()
        optimizer.step()
        if way == "state_dict":
            optimizer.state_dict()
        elif way == "close":
            optimizer.close()
        else:
            optimizer.zero_grad()
            weight.sum().backward()
    optimizer.close()
    dist.barrier()


@pytest.mark.parametrize("way", LATE)
def test_a_gradient_that_is_sparse_on_another_rank(gpus: Worlds, way: str) -> None:
    gpus(2).run(refused, way)


@in_world
def captured() -> None:
    """A graph cannot contain an exchange. What follows the capture is as if it had not been tried."""
    weight = nn.Parameter(torch.ones(8, 8, device="cuda"))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5))
    for _ in range(3):
        with patch.object(torch.cuda, "is_current_stream_capturing", lambda: True), pytest.raises(RuntimeError):
            weight.sum().backward()
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    optimizer.close()
    assert torch.equal(weight.detach().cpu(), torch.full((8, 8), -0.5))


def test_no_graph_contains_an_exchange(gpus: Worlds) -> None:
    gpus(2).run(captured)


@in_world
def timed() -> list[float]:
    """Return the seconds of exchanges that on_step was given."""
    weight = nn.Parameter(torch.ones(64, 64, device="cuda"))
    found: list[Any] = []
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), on_step=found.append)
    for _ in range(6):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
    optimizer.close()
    return [each.exchange_s for each in found if each.exchange_s is not None]


def test_the_gpu_times_its_exchanges(gpus: Worlds) -> None:
    """They are known when the simulated GPU, which answers late, has said that the exchange is done."""
    for seconds in gpus(2).run(timed):
        assert seconds
        assert all(each > 0 for each in seconds)
