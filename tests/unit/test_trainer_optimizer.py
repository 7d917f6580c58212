"""DistributedOptimizer and the verbs in a world of one, which takes no processes; and what is refused."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.collectives.errors import CollectiveError
from gradwire.trainer.world.joined import World
from gradwire.trainer.world.world import current_world
from tests.ranks.training import assert_equal, batch, buckets_of, copies, loss_of, perceptron

pytestmark = pytest.mark.usefixtures("alone")

WEIGHT = nn.Parameter(torch.zeros(2))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "fused adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, fused=True),
}


def test_verbs_are_identities() -> None:
    tensor = torch.arange(6.0).view(3, 2)
    for result in (
        hvd.allreduce(tensor),
        hvd.allgather(tensor),
        hvd.broadcast(tensor, 0),
        hvd.reducescatter(tensor),
        hvd.alltoall(tensor),
    ):
        assert torch.equal(result, tensor)  # type: ignore[arg-type]
        assert result is not tensor
    assert hvd.broadcast_object("x") == "x"
    assert hvd.allgather_object("x") == ["x"]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_without_the_wrapper(name: str, scaled: bool) -> None:
    """Through GradScaler too, to which the fused optimizers are something special."""
    weights = []
    for wrap in (False, True):
        model = perceptron()
        optimizer = OPTIMIZERS[name](model)
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), bucket_bytes=100)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=64.0)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch(step))).backward()
            scaler.step(optimizer)
            scaler.update()
        weights.append(copies(model.parameters()))
    assert_equal(*weights)


@pytest.mark.parametrize(
    ("options", "megabytes"),
    [
        ({}, (2, 4, 4)),
        ({"compression": "fp16"}, (2, 4, 4)),
        ({"compression": "int8"}, (2, 8)),
        ({"compression": "int8", "rule": hvd.rules.NextForward}, (2, 4, 4)),
        ({"compression": "int8", "bucket_bytes": 6 << 20}, (2, 6, 2)),
    ],
)
def test_buckets_are_small_unless_a_codec_encodes_them(options: dict[str, Any], megabytes: tuple[int, ...]) -> None:
    """Five gradients of 2 MB: the first bucket is full with one of them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1 << 10, 1 << 9, bias=False) for _ in range(5)))
    model.forward = lambda x: sum(layer(x) for layer in model)  # type: ignore[method-assign, operator, assignment]
    if "rule" in options:
        options = {**options, "rule": hvd.rules.NextForward(model)}
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    model(torch.ones(1, 1 << 10)).sum().backward()
    optimizer.settle()
    found = [sum(model.get_parameter(name).nbytes for name in bucket) >> 20 for bucket in buckets_of(model).values()]
    optimizer.close()
    assert sorted(found) == sorted(megabytes)


def test_it_is_the_wrapped_optimizer() -> None:
    inner = sgd(perceptron())
    optimizer = hvd.DistributedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.optimizer is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.load_state_dict(inner.state_dict())
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert repr(optimizer) == f"DistributedOptimizer({inner!r})"
    inner.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(optimizer.param_groups) == 2


def test_a_parameter_is_in_one_group() -> None:
    model = perceptron()
    with pytest.raises(ValueError, match=r"a parameter of shape \[16, 6\] is in groups\[0\] and in groups\[1\]"):
        hvd.DistributedOptimizer(sgd(model), groups=[[model[0].weight], [model[0].bias, model[0].weight]])


def test_a_scheduler_that_was_made_before_the_wrapper_sees_steps_and_sets_rates() -> None:
    model = perceptron()
    inner = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.025


def test_models_can_be_copied_and_saved_while_wrapped() -> None:
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    loss_of(model, batch(0)).backward()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        other.zero_grad()
        loss_of(other, batch(0)).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: save its state_dict\(\)"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(optimizer)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_without_any_gradient(frozen: bool) -> None:
    model = perceptron().requires_grad_(not frozen)
    before = copies(model.parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), weight_decay=0.5))
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    assert_equal(before, model.parameters())


def test_named_parameters_may_cover_more_than_the_optimizer() -> None:
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1), model.named_parameters()
    )
    optimizer.add_param_group({"params": list(model[0].parameters())})
    loss_of(model, batch(0)).backward()
    assert {*optimizer.names} == {name for name, _ in model.named_parameters()}


ONE, OTHER = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"optimizer": "sgd"}, TypeError),
        ({"compression": "fp17"}, ValueError),
        ({"backward_passes_per_step": 0}, ValueError),
        ({"backward_passes_per_step": 1.5}, ValueError),
        ({"op": "max"}, ValueError),
        ({"num_groups": -1}, ValueError),
        ({"num_groups": True}, ValueError),
        *(({"groups": groups}, ValueError) for groups in ("all", [WEIGHT], [[WEIGHT]], [["0.weight"]])),
        ({"gradient_predivide_factor": 0.0}, ValueError),
        ({"gradient_predivide_factor": float("inf")}, ValueError),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, ValueError),
        ({"bucket_bytes": 0}, ValueError),
        ({"rule": "local"}, TypeError),
        ({"shards": True}, TypeError),
        ({"named_parameters": [ONE]}, ValueError),
        ({"named_parameters": [("a", ONE), ("a", OTHER)]}, ValueError),
        ({"named_parameters": []}, ValueError),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception]) -> None:
    """Each names an argument, or what was given."""
    with pytest.raises(error, match="|".join([*options, "'fp17'"])):
        hvd.DistributedOptimizer(**{"optimizer": sgd(perceptron())} | options)


@pytest.mark.parametrize(
    ("former", "rule"),
    [
        ({"shard_states": True}, "Sharded"),
        ({"parameter_compression": "int8"}, "Sharded"),
        ({"overlap": "next_forward"}, "NextForward"),
        ({"model": None}, "NextForward"),
    ],
)
def test_former_arguments_are_refused_with_the_rule_that_takes_their_place(former: dict[str, Any], rule: str) -> None:
    with pytest.raises(TypeError, match=rule):
        hvd.DistributedOptimizer(sgd(perceptron()), **former)


@pytest.mark.parametrize(
    "place",
    [
        "rules.LocalUpdates",
        "rules.Rule",
        "servers.KVStore",
        "optimizers.LAMB",
        "reports.StepMetrics",
        "elastic.ElasticSampler",
    ],
)
def test_former_names_are_refused_with_what_takes_their_place(place: str) -> None:
    module, _, name = place.partition(".")
    with pytest.raises(AttributeError, match=place):
        getattr(hvd, name)
    assert hasattr(getattr(hvd, module), name)


def test_refusal_of_a_wrapper_and_of_dtypes() -> None:
    optimizer = hvd.DistributedOptimizer(sgd(perceptron()))
    with pytest.raises(TypeError, match="is a DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer)
    weight = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    inner = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 'w' has dtype torch\.complex64; gradients can be exchanged"):
        hvd.DistributedOptimizer(inner, [("w", weight)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_a_frozen_parameter_may_have_any_dtype(dtype: torch.dtype) -> None:
    """As buffers that were registered as parameters have; until it is thawed, which torch allows for complex numbers."""
    frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
    weight = nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, frozen], lr=0.5), compression="int8", groups=2)
    added = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
    optimizer.add_param_group({"params": [added]})
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [0.5] * 3
    assert frozen.tolist() == [1] * 3
    if dtype.is_complex:
        frozen.requires_grad_()
        with pytest.raises(ValueError, match=r"rank 0: parameter 'parameter 1' has dtype torch\.complex64"):
            optimizer.step()
        with pytest.raises(ValueError, match=r"rank 0: parameter 'parameter 1' has dtype torch\.complex64"):
            weight.sum().backward()


def raises(setup: Any) -> hvd.rules.Rule:
    raise KeyError("its own")


class FailsToClose(hvd.rules.Rule):
    def start(self) -> None:
        raise KeyError("its own")

    def close(self) -> None:
        raise RuntimeError("cannot be closed")


@pytest.mark.parametrize(
    ("rule", "error", "said"),
    [
        (raises, KeyError, "its own"),
        (lambda setup: None, TypeError, "rank 0: rule returned None; a Rule is needed"),
        (FailsToClose, RuntimeError, "cannot be closed"),
    ],
)
def test_a_rule_that_fails_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, rule: Any, error: type[Exception], said: str
) -> None:
    opened = []
    open_communicator = World.open_communicator

    def noted(world: World, group: Any, **options: Any) -> Communicator:
        opened.append(open_communicator(world, group, **options))
        return opened[-1]

    monkeypatch.setattr(World, "open_communicator", noted)
    with pytest.raises(error, match=said):
        hvd.DistributedOptimizer(sgd(perceptron()), rule=rule)
    with pytest.raises(CollectiveError, match="the Communicator is closed"):
        opened[0].barrier()


class FailsToSettle:
    def settle(self) -> None:
        raise KeyError("its own")


def test_shutdown_closes_all_though_an_update_fails() -> None:
    fails, communicator = FailsToSettle(), current_world().communicator()
    current_world().enrol(fails)
    with pytest.raises(KeyError, match="its own"):
        hvd.shutdown()
    assert not dist.is_initialized()
    assert hvd.global_process_set.process_set_id is None
    with pytest.raises(CollectiveError, match="the Communicator is closed"):
        communicator.barrier()


def test_the_world_knows_no_optimizer_that_is_closed() -> None:
    closed, other = (hvd.DistributedOptimizer(sgd(perceptron())) for _ in range(2))
    closed.close()
    assert current_world().optimizers == [other.attachment]
