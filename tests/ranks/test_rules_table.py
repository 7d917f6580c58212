"""What torch's programs do around an optimizer, a row of FEATURES each, by every rule: ranks train as one process does on the
batches of all of them, or are refused. Replicas are equal bit for bit, and so are the rules that exchange the same gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradwire as hvd
from gradwire.collectives.compression.powersgd import PowerSGD
from tests.harness import Worlds
from tests.ranks.training import (
    STEPS,
    Data,
    assert_close,
    assert_equal,
    assert_same_on_all_ranks,
    batch,
    copies,
    in_world,
    loss_of,
    on_ranks,
    share,
    state_of,
    take_steps,
    through_a_file,
)

Optimizer = torch.optim.Optimizer


class Net(nn.Module):
    """Has a tied matrix, a parameter of a module that is never called, one of its own, and branches that `uses` selects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 80)
        self.scale = nn.Parameter(torch.ones(80))
        self.position = nn.Embedding(4, 80)
        self.blocks = nn.Sequential(nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 80), nn.Tanh())
        self.last = nn.Linear(80, 3)
        self.back = nn.Linear(3, 80)
        self.uses: set[int] = {0}
        self.branches = nn.ModuleList(nn.Linear(80, 80) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.first(x) * self.scale + self.position.weight.mean(0))
        for number in self.uses:
            x = x + self.branches[number](x)
        y: Tensor = self.last(x)
        return y + F.linear(torch.tanh(self.back(y)), self.last.weight)


def used_wholly() -> Net:
    """Return a model whose parameters all have gradients."""
    model = Net()
    model.branches = nn.ModuleList([model.branches[0]])
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups with different options."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.05}]


def nesterov(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(groups_of(model), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=0.01, weight_decay=0.1, amsgrad=True)


def lbfgs(model: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")


# How a model is trained: alike by one process, which `batch` gives all data, and by ranks


def plainly(model: nn.Module, optimizer: Optimizer, data: Data) -> None:
    take_steps(model, optimizer, data, range(STEPS))


def in_parts(model: nn.Module, optimizer: Optimizer, data: Data, *, set_to_none: bool, parts: int = 2) -> None:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(parts):
            (loss_of(model, data(step, part, parts)) / parts).backward()
        optimizer.step()


def without_sync(model: nn.Module, optimizer: Any, data: Data) -> None:
    """Accumulate the first part of each batch locally."""
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync() if isinstance(optimizer, hvd.DistributedOptimizer) else nullcontext():
            loss_of(model, data(step, 0, 2)).backward()
        loss_of(model, data(step, 1, 2)).backward()
        optimizer.step()


def onto_the_average(model: nn.Module, optimizer: Any, data: Data) -> None:
    """Call backward() twice for one step, the second onto what was exchanged; read gradients after the step."""
    for step in range(STEPS):
        for part in range(2):
            loss_of(model, data(step, part, 2)).backward()
        optimizer.step()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.zero_grad(set_to_none=False)


def with_gradients_that_stay(model: nn.Module, optimizer: Any, data: Data) -> None:
    """Let gradients pile up over two steps, and step twice with the same ones."""
    for step in range(STEPS):
        loss_of(model, data(step)).backward()
        optimizer.step()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def with_a_gradient_replaced(model: Any, optimizer: Any, data: Data) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        model.first.weight.grad = torch.ones_like(model.first.weight)
        optimizer.step()


def clipped(model: nn.Module, optimizer: Any, data: Data, *, by_ours: bool) -> list[float]:
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (100 * loss_of(model, data(step))).backward()
        if by_ours and isinstance(optimizer, hvd.DistributedOptimizer):
            norms.append(float(optimizer.clip_grad_norm_(1.0)))
        else:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return norms


def scaled(model: nn.Module, optimizer: Optimizer, data: Data, *, unscale: bool) -> list[float]:
    """Unscale and clip between two passes and the step. In step 2 the last sample of the global batch overflows, which one rank
    may have alone, and all ranks skip the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            inputs, targets = data(step, part, 2)
            if step == 2 and torch.equal(inputs[-1], batch(step)[0][-1]):
                inputs[-1] = math.inf
            scaler.scale(loss_of(model, (inputs, targets)) / 2).backward()
        if unscale and step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[2] < scales[1]
    return scales


def scheduled(model: nn.Module, optimizer: Any, data: Data) -> list[float]:
    """Schedulers, and a hand that changes a rate in place, come between step() and the next forward."""
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    schedulers = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [2])
    rates = []
    for step in range(STEPS):
        take_steps(model, optimizer, data, [step])
        optimizer.param_groups[1]["lr"] *= 0.5
        schedulers.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


def by_closures(model: nn.Module, optimizer: Optimizer, data: Data) -> list[float]:
    """LBFGS decides by the loss how often to call a closure, so all ranks must see the same one. The first returns a float."""
    losses = []
    for step in range(STEPS):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, data(step))
            loss.backward()
            return loss if step else loss.item()

        losses.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
    return losses


def freezing(model: Any, optimizer: Optimizer, data: Data) -> None:
    """Begin with a frozen layer; thaw it, freeze another one, thaw that."""
    for step, trainable in enumerate(["bl", "fbl", "fbl", "fb", "fb", "l", "fbl", "fbl"]):
        for layer in (model.first, model.blocks, model.last):
            layer.requires_grad_({model.first: "f", model.blocks: "b", model.last: "l"}[layer] in trainable)
        take_steps(model, optimizer, data, [step])


#: By step and part of the batch, the branches that it uses: other ones, one that nobody uses, one used no more, none at all.
USED: list[list[set[int]]] = [
    [{0}, {1}],
    [{0, 1}, {1, 2}],
    [{2}, {0}],
    [{1}, {1}],
    [set(), {2}],
    [set(), set()],
    [{0}, {2}],
]


def in_branches(model: Any, optimizer: Optimizer, data: Data, *, set_to_none: bool) -> None:
    """Each half of the batch uses other branches; with two ranks, each rank has one half."""
    for step, used in enumerate(USED):
        optimizer.zero_grad(set_to_none=set_to_none)
        halves = [(hvd.rank(), data(step))] if data is share else [(part, data(step, part, 2)) for part in range(2)]
        for part, half in halves:
            model.uses = used[part]
            (loss_of(model, half) / len(halves)).backward()
        if set_to_none and data is share:
            reached = [any(number in each for each in used) for number in range(3)]
            assert [branch.weight.grad is not None for branch in model.branches] == reached
        optimizer.step()


def skipping(model: Any, optimizer: Optimizer, data: Data) -> None:
    """One half of the batch, which one of two ranks has, gives no gradient in some steps; zero_grad() is the model's."""
    for step in range(4):
        model.zero_grad()
        halves = [(hvd.rank(), data(step))] if data is share else [(part, data(step, part, 2)) for part in range(2)]
        for part, half in halves:
            if part != {0: 1, 1: 0}.get(step):
                (loss_of(model, half) / len(halves)).backward()
        optimizer.step()


def growing(model: Any, optimizer: Optimizer, data: Data) -> None:
    """Add layers between steps, and between backward() and step()."""
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.02})
        optimizer.zero_grad()
        model.zero_grad()
        loss_of(model, data(step)).backward()
        if step == 3:
            optimizer.add_param_group({"params": list(model.first.parameters())})
        optimizer.step()
    assert len(optimizer.param_groups) == 3


def resumed(model: nn.Module, optimizer: Any, data: Data) -> float:
    """Train and save; ranks go astray, load and train on."""
    for step in range(4):
        if step == 2 and isinstance(optimizer, hvd.DistributedOptimizer):
            state = through_a_file(optimizer.state_dict())
            weights = copies(model.parameters())
            take_steps(model, optimizer, data, [9])
            optimizer.param_groups[0]["lr"] = 7.0
            optimizer.load_state_dict(state)
            for parameter, saved in zip(model.parameters(), weights, strict=True):
                parameter.data.copy_(saved)
        take_steps(model, optimizer, data, [step])
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


def checkpointed(model: Any, optimizer: Optimizer, data: Data, *, reentrant: bool) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = data(step)
        hidden = inputs.requires_grad_(True)
        for layer in (model.first, model.blocks, model.last):
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        nn.functional.mse_loss(hidden, targets).backward()
        optimizer.step()


SAME_GRADIENTS = ("synchronous", "next_forward", "sharded")
RULES: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "synchronous": lambda model: {},
    "next_forward": lambda model: {"rule": hvd.rules.NextForward(model)},
    "sharded": lambda model: {"rule": hvd.rules.Sharded()},
    "adasum": lambda model: {"op": hvd.Adasum},
    "local": lambda model: {"rule": hvd.rules.LocalUpdates(every=1)},
}


@dataclass(frozen=True)
class Feature:
    """train: one of the functions above. make: the optimizer. options: of the DistributedOptimizer, beside the rule.

    refused: the errors of the rules that do not support it. linear: whether the mean of what ranks make of their parts is what
    one process makes of all of them; if not, rules that combine movements get the whole batch on each rank. exact: whether
    rules.Sharded has the same bits as without. deferred: whether rules.NextForward puts off steps.
    """

    train: Callable[..., Any]
    make: Callable[[Any], Optimizer] = nesterov
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, type[Exception]] = field(default_factory=dict)
    model_of: Callable[[], Any] = used_wholly
    linear: bool = True
    exact: bool = True
    deferred: bool = True
    rules: tuple[str, ...] = tuple(RULES)
    rtol: float = 1e-4
    atol: float = 1e-5


def pick(*rules: str) -> dict[str, Any]:
    return {"rules": ("synchronous", *rules)}


FEATURES: dict[str, Feature] = {
    "nothing else": Feature(plainly),
    "a bucket for each": Feature(plainly, options={"bucket_bytes": 1}),
    "one bucket, AdamW": Feature(plainly, adamw, {"bucket_bytes": 1 << 20}, linear=False),
    "LAMB": Feature(plainly, lambda m: hvd.optimizers.LAMB(groups_of(m), lr=0.01), **pick("next_forward")),
    "fused Adam": Feature(plainly, lambda m: torch.optim.Adam(groups_of(m), fused=True), **pick("next_forward")),
    "predivided": Feature(plainly, options={"gradient_predivide_factor": 3.0}, **pick("next_forward", "sharded")),
    "fp16": Feature(plainly, options={"compression": "fp16"}, rtol=0.01, atol=0.01, **pick("next_forward", "sharded")),
    "bf16": Feature(plainly, options={"compression": "bf16"}, rtol=0.05, atol=0.05, **pick("next_forward", "sharded")),
    "int8": Feature(plainly, options={"compression": hvd.ErrorFeedback("int8")}, atol=0.05, **pick("next_forward")),
    "powersgd": Feature(plainly, options={"compression": "powersgd"}, atol=1, deferred=False, **pick("next_forward")),
    "no_sync, int8": Feature(
        without_sync, options={"compression": "int8"}, atol=0.02, **pick("next_forward", "sharded")
    ),
    "closures, PowerSGD": Feature(
        by_closures, options={"compression": PowerSGD(rank=64)}, deferred=False, atol=0.02, **pick("next_forward")
    ),
    "accumulation": Feature(partial(in_parts, set_to_none=True), adamw, {"backward_passes_per_step": 2}, linear=False),
    "accumulation, zeroed": Feature(partial(in_parts, set_to_none=False), options={"backward_passes_per_step": 2}),
    "an early step": Feature(
        partial(in_parts, set_to_none=True), options={"backward_passes_per_step": 3}, deferred=False
    ),
    "zeroed in place": Feature(partial(in_parts, set_to_none=False, parts=1)),
    "no_sync": Feature(without_sync),
    "onto the average": Feature(onto_the_average, refused={"sharded": RuntimeError}),
    "gradients that stay": Feature(with_gradients_that_stay, refused={"sharded": RuntimeError}),
    "a gradient replaced": Feature(with_a_gradient_replaced, refused={"sharded": RuntimeError}, deferred=False),
    "clipping": Feature(
        partial(clipped, by_ours=False), refused={"sharded": RuntimeError}, linear=False, deferred=False
    ),
    "clipping by ours": Feature(partial(clipped, by_ours=True), linear=False, exact=False, deferred=False),
    "GradScaler": Feature(
        partial(scaled, unscale=True),
        options={"backward_passes_per_step": 2},
        refused={"sharded": RuntimeError},
        linear=False,
        deferred=False,
    ),
    "GradScaler, fused": Feature(
        partial(scaled, unscale=True),
        lambda m: torch.optim.AdamW(groups_of(m), lr=0.01, fused=True),
        {"backward_passes_per_step": 2},
        refused={"sharded": RuntimeError},
        linear=False,
        deferred=True,  # as it looks, since the skipped step is taken, and changes nothing
    ),
    "schedulers": Feature(scheduled),
    "closures": Feature(by_closures, refused={"sharded": ValueError}, linear=False, deferred=False),
    "closures, LBFGS": Feature(
        by_closures, lbfgs, refused=dict.fromkeys(("sharded", "next_forward"), ValueError), linear=False
    ),
    "freezing and thawing": Feature(freezing),
    "branches": Feature(partial(in_branches, set_to_none=True), model_of=Net, deferred=False, linear=False),
    "branches, zeroed": Feature(partial(in_branches, set_to_none=False), model_of=Net, linear=False),
    "no backward": Feature(skipping, linear=False),
    "add_param_group": Feature(
        growing,
        lambda model: torch.optim.SGD(model.blocks.parameters(), lr=0.1, momentum=0.9),
        refused={"local": ValueError, "sharded": RuntimeError},  # between backward() and step()
    ),
    "resumed": Feature(resumed, adamw, linear=False),
    "checkpointed": Feature(
        partial(checkpointed, reentrant=False), lambda m: torch.optim.SGD(m.blocks.parameters(), lr=0.1)
    ),
    "checkpointed, reentrant": Feature(
        partial(checkpointed, reentrant=True), lambda m: torch.optim.SGD(m.blocks.parameters(), lr=0.1), deferred=False
    ),
}


def by_rule(feature: Feature, rule: str, expected: Any) -> tuple[nn.Module, list[Tensor]]:
    """Train; return the model, and its parameters with the optimizer's state, where it is whole."""
    model, put_off = feature.model_of(), []
    options = {"bucket_bytes": 12_000, **RULES[rule](model), **feature.options}
    optimizer = hvd.DistributedOptimizer(feature.make(model), model.named_parameters(), **options)
    memory, step = [each.detach() for each in model.parameters()], optimizer.step

    def looked_at(_: object, *args: Any) -> Any:
        before = copies(memory)
        loss = step(*args)
        put_off.append(all(map(torch.equal, before, memory)))
        return loss

    object.__setattr__(optimizer, "step", MethodType(looked_at, optimizer))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data = share if rule in SAME_GRADIENTS or (rule == "local" and feature.linear) else batch
            returned = feature.train(model, optimizer, data)
        optimizer.settle()
        state = copies(model.parameters()) if rule == "sharded" else state_of(model, optimizer)
    finally:
        optimizer.close()
    assert expected is None or returned == pytest.approx(expected, rel=1e-3), rule
    assert rule != "next_forward" or any(put_off) == feature.deferred, put_off
    return model, state


@on_ranks(2)
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_by_every_rule(name: str) -> None:
    feature = FEATURES[name]
    alone = feature.model_of()
    expected = feature.train(alone, feature.make(alone), batch)
    whole: list[Tensor] = []
    for rule in feature.rules:
        if rule in feature.refused:
            with pytest.raises(feature.refused[rule]):
                by_rule(feature, rule, expected)
            continue
        model, state = by_rule(feature, rule, expected)
        assert_same_on_all_ranks(model.parameters())
        assert_close(model.parameters(), alone.parameters(), rtol=feature.rtol, atol=feature.atol)
        whole = whole or state
        if rule in SAME_GRADIENTS and (rule != "sharded" or feature.exact):
            assert_equal(state, whole[: len(state)])


def optimizer_by(rule: str, model: nn.Module) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(
        nesterov(model), model.named_parameters(), bucket_bytes=12_000, **RULES[rule](model)
    )


@in_world
def begun() -> dict[str, Any]:
    """Return what this rank saves after three steps, by rule."""
    states = {}
    for rule in RULES:
        optimizer = optimizer_by(rule, model := used_wholly())
        take_steps(model, optimizer, share if rule in SAME_GRADIENTS else batch, range(3))
        states[rule] = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        optimizer.close()
    return states


@in_world
def gone_on(saved: list[dict[str, Any]]) -> None:
    alone = used_wholly()
    take_steps(alone, nesterov(alone), batch, range(6))
    for rule in RULES:
        optimizer = optimizer_by(rule, model := used_wholly())
        mine, *also = [each[rule] for each in saved[hvd.rank() :: hvd.size()]]
        model.load_state_dict(mine["model"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the number of ranks
            optimizer.load_state_dict(
                mine["optimizer"], also=[each["optimizer"] for each in also] if rule in ("sharded", "local") else []
            )
        take_steps(model, optimizer, share if rule in SAME_GRADIENTS else batch, range(3, 6))
        optimizer.close()
        assert_same_on_all_ranks(model.parameters())
        assert_close(model.parameters(), alone.parameters(), rtol=1e-4, atol=1e-5, msg=rule)


def test_training_goes_on_on_another_number_of_ranks(ranks: Worlds) -> None:
    ranks(2).run(gone_on, ranks(3).run(begun))
