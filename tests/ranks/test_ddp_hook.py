"""gradwire.ddp_comm_hook: under torch's DDP, and called as DDP does, with buckets that the test lays out itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, Mismatch, PeerLost
from gradwire.collectives.compression.dense import Int8
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.sparse import DGC, RandomK
from gradwire.collectives.torch_internals import CAN_MOVE_STORAGE, hook_runs_last
from gradwire.trainer.ddp import UNSETTLED_STEPS, CompressionHook
from gradwire.trainer.reducer.compression import NAMES, ErrorFeedback
from tests.harness import is_shared, wait_until, wide, wide_rows
from tests.ranks.test_torch_backend import WAYS, train_by_ddp
from tests.ranks.training import assert_same_on_all_ranks, assert_survived, on_ranks, through_a_file

STEPS = 6
BUCKET_MB = 0.03
"""So that every matrix of the model has a bucket."""


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 65), nn.Tanh(), nn.Linear(65, 64), nn.Linear(64, 3)
    )


def ddp(module: nn.Module, hook: CompressionHook | None, **options: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB, **options)  # type: ignore[arg-type]
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def train(model: nn.Module, steps: range, lr: float = 0.2) -> list[float]:
    """SGD, on data of this rank and step; the losses."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = torch.randn(16, 64, generator=generator)
        model.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :3] * inputs[:, 3:6].sign())
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad  # type: ignore[operator]
        losses.append(loss.item())
    return losses


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class Bucket:
    """What a hook sees of DDP's: gradients side by side in one buffer."""

    def __init__(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], *, index: int = 0, last: bool = True
    ) -> None:
        self._index = index
        self._parameters = list(parameters)
        self._last = last
        self._buffer = torch.cat([gradient.flatten() for gradient in gradients])
        parts = self._buffer.split([parameter.numel() for parameter in parameters])
        self._gradients = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def is_last(self) -> bool:
        return self._last


def exchanged(
    hook: CompressionHook, layout: Sequence[Sequence[Tensor]], gradients: dict[Tensor, Tensor]
) -> list[Tensor]:
    """One backward() of a DDP with such buckets; every gradient's average, in the order of the layout."""
    buckets = [
        Bucket(parameters, [gradients[p] for p in parameters], index=index, last=parameters is layout[-1])
        for index, parameters in enumerate(layout)
    ]
    futures = [hook(None, bucket) for bucket in buckets]
    for bucket, future in zip(buckets, futures, strict=True):
        assert future.wait() is bucket.buffer()
    return [gradient for bucket in buckets for gradient in bucket.gradients()]


PARAMETERS = [torch.empty(shape) for shape in [(70, 60), (50,), (16, 16, 20), (64, 65), (12, 12)]]


def gradients_of(rank: int, step: int) -> dict[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {parameter: torch.randn(parameter.shape, generator=generator) for parameter in PARAMETERS}


def exact(step: int) -> dict[Tensor, Tensor]:
    size = dist.get_world_size()
    everyones = [gradients_of(rank, step) for rank in range(size)]
    return {p: torch.stack([gradients[p] for gradients in everyones]).mean(0) for p in PARAMETERS}


def settle(hook: CompressionHook, layout: Sequence[Sequence[Tensor]]) -> None:
    for _ in range(UNSETTLED_STEPS):
        exchanged(hook, layout, {parameter: torch.zeros(parameter.shape) for parameter in PARAMETERS})


# Under DDP


#: Codecs that the rows below have with other options.
OFTEN = ("none", "fp16", "topk", "int8", "powersgd", "onebit")


@on_ranks(initialized=False)
@pytest.mark.parametrize(
    ("size", "codec", "options"),
    [
        (2, "none", {}),
        (3, "none", {"gradient_as_bucket_view": True}),
        (2, "fp16", {}),
        (1, "topk", {}),
        (2, "int8", {"static_graph": True}),
        (3, "topk", {"find_unused_parameters": True}),
        (2, "powersgd", {"gradient_as_bucket_view": True}),
        (2, "onebit", {"static_graph": True, "gradient_as_bucket_view": True}),
        *wide_rows(*((3, codec, {}) for codec in NAMES if codec not in OFTEN)),
    ],
    ids=str,
)
def test_replicas_are_equal_to_the_bit(codec: str, options: dict[str, Any]) -> None:
    hook = gradwire.ddp_comm_hook(codec)
    model = ddp(model_of(), hook, **options)
    losses = train(model, range(STEPS))
    reference = ddp(model_of(), None, **options)
    expected = train(reference, range(STEPS))
    assert_same_on_all_ranks([weights_of(model)])
    assert losses[: UNSETTLED_STEPS + 1] == pytest.approx(expected[: UNSETTLED_STEPS + 1], rel=1e-2)
    distance = (weights_of(model) - weights_of(reference)).norm() / (weights_of(model) - weights_of(model_of())).norm()
    assert distance < (1e-5 if codec == "none" else 1e-2 if codec in ("fp16", "bf16", "int8") else 2)
    if codec != "none":
        assert distance > 0
    elif CAN_MOVE_STORAGE and "gradient_as_bucket_view" in options:
        assert all(is_shared(parameter.grad) for parameter in model.parameters() if parameter.grad is not None)
    hook.close()
    train(model.module, range(1))  # the gradients' memory outlives the hook


@on_ranks(2, initialized=False)
def test_no_sync() -> None:
    hook = gradwire.ddp_comm_hook("int8")
    model = ddp(model_of(), hook)
    for step in range(4):
        model.zero_grad()
        with model.no_sync():
            model(torch.full((2, 64), 1.0 + step + dist.get_rank())).sum().backward()
        model(torch.ones(2, 64)).sum().backward()
        assert_same_on_all_ranks([p.grad for p in model.parameters()])  # type: ignore[misc]
    hook.close()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "reentrant, sparse"])  # the hook has no sparse gradients
@on_ranks(2, initialized=False)
def test_every_way_of_ddp_while_plans_are_tried(way: str) -> None:
    """In every second turn, buckets are exchanged after backward(), where DDP does not wait for them earlier."""
    made = []

    def register(ddp: DistributedDataParallel) -> None:
        made.append(gradwire.ddp_comm_hook("none", process_group=ddp.process_group))
        ddp.register_comm_hook(None, made[0])

    expected = train_by_ddp("gloo", steps=70, **WAYS[way])
    found = train_by_ddp("gloo", steps=70, register=register, **WAYS[way])
    assert all(map(torch.equal, found, expected))
    assert made[0].exchange_plan is not None
    made[0].close()


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


@on_ranks(2, initialized=False)
def test_a_backward_that_fails_leaves_no_rank_waiting() -> None:
    """It fails on rank 1 only, in each of the first steps, in which both plans are tried. Rank 0 gets the bucket before."""
    for fails_at in (5, 14):
        torch.manual_seed(0)
        first, second = nn.Linear(64, 64), nn.Linear(64, 64)
        ddp = DistributedDataParallel(nn.Sequential(second, first), bucket_cap_mb=0.01)
        hook = gradwire.ddp_comm_hook("none", timeout_s=20.0)
        ddp.register_comm_hook(None, hook)
        for step in range(fails_at + 1):
            ddp.zero_grad()
            loss = ddp(torch.ones(4, 64)).sum()
            if step == fails_at:
                second.weight.register_hook(_fail if dist.get_rank() == 1 else lambda gradient: None)
                if dist.get_rank() == 0:
                    with pytest.raises(CollectiveError):
                        loss.backward()
                else:
                    with pytest.raises(ZeroDivisionError):
                        loss.backward()
                    hook.close()
            else:
                loss.backward()
        if dist.get_rank() == 0:
            hook.close()
        dist.barrier()


@on_ranks(2)
@pytest.mark.wide
def test_a_compiled_training_step() -> None:
    """torch calls the hook and the backend inside of what it compiles."""
    group = dist.new_group(backend="gradwire")
    for compression in (None, "none"):
        found = []
        for step in (train, torch.compile(train, backend="eager")):
            hook = compression and gradwire.ddp_comm_hook(compression, process_group=group)
            model = DistributedDataParallel(
                model_of(), process_group=group
            )  # the compiler asks for buckets of 1 MB or more
            if hook:
                model.register_comm_hook(None, hook)
            for number in range(3):
                step(model, range(number, number + 1))
            found.append(weights_of(model))
            if hook:
                hook.close()
        assert torch.equal(*found)
    dist.destroy_process_group(group)


@on_ranks(2, initialized=False)
def test_join() -> None:
    """Rank 0 has fewer batches; after them, DDP calls its hook with zeros, and outside of any backward()."""
    hook = gradwire.ddp_comm_hook("topk")
    model = ddp(model_of(), hook)
    with Join([model]):
        train(model, range(3 + 40 * dist.get_rank()))  # while plans are tried
    assert_same_on_all_ranks([weights_of(model)])
    hook.close()


@on_ranks(3, initialized=False)
def test_several_models_and_a_group() -> None:
    group = dist.new_group([0, 1])
    hooks = [gradwire.ddp_comm_hook("int8")]
    models = [ddp(model_of(), hooks[0])]
    if dist.get_rank() < 2:
        hooks.append(gradwire.ddp_comm_hook("topk", process_group=group))
        models.append(ddp(model_of(1), hooks[1], process_group=group))
    for step in range(4):
        for model in models:
            train(model, range(step, step + 1))
    for model, members in zip(models, (None, group), strict=False):
        assert_same_on_all_ranks([weights_of(model)], members)
    for hook in reversed(hooks):
        hook.close()


# With the test's own buckets


@pytest.mark.parametrize(
    ("codec", "wanted"), [("int8", 2), (ErrorFeedback("int8", 4), 4), (ErrorFeedback("powersgd", 3), 3)], ids=str
)
@on_ranks(2, initialized=False)
def test_warm_up(codec: Any, wanted: int) -> None:
    hook = gradwire.ddp_comm_hook(codec)
    for step in range(wanted + 1):
        results = exchanged(hook, [PARAMETERS], gradients_of(dist.get_rank(), step))
        expected = exact(step)
        as_it_is = all(torch.allclose(r, expected[p], atol=1e-6) for p, r in zip(PARAMETERS, results, strict=True))
        assert as_it_is == (step < wanted), step
    hook.close()


@on_ranks(2, initialized=False)
@pytest.mark.parametrize(
    "codec",
    ["randomk", DGC(ratio=0.01, ramp_steps=4), PowerSGD(rank=2), Int8(stochastic=True)],
    ids=lambda codec: codec if isinstance(codec, str) else codec.name,
)
def test_hook_and_optimizer_exchange_alike(codec: Any) -> None:
    """To the bit, and with the same in their checkpoints: codecs, DGC's ratio too, count from the end of the warm-up in both.
    The parameter has a buffer of its own in both."""
    compression = ErrorFeedback(codec, warmup_steps=UNSETTLED_STEPS)
    gradwire.init()
    weight = nn.Parameter(torch.zeros(80, 64))
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=compression)
    hook = gradwire.ddp_comm_hook(compression)
    for step in range(UNSETTLED_STEPS + 5):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        [result] = exchanged(hook, [[weight]], {weight: gradient})
        assert weight.grad is not None
        assert torch.equal(weight.grad, result), step
        optimizer.step()
    saved, ours = hook.state_dict(), optimizer.state_dict()["gradwire"]
    assert saved["step"] == ours["step"]
    assert saved["parameters"] == [(name, list(shape)) for name, shape in ours["parameters"]]
    [mine], [theirs] = saved["buckets"], ours["buckets"]
    tensors, expected = mine.pop("tensors"), theirs.pop("tensors")
    assert mine == theirs
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    hook.close()
    optimizer.close()
    gradwire.shutdown()


@pytest.mark.parametrize(("name", "tolerance"), [("fp16", 2**-9), ("bf16", 2**-6)])
@on_ranks(2, *wide(3), initialized=False)
def test_16_bits_are_the_same_everywhere_and_do_not_overflow(name: str, tolerance: float) -> None:
    """Gradients whose sum half precision cannot hold, by every way that there is to exchange them as 16 bits."""
    gradwire.init()
    size, rank = dist.get_world_size(), dist.get_rank()
    everyones = [60000 - torch.randint(5000, (80, 64), generator=torch.Generator().manual_seed(r)) for r in range(size)]
    mine = everyones[rank].float()
    for op in (gradwire.Average, gradwire.Sum):
        exact = torch.stack(everyones).double().sum(0) / (size if op == gradwire.Average else 1)
        weight = nn.Parameter(torch.zeros(80, 64))
        sgd, predivide = torch.optim.SGD([weight], lr=1.0), 2.0 if op == gradwire.Average else 1.0
        optimizer = gradwire.DistributedOptimizer(sgd, compression=name, op=op, gradient_predivide_factor=predivide)
        (weight * mine).sum().backward()
        assert weight.grad is not None
        results = [weight.grad, gradwire.allreduce(mine, compression=getattr(gradwire.Compression, name), op=op)]
        with Communicator() as comm:
            results.append(mine.clone())
            comm.allreduce(results[-1], op, compression=name)
        if op == gradwire.Average:
            hook = gradwire.ddp_comm_hook(name)
            results += exchanged(hook, [[weight]], {weight: mine})
            hook.close()
        assert (weight.grad / exact - 1).abs().max() < tolerance
        assert all(torch.equal(result, weight.grad) for result in results)
        rows = gradwire.reducescatter(mine, compression=getattr(gradwire.Compression, name), op=op)
        start = sum(80 // size + (r < 80 % size) for r in range(rank))
        assert (rows / exact[start : start + len(rows)] - 1).abs().max() < tolerance
        optimizer.close()
    gradwire.shutdown()


@on_ranks(2, initialized=False)
@pytest.mark.parametrize(
    ("policy", "compressed"),
    [
        ({"last.*": "none"}, ["first"]),
        ({"last.matrix": "powersgd", "first": "int8"}, ["first", "last.cube", "last.matrix"]),
        ({"vector": "bf16", "small": "int4", "*": "none"}, ["vector", "small"]),
        ({"*": "bf16"}, ["first", "vector", "last.cube", "last.matrix", "small"]),
    ],
    ids=str,
)
def test_a_policy_by_name(policy: dict[str, Any], compressed: list[str]) -> None:
    names = ["first", "vector", "last.cube", "last.matrix", "small"]
    hook = gradwire.ddp_comm_hook("topk", zip(names, PARAMETERS, strict=True), policy=policy)
    layout = [PARAMETERS[:3], PARAMETERS[3:]]
    settle(hook, layout)
    results = dict(zip(names, exchanged(hook, layout, gradients_of(dist.get_rank(), 0)), strict=True))
    expected = dict(zip(names, exact(0).values(), strict=True))
    assert {name for name in names if not torch.allclose(results[name], expected[name], atol=1e-6)} == set(compressed)
    assert_same_on_all_ranks(results.values())
    hook.close()


@on_ranks(2, initialized=False)
def test_a_parameter_without_a_name_is_refused() -> None:
    hook = gradwire.ddp_comm_hook("topk", [("first", PARAMETERS[0])])
    with pytest.raises(ValueError, match=r"rank \d: named_parameters must name all .* of shape \[50\] is not named"):
        exchanged(hook, [PARAMETERS[:2]], gradients_of(0, 0))
    hook.close()


@pytest.mark.parametrize(
    "codec",
    [ErrorFeedback("int4"), "onebit", "topk", ErrorFeedback(RandomK(ratio=0.1)), PowerSGD(rank=2)],
    ids=lambda codec: codec if isinstance(codec, str) else type(codec).__name__,
)
@on_ranks(2, initialized=False)
def test_other_buckets_lose_nothing(codec: Any) -> None:
    """Buckets change, and at the end again, so that all that is outstanding comes out: the sum of the results is that of
    the averages."""
    a, vector, b, c, small = PARAMETERS
    first, second, third = [PARAMETERS], [[c, small, vector], [a, b]], [[b, c, vector], [a, small]]
    layouts = [first] + [second] * 4 + [third] * 4 + [second]
    hook = gradwire.ddp_comm_hook(codec)
    missing = {parameter: torch.zeros(parameter.shape, dtype=torch.float64) for parameter in PARAMETERS}
    for step, layout in enumerate(layouts):
        results = exchanged(hook, layout, gradients_of(dist.get_rank(), step))
        order = [parameter for parameters in layout for parameter in parameters]
        expected = exact(step)
        for parameter, result in zip(order, results, strict=True):
            missing[parameter] += expected[parameter].double() - result
        uncompressed = step < UNSETTLED_STEPS or layout is not layouts[step - 1]
        assert (max(each.abs().max() for each in missing.values()) < 1e-4) == uncompressed, step
    hook.close()


# State


@on_ranks(2, initialized=False)
@pytest.mark.parametrize(
    ("codec", "at", "options"),
    [
        ("onebit", 4, {}),
        ("topk", 3, {"static_graph": True}),
        ("dgc", 4, {}),
        ("powersgd", 4, {"find_unused_parameters": True}),
        (ErrorFeedback(Int8(stochastic=True)), 4, {}),
        pytest.param("qsgd", 4, {}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_same_to_the_bit(codec: Any, at: int, options: dict[str, Any]) -> None:
    steps = 7
    hook = gradwire.ddp_comm_hook(codec)
    model = ddp(model_of(), hook, **options)
    losses = train(model, range(at))
    saved = through_a_file({"model": model.module.state_dict(), "hook": hook.state_dict()})
    losses += train(model, range(at, steps))
    weights = weights_of(model)

    again_hook = gradwire.ddp_comm_hook(codec)
    again_hook.load_state_dict(saved["hook"])
    again = ddp(model_of(1), again_hook, **options)
    again.module.load_state_dict(saved["model"])
    assert train(again, range(at, steps)) == losses[at:]
    assert torch.equal(weights_of(again), weights)
    again_hook.close()
    hook.load_state_dict(saved["hook"])  # and into one that is in use
    model.module.load_state_dict(saved["model"])
    assert train(model, range(at, steps)) == losses[at:]
    hook.close()


@on_ranks(2, initialized=False)
def test_states_of_something_else_are_refused() -> None:
    hook = gradwire.ddp_comm_hook("topk")
    model = ddp(model_of(), hook)
    train(model, range(3))
    state = hook.state_dict()
    rank = dist.get_rank()
    for key, value in (("world_size", 5), ("rank", 1 - rank), ("version", 0)):
        with pytest.raises(ValueError, match=key):
            hook.load_state_dict({**state, key: value})
    with pytest.raises(ValueError, match=r"topk.*int8"):
        gradwire.ddp_comm_hook("int8").load_state_dict(state)
    other = gradwire.ddp_comm_hook("topk")
    other.load_state_dict(state)
    assert other.state_dict() == state
    wrong = ddp(nn.Linear(64, 100), other)
    with pytest.raises(ValueError, match="another model"):
        wrong(torch.ones(1, 64)).sum().backward()
    other.close()
    name, shape = state["parameters"][0]
    with pytest.raises(ValueError, match="another model"):
        hook.load_state_dict({**state, "parameters": [(f"not {name}", shape), *state["parameters"][1:]]})
    assert hook.state_dict() == state
    hook.close()


# Errors


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="onebit"):
        gradwire.ddp_comm_hook("int9")
    with pytest.raises(ValueError, match="needs named_parameters"):
        gradwire.ddp_comm_hook("int8", policy={"*": "none"})
    with pytest.raises(ValueError, match="no parameter's name matches"):
        gradwire.ddp_comm_hook("int8", [("weight", PARAMETERS[0])], policy={"bias": "none"})


def test_a_deleted_hook_leaves_nothing() -> None:
    """The parameters have no hooks of it, and its thread ends."""
    parameter, threads = nn.Parameter(torch.ones(1)), threading.active_count()
    mine = parameter.register_post_accumulate_grad_hook(lambda _: None)
    hook = gradwire.ddp_comm_hook("int8", [("weight", parameter)])
    hook.weigh(1)
    assert not hook_runs_last(parameter, mine)
    del hook
    assert hook_runs_last(parameter, mine)
    wait_until(lambda: threading.active_count() <= threads)


def stays_away(codec: Any, error: type[Exception]) -> None:
    """The last rank does not come to the fourth step; backward() says so on the others, with the error of the exchange."""
    hook = gradwire.ddp_comm_hook(codec, timeout_s=2.0)
    model = ddp(model_of(), hook)
    train(model, range(3))
    if dist.get_rank() < dist.get_world_size() - 1:
        started = time.monotonic()
        with pytest.raises(error, match=r"rank \d") as raised:
            train(model, range(3, 4))
        assert isinstance(raised.value, CollectiveError)
        assert time.monotonic() - started < 20
    hook.close()
    with pytest.raises(RuntimeError, match="after its close"):
        exchanged(hook, [PARAMETERS], gradients_of(0, 0))


@pytest.mark.parametrize("codec", ["int8", "powersgd"])
def test_a_rank_that_stays_away(failing_world: Callable[[int], Any], codec: str) -> None:
    world = failing_world(2)
    world.start(stays_away, codec, (CollectiveTimeout, PeerLost))
    assert_survived(world, [1])


def disagrees() -> None:
    hook = gradwire.ddp_comm_hook("int8" if dist.get_rank() == 0 else "int4", timeout_s=2.0)
    model = ddp(model_of(), hook)
    with pytest.raises(Mismatch, match="int4"):
        train(model, range(4))
    hook.close()


def test_ranks_with_different_codecs(failing_world: Callable[[int], Any]) -> None:
    failing_world(2).run(disagrees)
