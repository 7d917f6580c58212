"""DistributedOptimizer's arguments across ranks: groups, and what must be alike everywhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from tests.ranks.training import (
    STEPS,
    assert_close,
    assert_equal,
    assert_same_on_all_ranks,
    batch,
    buckets_of,
    copies,
    distributed,
    on_ranks,
    perceptron,
    sgd,
    share,
    take_steps,
)

#: By the options: the parameters that share buckets, the model having three layers.
GROUPS: dict[str, tuple[Callable[[Any], dict[str, Any]], list[list[str]]]] = {
    "two lists": (
        lambda net: {
            "groups": [list(net[0].parameters()), [*net[4].parameters(), net[2].bias]],
            "bucket_bytes": 64,
            "gradient_predivide_factor": 4.0,
        },
        [["0.bias", "0.weight"], ["2.bias", "4.bias", "4.weight"], ["2.weight"]],
    ),
    "a number": (
        lambda net: {"groups": 2, "bucket_bytes": 64},
        [["0.bias", "0.weight", "2.weight"], ["2.bias", "4.bias", "4.weight"]],
    ),
    "num_groups": (
        lambda net: {"num_groups": 100},  # more than there are
        [["0.bias"], ["0.weight"], ["2.bias"], ["2.weight"], ["4.bias"], ["4.weight"]],
    ),
    "both": (
        lambda net: {"num_groups": 3, "groups": 1, "bucket_bytes": 64},
        [["0.bias", "0.weight", "2.bias", "2.weight", "4.bias", "4.weight"]],
    ),
    "frozen ones": (
        lambda net: {"groups": [list(net[0].requires_grad_(False).parameters()), list(net[4].parameters())]},
        [["2.bias", "2.weight"], ["4.bias", "4.weight"]],
    ),
    "two kinds": (
        lambda net: {"groups": [[*net.parameters()]], "policy": {"0.weight": "int8", "*": "none"}},
        [["0.bias", "2.bias", "2.weight", "4.bias", "4.weight"], ["0.weight"]],
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", GROUPS)
def test_groups_share_buckets(kind: str) -> None:
    options_of, expected = GROUPS[kind]
    model, alone = perceptron(), perceptron()
    options_of(alone)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options_of(model))
    for _ in range(2):  # the order of arrival does not change groups
        take_steps(model, optimizer, share, range(STEPS))
        assert sorted(map(sorted, buckets_of(model).values())) == expected
    take_steps(alone, sgd(alone.parameters()), batch, [*range(STEPS), *range(STEPS)])
    assert_same_on_all_ranks(model.parameters())
    tolerance = {"rtol": 0.1, "atol": 0.02} if kind == "two kinds" else {"rtol": 1e-4, "atol": 1e-5}
    assert_close(model.parameters(), alone.parameters(), **tolerance)


class Odd(hvd.rules.Rule):
    pass


#: What rank 1 gives that the others do not, by the name that the error has for it.
DIFFERENT: list[tuple[str, dict[str, Any]]] = [
    ("compression", {"compression": hvd.Compression.fp16}),
    ("compression", {"compression": "topk"}),
    ("policy", {"policy": {"0.*": "int8"}}),
    ("exchange_plan", {"bucket_bytes": 7}),
    ("op", {"op": hvd.Sum}),
    ("rule", {"op": hvd.Adasum}),
    ("backward_passes_per_step", {"backward_passes_per_step": 4}),
    ("gradient_predivide_factor", {"gradient_predivide_factor": 2.0}),
    ("groups", {"groups": 2}),
    ("sparse_as_dense", {"sparse_as_dense": True}),
    ("rule", {"rule": Odd}),
]


@on_ranks(3)
def test_ranks_must_give_the_same_arguments() -> None:
    for name, options in DIFFERENT:
        model = perceptron()
        with pytest.raises(ValueError, match=rf"rank {hvd.rank()}: .*{name} is .* on ranks 0, 2; .* on rank 1"):
            hvd.DistributedOptimizer(
                sgd(model.parameters()), model.named_parameters(), **(options if hvd.rank() == 1 else {})
            )
    named = [(f"net.{name}" if hvd.rank() else name, parameter) for name, parameter in model.named_parameters()]
    with pytest.raises(ValueError, match=r"'0.bias' .* on rank 0, and is not trained on rank 1"):
        hvd.DistributedOptimizer(sgd(model.parameters()), named, op=hvd.Adasum)
    # And after all this they can still make one.
    hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters()).close()


def broad(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 1))


WITHOUT_ORDER: dict[str, Callable[..., Any]] = {
    "average": lambda *args: hvd.DistributedOptimizer(*args, check_replicas_every=1),
    "adasum": lambda *args: hvd.DistributedOptimizer(*args, op=hvd.Adasum, check_replicas_every=1),
    "shards": lambda *args: hvd.DistributedOptimizer(*args, rule=hvd.rules.Sharded()),
    "server": hvd.servers.ParameterServer,
}


@on_ranks(2)
@pytest.mark.parametrize("kind", WITHOUT_ORDER)
def test_the_order_of_parameters_may_differ_between_ranks(kind: str) -> None:
    """As if param groups were made from a set of names. All parameters have one size, so that mixing them up would fit."""
    weights = []
    for is_reversed in (False, hvd.rank() == 1):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        parameters = list(model.parameters())
        inner = torch.optim.Adam(reversed(parameters) if is_reversed else parameters, lr=0.1)
        optimizer = WITHOUT_ORDER[kind](inner, model.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 4), 1.0 + step + hvd.rank())).square().sum().backward()
            optimizer.step()
        weights.append(copies(parameters))
        if kind == "shards" and len(weights) == 2:
            with pytest.raises(
                ValueError, match=r"the same order on all ranks: number 0 is '0.weight'.*and '3.weight'"
            ):
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.close()
    assert_equal(*weights)


@pytest.mark.parametrize("kind", ["powersgd", "sparse"])
@on_ranks(3)
def test_two_optimizers_whose_exchanges_take_several_operations(kind: str) -> None:
    """One backward() reaches two optimizers, on odd ranks in the other order; then, on rank 0 alone, the second not."""
    odd = hvd.rank() % 2
    models: list[nn.Module] = [broad(1), broad(2)]
    if kind == "sparse":
        models = [nn.Sequential(nn.EmbeddingBag(40, 96, sparse=True), broad(seed)) for seed in (1, 2)]
    optimizers = [
        distributed(
            model.parameters(),
            0.01,
            named_parameters=model.named_parameters(),
            compression="powersgd" if kind == "powersgd" else hvd.Compression.none,
            bucket_bytes=40_000,
        )
        for model in models
    ]
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(6):
        inputs = torch.randn(8, 96, generator=generator)
        if kind == "sparse":
            inputs = torch.randint(0, 40, (8, 3), generator=generator)
        reached = models[::-1] if odd else models
        if step == 4 and hvd.rank() == 0:
            reached = [models[0]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        # autograd goes through the last first
        sum(model(inputs).square().mean() for model in reached).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
        for model in models:
            assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_a_gradient_is_not_exchanged_by_ddp_too() -> None:
    """What both exchange is wrong. A rule that exchanges no gradients, and what DDP ignores, are right."""
    ignoring, model = perceptron(), perceptron()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["0.weight"])
    wrapped = DistributedDataParallel(model), DistributedDataParallel(ignoring)
    for parameters in (model.parameters(), list(ignoring.parameters())):
        with pytest.raises(ValueError, match=f"rank {hvd.rank()}.*DistributedDataParallel"):
            hvd.DistributedOptimizer(sgd(parameters))
    hvd.DistributedOptimizer(sgd([ignoring[0].weight])).close()
    local = hvd.DistributedOptimizer(sgd(model.parameters()), rule=hvd.rules.LocalUpdates(every=2))
    take_steps(wrapped[0], local, share, range(4))
    assert_same_on_all_ranks(model.parameters())
    local.close()


@on_ranks(2)
def test_ddp_may_not_wrap_a_model_later() -> None:
    """One that is gone before the optimizer is made exchanges nothing."""
    model = perceptron()
    wrapped = DistributedDataParallel(model)
    del wrapped
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    wrapped = DistributedDataParallel(model)
    wrapped(batch(0)[0]).sum().backward()
    with pytest.raises(ValueError, match=f"rank {hvd.rank()}.*DistributedDataParallel"):
        optimizer.step()
    optimizer.close()
