"""Which parameters have gradients, on which ranks, of what kind: missing, frozen, added, tied, mixed, sparse."""

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
    gradients,
    in_world,
    loss_of,
    perceptron,
    share,
    spy,
)


class Branches(nn.Module):
    """Three layers of which forward() uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, inputs: Tensor, used: set[int]) -> Tensor:
        return sum((self.branches[i](inputs) for i in sorted(used)), torch.zeros(len(inputs), 3, requires_grad=True))


def momentum(parameters: object) -> torch.optim.SGD:
    """An optimizer that moves a parameter whose gradient is zero, but not one that has none."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)  # type: ignore[arg-type]


@in_world
def branches_used(used: list[list[set[int]]], set_to_none: bool) -> tuple[list[Tensor], list[list[bool]]]:
    """used[step][rank]: the branches a rank uses. Returns the weights, and which had gradients after each step."""
    model = Branches()
    optimizer = hvd.DistributedOptimizer(
        momentum(model.parameters()), named_parameters=model.named_parameters(), bucket_bytes=100
    )
    seen = []
    for step, by_rank in enumerate(used):
        optimizer.zero_grad(set_to_none=set_to_none)
        inputs, targets = share(step)
        (model(inputs, by_rank[hvd.rank()]) * targets).mean().backward()
        optimizer.step()
        seen.append([branch.weight.grad is not None for branch in model.branches])
        assert_same_on_all_ranks([p.grad for p in model.parameters() if p.grad is not None])
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()
    return copies(model.parameters()), seen


def branches_of_one_process(used: list[list[set[int]]], set_to_none: bool) -> list[Tensor]:
    model = Branches()
    optimizer = momentum(model.parameters())
    for step, by_rank in enumerate(used):
        optimizer.zero_grad(set_to_none=set_to_none)
        inputs, targets = batch(step)
        pieces = zip(inputs.chunk(len(by_rank)), targets.chunk(len(by_rank)), by_rank, strict=True)
        torch.stack([(model(x, branches) * y).mean() for x, y, branches in pieces]).mean().backward()
        optimizer.step()
    return copies(model.parameters())


USED: dict[str, list[list[set[int]]]] = {
    "other branches on each rank": [[{0}, {1}], [{0, 1}, {1, 2}], [{2}, {0}], [{1}, {1}]],
    "a branch that nobody uses": [[{0}, {0, 1}], [{1}, {0, 1}], [{0}, {1}]],
    "a branch used first and then no more": [[{0, 1, 2}, {0, 1, 2}], [{0}, {1}], [{0, 1}, {0}], [{1}, {1}]],
    "a rank that uses none": [[{0, 1}, {0}], [set(), {0, 1, 2}], [{0}, set()], [set(), set()], [{1}, {2}]],
    "a rank that uses none at first": [[set(), {0, 1}], [{0}, {1, 2}], [{2}, set()]],
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("case", USED)
def test_branches(ranks: Worlds, case: str, set_to_none: bool) -> None:
    expected = branches_of_one_process(USED[case], set_to_none)
    for weights, seen in ranks(2).run(branches_used, USED[case], set_to_none):
        assert_close(weights, expected, rtol=1e-4, atol=1e-5)
        if set_to_none:
            assert seen == [[any(i in used for used in by_rank) for i in range(3)] for by_rank in USED[case]]


@in_world
def rank_without_backward() -> list[Tensor]:
    """Rank 0 does not call backward() in step 1; the last rank not in step 0."""
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(momentum(model.parameters()))
    for step in range(3):
        model.zero_grad()  # which the wrapper does not hear of
        if (hvd.rank(), step) not in {(0, 1), (hvd.size() - 1, 0)}:
            loss_of(model, share(step)).backward()
        optimizer.step()
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()
    return copies(model.parameters())


def test_a_rank_may_skip_backward(ranks: Worlds) -> None:
    model = perceptron()
    optimizer = momentum(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        skipped = {0: 2, 1: 0}.get(step)
        pieces = list(zip(inputs.chunk(3), targets.chunk(3), strict=True))
        torch.stack([loss_of(model, piece) for i, piece in enumerate(pieces) if i != skipped]).sum().div(3).backward()
        optimizer.step()
    for weights in ranks(3).run(rank_without_backward):
        assert_close(weights, model.parameters(), rtol=1e-4, atol=1e-5)


def train_freezing(model: nn.Sequential, optimizer: torch.optim.Optimizer, whole_batch: bool) -> list[Tensor]:
    """Begin with the first layer frozen; thaw it, freeze the last, thaw that."""
    for step, trainable in enumerate([(2, 4), (0, 2, 4), (0, 2, 4), (0, 2), (0, 2), (4,), (0, 2, 4), (0, 2, 4)]):
        for layer in (0, 2, 4):
            model[layer].requires_grad_(layer in trainable)
        optimizer.zero_grad()
        loss_of(model, batch(step) if whole_batch else share(step)).backward()
        optimizer.step()
    return copies(model.parameters())


@in_world
def freezing() -> list[Tensor]:
    model = perceptron()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), model.named_parameters(), bucket_bytes=200)
    weights = train_freezing(model, optimizer, whole_batch=False)
    assert_same_on_all_ranks(weights)
    optimizer.close()
    return weights


def test_freezing_and_thawing(ranks: Worlds) -> None:
    model = perceptron()
    expected = train_freezing(model, momentum(model.parameters()), whole_batch=True)
    for weights in ranks(3).run(freezing):
        assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@in_world
def frozen_parameters_do_not_travel() -> int:
    """Bytes of buckets while most is frozen."""
    small, large = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10000), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([small, large], lr=1.0))
    sent = []
    spy(optimizer, lambda tensor, options: sent.append(tensor.nbytes))
    (small.sum() + large.sum()).backward()
    optimizer.close()
    return sum(sent)


def test_frozen_parameters_do_not_travel(ranks: Worlds) -> None:
    assert all(40 < sent < 200 for sent in ranks(2).run(frozen_parameters_do_not_travel))


@in_world
def thawed_without_zero_grad() -> list[float]:
    """Nothing tells the wrapper of the thaw before backward() reaches the parameter, which is the first that it reaches."""
    first, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, last], lr=1.0))
    optimizer.zero_grad()
    last.requires_grad_(True)
    (first * 2 * last * hvd.rank()).sum().backward()
    optimizer.close()
    return [float(p.grad) for p in (first, last) if p.grad is not None]


def test_thawed_without_zero_grad(ranks: Worlds) -> None:
    assert ranks(2).run(thawed_without_zero_grad) == [[1.0, 1.0]] * 2


@in_world
def thawed_before_zero_grad() -> float:
    """Nothing else requires gradients, so there was nothing to exchange before."""
    weight = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.requires_grad_(True)
    optimizer.zero_grad()
    (weight * hvd.rank()).sum().backward()
    optimizer.close()
    assert weight.grad is not None
    return float(weight.grad)


def test_thawed_before_zero_grad(ranks: Worlds) -> None:
    assert ranks(2).run(thawed_before_zero_grad) == [0.5] * 2


def train_adding(model: nn.Sequential, optimizer: torch.optim.Optimizer, whole_batch: bool) -> list[Tensor]:
    """Add the last layer between steps, and the first between backward() and step()."""
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.02})
        model.zero_grad()
        loss_of(model, batch(step) if whole_batch else share(step)).backward()
        if step == 3:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        optimizer.step()
    return copies(model.parameters())


@in_world
def adding() -> list[Tensor]:
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(momentum(model[2].parameters()), bucket_bytes=200)
    weights = train_adding(model, optimizer, whole_batch=False)
    assert_same_on_all_ranks(weights)
    assert len(optimizer.param_groups) == 3
    optimizer.close()
    return weights


def test_add_param_group(ranks: Worlds) -> None:
    model = perceptron()
    expected = train_adding(model, momentum(model[2].parameters()), whole_batch=True)
    for weights in ranks(2).run(adding):
        assert_close(weights, expected, rtol=1e-4, atol=1e-5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


def train_tied(model: Tied, optimizer: torch.optim.Optimizer, rank: int, size: int) -> list[Tensor]:
    for step in range(3):
        optimizer.zero_grad()
        tokens = torch.arange(8).roll(step).chunk(size)[rank]
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
    return copies(model.parameters())


@in_world
def tied() -> list[Tensor]:
    model = Tied()
    named = [("embedding", model.embedding.weight), ("head", model.head.weight), ("bias", model.head.bias)]
    optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), named_parameters=named)
    weights = train_tied(model, optimizer, hvd.rank(), hvd.size())
    optimizer.close()
    return weights


def test_tied_weights(ranks: Worlds) -> None:
    model = Tied()
    expected = train_tied(model, momentum(model.parameters()), 0, 1)
    for weights in ranks(2).run(tied):
        assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@in_world
def mixed_dtypes() -> list[float]:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float32)
    weights = [nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in dtypes]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), compression=hvd.Compression.fp16)
    for _ in range(2):
        optimizer.zero_grad()
        sum(((i + 1 + hvd.rank()) * w.sum()).double() for i, w in enumerate(weights)).backward()  # type: ignore[union-attr]
        assert all(w.grad is not None and w.grad.dtype == w.dtype for w in weights)
        optimizer.step()
    optimizer.close()
    return [float(w[0]) for w in weights]


def test_mixed_dtypes(ranks: Worlds) -> None:
    assert ranks(3).run(mixed_dtypes) == [[-4.0, -6.0, -8.0, -10.0, -12.0]] * 3


@in_world
def odd_shapes() -> list[list[float] | None]:
    """Scalars, empty, transposed and channels-last parameters; gradients are laid out like their parameters."""
    weights = [
        nn.Parameter(torch.zeros(())),
        nn.Parameter(torch.zeros(0, 3)),
        nn.Parameter(torch.zeros(2, 3).t()),
        nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(4).expand(2, 4)),
    ]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([(w * torch.arange(w.numel()).view(w.shape) * hvd.rank()).sum() for w in weights]).sum().backward()
    assert all(w.grad is not None and w.grad.stride() == w.stride() for w in weights[:4])
    optimizer.close()
    return [None if w.grad is None else w.grad.flatten().tolist() for w in weights]


def test_odd_shapes(ranks: Worlds) -> None:
    expected = [[i / 2 for i in range(numel)] for numel in (1, 0, 6, 24, 8)]
    assert ranks(2).run(odd_shapes) == [expected] * 2


@in_world
def two_optimizers() -> tuple[list[Tensor], list[Tensor | None]]:
    """Both reached by one backward(), on odd ranks in the other order; then each by its own.

    Each has a parameter that is not reached, so that some of its buckets have to wait for the end of backward().
    """
    first, second = perceptron(1), perceptron(2)
    optimizers = [
        hvd.DistributedOptimizer(momentum([nn.Parameter(torch.zeros(1)), *model.parameters()]), bucket_bytes=200)
        for model in (first, second)
    ]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [loss_of(model, share(step)) for model in ((first, second) if hvd.rank() % 2 else (second, first))]
        torch.stack(losses).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    before = gradients(second.parameters())
    optimizers[0].zero_grad()
    loss_of(first, share(0)).backward()
    optimizers[0].step()
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(second.parameters()), strict=True))  # type: ignore[arg-type]
    for optimizer in optimizers:
        optimizer.close()
    return copies(first.parameters()), copies(second.parameters())


def test_two_wrapped_optimizers(ranks: Worlds) -> None:
    expected = []
    for seed, steps in ((1, [*range(STEPS), 0]), (2, [*range(STEPS)])):
        model = perceptron(seed)
        optimizer = momentum(model.parameters())
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
        expected.append(copies(model.parameters()))
    for result in ranks(3).run(two_optimizers):
        for weights, wanted in zip(result, expected, strict=True):
            assert_close(weights, wanted, rtol=1e-4, atol=1e-5)
