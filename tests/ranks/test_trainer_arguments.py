"""DistributedOptimizer's arguments across ranks: groups, what must be alike everywhere, and Adasum."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from tests.harness import Worlds
from tests.ranks.training import (
    STEPS,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    copies,
    in_world,
    loss_of,
    on_ranks,
    perceptron,
    share,
)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> list[Tensor]:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()
    return copies(model.parameters())


@in_world
def in_groups(kind: str) -> tuple[list[list[str]], list[Tensor]]:
    """The names of the parameters in each bucket before training, and the weights after it."""
    model = perceptron()
    first, last = list(model[0].parameters()), list(model[4].parameters())
    options: dict[str, Any] = {
        "two lists": {"groups": [first, [*last, model[2].bias]], "bucket_bytes": 64},
        "a number": {"groups": 2, "bucket_bytes": 64},
        "num_groups": {"num_groups": 3, "bucket_bytes": 64},
        "both": {"num_groups": 3, "groups": 1, "bucket_bytes": 64},
        "more than there are": {"num_groups": 100},
        "frozen ones": {"groups": [first, last]},
        "two kinds": {"groups": [[*model.parameters()]], "policy": {"0.weight": "int8", "*": "none"}},
    }[kind]
    model[0].bias.requires_grad_(kind != "frozen ones")
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), **options)
    buckets = [sorted(bucket.names) for bucket in optimizer._rule.bucketing.buckets]  # type: ignore[attr-defined]
    trained(model, optimizer, share)
    after = [sorted(bucket.names) for bucket in optimizer._rule.bucketing.buckets]  # type: ignore[attr-defined]
    assert sorted(after) == sorted(buckets), "the order of arrival has changed groups"
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()
    return sorted(buckets), copies(model.parameters())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("two lists", [["0.bias", "0.weight"], ["2.bias", "4.bias", "4.weight"], ["2.weight"]]),
        ("a number", [["0.bias", "0.weight", "2.weight"], ["2.bias", "4.bias", "4.weight"]]),
        ("num_groups", [["0.bias", "0.weight"], ["2.bias", "2.weight"], ["4.bias", "4.weight"]]),
        ("both", [["0.bias", "0.weight", "2.bias", "2.weight", "4.bias", "4.weight"]]),
        ("more than there are", [["0.bias"], ["0.weight"], ["2.bias"], ["2.weight"], ["4.bias"], ["4.weight"]]),
        ("frozen ones", [["0.weight"], ["2.bias", "2.weight"], ["4.bias", "4.weight"]]),
        ("two kinds", [["0.bias", "2.bias", "2.weight", "4.bias", "4.weight"], ["0.weight"]]),
    ],
)
def test_groups_share_buckets(ranks: Worlds, kind: str, expected: list[list[str]]) -> None:
    model = perceptron()
    model[0].bias.requires_grad_(kind != "frozen ones")
    wanted = trained(model, momentum(model), batch)
    for buckets, weights in ranks(2).run(in_groups, kind):
        assert buckets == expected
        assert_close(
            weights, wanted, **({"rtol": 0.1, "atol": 0.02} if kind == "two kinds" else {"rtol": 1e-4, "atol": 1e-5})
        )


class Odd(hvd.Rule):
    pass


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "compression": (
        {"compression": hvd.Compression.fp16},
        "compression is none on ranks 0, 2; torch.float16 on rank 1",
    ),
    "codec": ({"compression": "topk"}, r"compression is none on ranks 0, 2; topk\(.*\), feedback=True.* on rank 1"),
    "policy": ({"policy": {"0.*": "int8"}}, r"policy is {} on ranks 0, 2; {'0\.\*': 'int8.*'} on rank 1"),
    "bucket_bytes": ({"bucket_bytes": 7}, "bucket_bytes is 26214400 on ranks 0, 2; 7 on rank 1"),
    "op": ({"op": hvd.Sum}, "op is average on ranks 0, 2; sum on rank 1"),
    "adasum": (
        {"op": hvd.Adasum},
        "rule is Synchronous on ranks 0, 2; AdaptiveSummation on rank 1. op is average on ranks 0, 2; adasum on rank 1",
    ),
    "passes": ({"backward_passes_per_step": 4}, "backward_passes_per_step is 1 on ranks 0, 2; 4 on rank 1"),
    "predivide": ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor is 1.0 on ranks 0, 2; 2.0 on rank 1"),
    "groups": ({"groups": 2}, r"groups is None on ranks 0, 2; \[0, 0, 0, 1, 1, 1\] on rank 1"),
    "sparse": ({"sparse_as_dense": True}, "sparse_as_dense is False on ranks 0, 2; True on rank 1"),
    "rule": ({"rule": Odd}, "rule is Synchronous on ranks 0, 2; Odd on rank 1"),
}


@in_world
def made_differently() -> dict[str, str]:
    said = {}
    for kind, (options, _) in DIFFERENT.items():
        model = perceptron()
        with pytest.raises(ValueError, match="do not make the same") as error:
            hvd.DistributedOptimizer(momentum(model), model.named_parameters(), **(options if hvd.rank() == 1 else {}))
        said[kind] = str(error.value)
    model = perceptron()  # and after all this they can still make one
    hvd.DistributedOptimizer(momentum(model), model.named_parameters()).close()
    return said


def test_ranks_must_give_the_same_arguments(ranks: Worlds) -> None:
    for rank, said in enumerate(ranks(3).run(made_differently)):
        for kind, (_, message) in DIFFERENT.items():
            begin = f"rank {rank}: the ranks do not make the same DistributedOptimizer: "
            assert re.fullmatch(re.escape(begin) + message, said[kind]), said[kind]


@in_world
def named_differently() -> str:
    model = perceptron()
    named = [(f"net.{name}" if hvd.rank() else name, parameter) for name, parameter in model.named_parameters()]
    with pytest.raises(ValueError, match="do not train the same parameters") as error:
        hvd.DistributedOptimizer(momentum(model), named, op=hvd.Adasum)
    return str(error.value)


def test_ranks_must_have_the_same_names(ranks: Worlds) -> None:
    for message in ranks(2).run(named_differently):
        assert "'0.bias' has shape [16] and dtype torch.float32 on rank 0, and is not trained on rank 1" in message


def combined(vectors: list[Tensor]) -> Tensor:
    """The definition, in a tree of neighbours."""
    while len(vectors) > 1:
        a, b = vectors[0], vectors[1]
        common, of_a, of_b = (float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b)))
        both = a * (1 - common / (2 * of_a) if of_a else 1) + b * (1 - common / (2 * of_b) if of_b else 1)
        vectors = [*vectors[2:], both] if len(vectors) > 2 else [both]
    return vectors[0]


@in_world
def by_adasum(options: dict[str, Any]) -> list[list[Tensor]]:
    """The weights before and after each step, and what this rank's own step would have made of them."""
    model = perceptron()
    model[2].bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), op=hvd.Adasum, **options)
    shadow = perceptron()
    own = momentum(shadow)  # the state of each rank's optimizer is its own
    history = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            for theirs, parameter in zip(shadow.parameters(), model.parameters(), strict=True):
                theirs.data.copy_(parameter)
                theirs.requires_grad_(parameter.requires_grad)
            before = copies(model.parameters())
            for net, each in ((shadow, own), (model, optimizer)):
                each.zero_grad()
                for part in range(2):
                    loss_of(net, share(step, part, 2)).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                each.step()
            assert_same_on_all_ranks(model.parameters())
            changes = [after - start for after, start in zip(copies(shadow.parameters()), before, strict=True)]
            history.append([*before, *copies(model.parameters()), *changes])
    optimizer.close()
    return history


@pytest.mark.parametrize(("size", "options"), [(2, {}), (4, {}), (2, {"compression": hvd.Compression.fp16})])
def test_adasum_combines_what_the_steps_of_all_ranks_change(ranks: Worlds, size: int, options: dict[str, Any]) -> None:
    tolerance = {"rtol": 0.01, "atol": 1e-4} if options else {"rtol": 1e-4, "atol": 1e-6}
    everyones = ranks(size).run(by_adasum, options)
    for step in range(3):
        first = everyones[0][step]
        count = len(first) // 3
        for place in range(count):
            change = combined([theirs[step][2 * count + place].double() for theirs in everyones])
            torch.testing.assert_close(first[count + place], first[place] + change.float(), **tolerance)


@on_ranks(3)
def test_adasum_of_any_number_of_ranks() -> None:
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(momentum(model), op=hvd.Adasum)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, share(hvd.rank()))
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
        assert_same_on_all_ranks(model.parameters())
    optimizer.close()
    for options, match in (({"compression": "int8"}, "no codec"), ({"gradient_predivide_factor": 2.0}, "needs op=")):
        with pytest.raises(ValueError, match=match):
            hvd.DistributedOptimizer(momentum(model), op=hvd.Adasum, **options)


def wide(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 1))


@pytest.mark.parametrize("kind", ["powersgd", "sparse"])
@on_ranks(3)
def test_two_optimizers_whose_exchanges_take_several_operations(kind: str) -> None:
    """One backward() reaches two optimizers, on odd ranks in the other order; then, on rank 0 alone, the second not."""
    odd = hvd.rank() % 2
    models: list[nn.Module] = [wide(1), wide(2)]
    if kind == "sparse":
        models = [nn.Sequential(nn.EmbeddingBag(40, 96, sparse=True), wide(seed)) for seed in (1, 2)]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model.named_parameters(),
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
    for optimizer in optimizers:
        optimizer.close()
