"""Which parameters have gradients, on which ranks, of what kind: missing, frozen, added, tied, mixed, of several optimizers."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import ReplicasDiffer
from tests.ranks.training import (
    STEPS,
    Data,
    assert_as_in_one_process,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    distributed,
    gradients,
    loss_of,
    on_ranks,
    perceptron,
    sgd,
    share,
    spy,
    take_steps,
)

Optimizer = torch.optim.Optimizer


class Branches(nn.Module):
    """Three layers of which forward() uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, inputs: Tensor, used: set[int]) -> Tensor:
        return sum((self.branches[i](inputs) for i in sorted(used)), torch.zeros(len(inputs), 3, requires_grad=True))


#: By step and rank, the branches that it uses.
USED: dict[str, list[list[set[int]]]] = {
    "other branches on each rank": [[{0}, {1}], [{0, 1}, {1, 2}], [{2}, {0}], [{1}, {1}]],
    "a branch that nobody uses": [[{0}, {0, 1}], [{1}, {0, 1}], [{0}, {1}]],
    "a branch used first and then no more": [[{0, 1, 2}, {0, 1, 2}], [{0}, {1}], [{0, 1}, {0}], [{1}, {1}]],
    "a rank that uses none": [[{0, 1}, {0}], [set(), {0, 1, 2}], [{0}, set()], [set(), set()], [{1}, {2}]],
    "a rank that uses none at first": [[set(), {0, 1}], [{0}, {1, 2}], [{2}, set()]],
}


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("case", USED)
def test_branches(case: str, set_to_none: bool) -> None:
    def train(model: Branches, optimizer: Optimizer, data: Data) -> None:
        for step, by_rank in enumerate(USED[case]):
            optimizer.zero_grad(set_to_none=set_to_none)
            inputs, targets = data(step)
            if data is share:
                (model(inputs, by_rank[hvd.rank()]) * targets).mean().backward()
            else:
                pieces = zip(inputs.chunk(2), targets.chunk(2), by_rank, strict=True)
                torch.stack([(model(x, branches) * y).mean() for x, y, branches in pieces]).mean().backward()
            optimizer.step()
            if set_to_none:
                reached = [any(i in used for used in by_rank) for i in range(3)]
                assert [branch.weight.grad is not None for branch in model.branches] == reached

    assert_as_in_one_process(train, model_of=Branches, bucket_bytes=100)


@on_ranks(3)
def test_a_rank_may_skip_backward() -> None:
    """Rank 0 does not call it in step 1; the last rank not in step 0."""

    def train(model: nn.Module, optimizer: Optimizer, data: Data) -> None:
        for step in range(3):
            model.zero_grad()  # which the wrapper does not hear of
            skipping = {0: 2, 1: 0}.get(step)
            for rank in [hvd.rank()] if data is share else range(3):
                piece = share(step) if data is share else batch(step, rank, 3)
                if rank != skipping:
                    (loss_of(model, piece) / (1 if data is share else 3)).backward()
            optimizer.step()

    assert_as_in_one_process(train)


@on_ranks(3)
def test_freezing_and_thawing() -> None:
    """Begin with the first layer frozen; thaw it, freeze the last, thaw that."""

    def train(model: Any, optimizer: Optimizer, data: Data) -> None:
        for step, trainable in enumerate([(2, 4), (0, 2, 4), (0, 2, 4), (0, 2), (0, 2), (4,), (0, 2, 4), (0, 2, 4)]):
            for layer in (0, 2, 4):
                model[layer].requires_grad_(layer in trainable)
            take_steps(model, optimizer, data, [step])

    def frozen() -> nn.Sequential:
        model = perceptron()
        model[0].requires_grad_(False)
        return model

    assert_as_in_one_process(train, model_of=frozen)


@on_ranks(2)
def test_frozen_parameters_do_not_travel() -> None:
    small, large = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10000), requires_grad=False)
    optimizer = distributed([small, large])
    sent: list[int] = []
    spy(optimizer, lambda tensor, options: sent.append(tensor.nbytes))
    (small.sum() + large.sum()).backward()
    assert 40 < sum(sent) < 200


@on_ranks(2)
def test_thawed_without_zero_grad() -> None:
    """Nothing tells the wrapper of the thaw before backward() reaches the parameter, which is the first that it reaches; or,
    where nothing else requires gradients, there was nothing to exchange before."""
    first, last = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = distributed([first, last])
    optimizer.zero_grad()
    last.requires_grad_(True)
    (first * 2 * last * hvd.rank()).sum().backward()
    assert (first.grad, last.grad) == (1.0, 1.0)
    optimizer.close()
    weight = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = distributed([weight])
    weight.requires_grad_(True)
    optimizer.zero_grad()
    (weight * hvd.rank()).sum().backward()
    assert weight.grad == 0.5


@on_ranks(2)
def test_add_param_group() -> None:
    """Add the last layer between steps, and the first between backward() and step()."""

    def train(model: Any, optimizer: Optimizer, data: Data) -> None:
        for step in range(STEPS):
            if step == 2:
                optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.02})
            model.zero_grad()
            loss_of(model, data(step)).backward()
            if step == 3:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            optimizer.step()
        assert len(optimizer.param_groups) == 3

    assert_as_in_one_process(train, lambda model: sgd(model[2].parameters()))  # type: ignore[index]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 6)
        self.head.weight = self.body.weight

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(inputs))
        return logits[:, :3]


@on_ranks(2)
def test_tied_weights() -> None:
    assert_as_in_one_process(lambda *training: take_steps(*training, range(3)) and None, model_of=Tied)


@on_ranks(3)
def test_mixed_dtypes() -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float32)
    weights = [nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in dtypes]
    optimizer = distributed(weights, compression=hvd.Compression.fp16)
    for _ in range(2):
        optimizer.zero_grad()
        sum(((i + 1 + hvd.rank()) * w.sum()).double() for i, w in enumerate(weights)).backward()  # type: ignore[union-attr]
        assert all(w.grad is not None and w.grad.dtype == w.dtype for w in weights)
        optimizer.step()
    assert [float(w[0]) for w in weights] == [-4.0, -6.0, -8.0, -10.0, -12.0]


@on_ranks(2)
def test_odd_shapes() -> None:
    """Scalars, empty, transposed, channels-last and large parameters; gradients are laid out like their parameters."""
    weights = [
        nn.Parameter(torch.zeros(())),
        nn.Parameter(torch.zeros(0, 3)),
        nn.Parameter(torch.zeros(2, 3).t()),
        nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(150, 200).t()),
        nn.Parameter(torch.zeros(4).expand(2, 4)),
    ]
    optimizer = distributed(weights)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([(w * torch.arange(w.numel()).view(w.shape) * hvd.rank()).sum() for w in weights]).sum().backward()
    assert all(w.grad is not None and w.grad.stride() == w.stride() for w in weights[:5])
    for weight in weights:
        assert weight.grad is not None
        assert weight.grad.flatten().tolist() == [i / 2 for i in range(weight.numel())]


@on_ranks(3)
def test_two_wrapped_optimizers() -> None:
    """Both are reached by one backward(), on odd ranks in the other order; then each by its own.

    Each has a parameter that is not reached, so that some of its buckets have to wait for the end of backward().
    """
    first, second = perceptron(1), perceptron(2)
    optimizers = [
        hvd.DistributedOptimizer(sgd([nn.Parameter(torch.zeros(1)), *model.parameters()]), bucket_bytes=200)
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
    take_steps(first, optimizers[0], share, [0])
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(second.parameters()), strict=True))  # type: ignore[arg-type]
    for seed, model, steps in ((1, first, [*range(STEPS), 0]), (2, second, [*range(STEPS)])):
        optimizers[seed - 1].close()
        assert_same_on_all_ranks(model.parameters())
        alone = perceptron(seed)
        take_steps(alone, sgd(alone.parameters()), batch, steps)
        assert_close(model.parameters(), alone.parameters(), rtol=1e-4, atol=1e-5)


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"rule": hvd.rules.NextForward}, {"rule": hvd.rules.Sharded()}, {"policy": {"0.*": "int8"}}],
    ids=str,
)
def test_a_parameter_may_be_replaced(options: dict[str, Any]) -> None:
    """In the model and in the param groups, before the first step and later; another one is moved to a group of its own, and the
    first one is given back."""

    def train(model: Any, optimizer: Optimizer, data: Data) -> None:
        group = optimizer.param_groups[0]
        first = model[0].weight
        for step in range(STEPS):
            if isinstance(optimizer, hvd.DistributedOptimizer):
                optimizer.settle()
            if step in (0, 2):
                new = nn.Parameter(model[2].weight.detach() * 0.9)
                group["params"] = [new if old is model[2].weight else old for old in group["params"]]
                model[2].weight = new
            if step == 3:
                group["params"].remove(first)
            if step == 4:
                optimizer.param_groups.append({**group, "params": [first]})
            if step % 2 and "rule" not in options:
                model.zero_grad()  # which the wrapper does not notice
                loss_of(model, data(step)).backward()
                optimizer.step()
            else:
                take_steps(model, optimizer, data, [step])

    tolerance = 0.05 if "policy" in options else 1e-5
    assert_as_in_one_process(train, rtol=tolerance, atol=tolerance, **options)


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"compression": "onebit"}], ids=str)
def test_replaced_parameters_are_released(options: dict[str, Any]) -> None:
    model: Any = nn.Sequential(nn.Linear(6, 64, bias=False), nn.Linear(64, 3))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = distributed(model.parameters(), **options)
    old = []
    for step in range(6):
        take_steps(model, optimizer, share, [step])
        old.append(weakref.ref(model[0].weight))
        new = nn.Parameter(model[0].weight.detach() * 0.9)
        group = optimizer.param_groups[0]
        optimizer.state.pop(model[0].weight, None)
        group["params"] = [new if each is model[0].weight else each for each in group["params"]]
        model[0].weight = new
    take_steps(model, optimizer, share, [6, 7])
    del new
    gc.collect()
    assert [ref() for ref in old] == [None] * 6


@on_ranks(2)
def test_a_parameter_of_two_optimizers() -> None:
    """The one that was made first refuses to step, before anything changes; a set that this rank is not in does not count."""
    for kind in (hvd.DistributedOptimizer, lambda inner: hvd.LocalUpdates(inner, every=2)):
        encoder, actor, critic = (perceptron(seed)[0] for seed in range(3))
        first = kind(sgd([*encoder.parameters(), *actor.parameters()]))
        second = kind(sgd([*encoder.parameters(), *critic.parameters()]))
        inputs = share(0)[0]
        (encoder(inputs) + actor(inputs) + critic(inputs)).sum().backward()
        before = [parameter.detach().clone() for parameter in [*encoder.parameters(), *actor.parameters()]]
        with pytest.raises(RuntimeError, match="a DistributedOptimizer of their own"):
            first.step()
        assert_close([*encoder.parameters(), *actor.parameters()], before, rtol=0, atol=0)
        second.step()
        second.close()
    third = distributed([*actor.parameters(), *encoder.parameters()])
    third.param_groups[0]["params"] = list(actor.parameters())
    third.zero_grad()
    fourth = distributed([*critic.parameters(), *encoder.parameters()])  # which the third one no longer has
    third.step()
    with pytest.raises(ValueError, match="parameter of another DistributedOptimizer"):
        fourth.add_param_group({"params": list(actor.parameters())})
    third.close()
    fourth.add_param_group({"params": list(actor.parameters())})
    fourth.close()
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    apart = [distributed(encoder.parameters(), process_set=each) for each in sets]
    for optimizer in apart:
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["backward", "next_forward", "sharded", "adasum", "a rank without a gradient"])
def test_replicas_that_do_not_start_equal(kind: str) -> None:
    options: dict[str, Any] = {
        "sharded": {"rule": hvd.rules.Sharded()},
        "adasum": {"op": hvd.Adasum},
    }.get(kind, {})
    for compared in (0, None):
        model = perceptron(hvd.rank() if compared == 0 else 0)
        if compared is None:
            with torch.no_grad():
                model[2].weight[0, 0] += hvd.rank()
        model[0].requires_grad_(False)  # a frozen parameter may differ
        if kind == "next_forward":
            options["rule"] = hvd.rules.NextForward(model)
        optimizer = distributed(model.parameters(), 0.1, check_replicas_every=compared, **options)
        if hvd.rank() == 0 or kind != "a rank without a gradient":
            loss_of(model, share(0)).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if compared is None:
            optimizer.step()
        else:
            with pytest.raises(ReplicasDiffer) as caught:
                optimizer.step()
            assert "parameter 2" in str(caught.value)
            assert_close(model.parameters(), before, rtol=0, atol=0)
        optimizer.close()
    model = perceptron(0)
    with torch.no_grad():
        model[0].weight += hvd.rank()
    model[0].requires_grad_(False)
    take_steps(model, distributed(model.parameters()), share, [0])
