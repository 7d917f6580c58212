"""What Horovod's users reported as failing in their training scripts, done as they did it: it works, and on two ranks gives what
one process gives.

What torch builds around an optimizer is tested further in test_trainer_torch_features.py, accumulation in
test_trainer_accumulation.py, two optimizers in test_trainer_gradients.py.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

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
    perceptron,
    share,
)

Wrap = Callable[..., torch.optim.Optimizer]
Data = Callable[..., tuple[Tensor, Tensor]]
Training = Callable[[Wrap, Data], list[Tensor]]
"""What a script does, whose optimizers wrap() is given; returns the weights."""


def unwrapped(optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
    return optimizer


def part_of_batch(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """What the ranks have together, where each has a part of its share."""
    inputs, targets = batch(step)
    rows = torch.cat(torch.arange(len(inputs)).chunk(2 * parts)[part::parts])
    return inputs[rows], targets[rows]


@in_world
def in_ranks(train: Training) -> list[Tensor]:
    made = []

    def wrap(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
        made.append(hvd.DistributedOptimizer(*arguments, **options))
        return made[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = train(wrap, share)
    assert_same_on_all_ranks(weights)
    for optimizer in made:
        optimizer.close()
    return copies(weights)


def check(ranks: Worlds, train: Training, rtol: float = 1e-4) -> None:
    expected = train(unwrapped, part_of_batch)
    for weights in ranks(2).run(in_ranks, train):
        assert_close(weights, expected, rtol=rtol, atol=rtol / 10)


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def reset_to_none(wrap: Wrap, data: Data) -> list[Tensor]:
    model = perceptron()
    optimizer = wrap(sgd(model), named_parameters=model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        loss_of(model, data(step)).backward()
        optimizer.step()
    optimizer.zero_grad(True)
    assert all(p.grad is None for p in model.parameters())
    return list(model.parameters())


def test_zero_grad_with_set_to_none(ranks: Worlds) -> None:
    """The user called optimizer.zero_grad(set_to_none=True), which was a TypeError."""
    check(ranks, reset_to_none)


def reset_late(wrap: Wrap, data: Data) -> list[Tensor]:
    model = perceptron()
    optimizer = wrap(sgd(model), named_parameters=model.named_parameters())
    for step in range(STEPS):
        loss_of(model, data(9)).backward()
        optimizer.zero_grad()  # this batch was a bad one
        loss_of(model, data(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def test_zero_grad_between_backward_and_step(ranks: Worlds) -> None:
    """The user dropped a batch by zero_grad() after its backward(), which was an AssertionError about a race."""
    check(ranks, reset_late)


def use_closures(wrap: Wrap, data: Data) -> list[Tensor]:
    model = perceptron()
    optimizer = wrap(sgd(model), named_parameters=model.named_parameters())
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, data(step))
            loss.backward()
            return loss

        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        # the loss of all ranks, not that of this one
        with torch.no_grad():
            torch.testing.assert_close(loss.detach(), expected_loss(step, data))
    return list(model.parameters())


def expected_loss(step: int, data: Data) -> Tensor:
    """The loss in this step of training in one process."""
    model = perceptron()
    optimizer = sgd(model)
    with torch.enable_grad():
        for past in range(step):
            optimizer.zero_grad()
            loss_of(model, batch(past)).backward()
            optimizer.step()
        return loss_of(model, batch(step)).detach()


def test_closures(ranks: Worlds) -> None:
    """The user gave step() a closure; it was called in the middle of an exchange, with gradients of one rank."""
    check(ranks, use_closures)


def use_lbfgs(wrap: Wrap, data: Data) -> list[Tensor]:
    model = perceptron()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    optimizer = wrap(inner, named_parameters=model.named_parameters())
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, data(step))
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        if hvd.is_initialized():
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return list(model.parameters())


def test_lbfgs(ranks: Worlds) -> None:
    """The user trained with LBFGS, whose state broadcast_optimizer_state() refused, and whose line search took other decisions
    on every rank."""
    check(ranks, use_lbfgs, rtol=1e-3)


def use_schedulers(wrap: Wrap, data: Data) -> list[Tensor]:
    model = perceptron()
    optimizer = wrap(sgd(model), named_parameters=model.named_parameters())
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        torch.optim.lr_scheduler.StepLR(optimizer, 2),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    ]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()
        schedulers[0].step()
        schedulers[1].step()
        schedulers[2].step(1.0)  # type: ignore[call-arg]
    assert optimizer.param_groups[0]["lr"] < 0.01
    return list(model.parameters())


def test_schedulers_without_warnings(ranks: Worlds) -> None:
    """The user called scheduler.step() after optimizer.step() and was warned of having called it before, as the optimizer's class
    had been made anew. (Here every warning is an error.)"""
    check(ranks, use_schedulers)


def scale_and_clip(wrap: Wrap, data: Data) -> list[Tensor]:
    model = perceptron()
    optimizer = wrap(sgd(model), named_parameters=model.named_parameters(), backward_passes_per_step=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            inputs, targets = data(step, part, 2)
            if step == 2 and part == 1 and torch.equal(inputs[-1], batch(step)[0][-1]):
                inputs = inputs.clone()
                inputs[-1] = math.inf  # on one rank
            scaler.scale(loss_of(model, (inputs, targets)) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2048.0  # twice as large after two steps, half in the third, twice after two more
    return list(model.parameters())


def test_grad_scaler_and_clipping_without_synchronize(ranks: Worlds) -> None:
    """The user unscaled and clipped between backward() and step(), with accumulation, and without synchronize() and
    skip_synchronize(): gradients were clipped before they were averaged, exchanged twice, or one rank alone skipped the step."""
    check(ranks, scale_and_clip)


def accumulate_unevenly(wrap: Wrap, data: Data) -> list[Tensor]:
    model = perceptron()
    optimizer = wrap(sgd(model), named_parameters=model.named_parameters(), backward_passes_per_step=3)
    for parts in (3, 2, 3, 1):  # the epochs end in the middle of an accumulation
        for part in range(parts):
            loss_of(model, data(parts, part, parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def test_accumulation_that_counts_itself(ranks: Worlds) -> None:
    """The user's epoch had a number of batches that backward_passes_per_step does not divide, which was an AssertionError at its
    end, or in the next epoch."""
    check(ranks, accumulate_unevenly)


def two_in_one_backward(wrap: Wrap, data: Data) -> list[Tensor]:
    body, head = perceptron(1), nn.Linear(3, 3)
    nn.init.eye_(head.weight)
    nn.init.zeros_(head.bias)
    optimizers = [wrap(sgd(net, rate), net.named_parameters()) for net, rate in ((body, 0.1), (head, 0.01))]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(nn.Sequential(body, head), data(step)).backward()
        for optimizer in optimizers[:: -1 if step % 2 else 1]:
            optimizer.step()
    return [*body.parameters(), *head.parameters()]


def test_two_optimizers(ranks: Worlds) -> None:
    """The user gave parts of one model optimizers of their own, both with parameters called "0.weight": duplicate names."""
    check(ranks, two_in_one_backward)


def adversaries(wrap: Wrap, data: Data) -> list[Tensor]:
    torch.manual_seed(5)
    generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    of_generator = wrap(torch.optim.Adam(generator.parameters(), lr=0.01), generator.named_parameters())
    of_critic = wrap(
        torch.optim.Adam(critic.parameters(), lr=0.01), critic.named_parameters(), backward_passes_per_step=2
    )
    logits = nn.functional.binary_cross_entropy_with_logits
    for step in range(STEPS):
        noise, real = data(step)
        fake = generator(noise)
        of_critic.zero_grad()
        said = critic(real)
        logits(said, torch.ones_like(said)).backward()
        said = critic(fake.detach())
        logits(said, torch.zeros_like(said)).backward()
        of_critic.step()
        of_generator.zero_grad()
        said = critic(fake)  # reaches the critic's parameters, too, which are not to step
        logits(said, torch.ones_like(said)).backward()
        of_generator.step()
    return [*generator.parameters(), *critic.parameters()]


def test_a_gan(ranks: Worlds) -> None:
    """The user trained a GAN: the generator's backward() goes through the critic, whose hooks fired a second time before its
    step, which was an AssertionError, or a hang."""
    check(ranks, adversaries)


def freeze(wrap: Wrap, data: Data) -> list[Tensor]:
    model = perceptron()
    model.register_parameter("version", nn.Parameter(torch.tensor([3]), requires_grad=False))
    model[0].requires_grad_(False)
    optimizer = wrap(sgd(model), named_parameters=model.named_parameters())
    start = copies(model.parameters())
    for step in range(STEPS):
        if step == 2:
            assert all(torch.equal(a, b) for a, b in zip(start[:3], list(model.parameters())[:3], strict=True))
            model[0].requires_grad_(True)
            model[4].requires_grad_(False)
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()
    return list(model.parameters())


def test_frozen_layers(ranks: Worlds) -> None:
    """The user fine-tuned a model of which some layers were frozen, then others: step() waited for gradients that never came."""
    check(ranks, freeze)


def use_bfloat16(wrap: Wrap, data: Data) -> list[Tensor]:
    model = perceptron().to(torch.bfloat16)
    optimizer = wrap(sgd(model), named_parameters=model.named_parameters())
    for step in range(STEPS):
        inputs, targets = data(step)
        optimizer.zero_grad()
        loss_of(model, (inputs.bfloat16(), targets.bfloat16())).backward()
        optimizer.step()
    return [parameter.float() for parameter in model.parameters()]


@in_world
def verbs_of_bfloat16() -> None:
    tensor = torch.full((3,), 1.5 + hvd.rank(), dtype=torch.bfloat16)
    assert hvd.allreduce(tensor).tolist() == [2.0] * 3
    assert hvd.allgather(tensor).dtype is torch.bfloat16
    assert hvd.broadcast(tensor, 1).tolist() == [2.5] * 3


def test_bfloat16(ranks: Worlds) -> None:
    """The user's tensors and gradients were bfloat16, a dtype that no verb took."""
    check(ranks, use_bfloat16, rtol=0.2)
    ranks(2).run(verbs_of_bfloat16)


def weight_decay_and_broadcast(wrap: Wrap, data: Data) -> list[Tensor]:
    model = perceptron()
    before = copies(model.parameters())
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5), model.named_parameters())
    if hvd.is_initialized():
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()
    return list(model.parameters())


def test_broadcasting_state_takes_no_step(ranks: Worlds) -> None:
    """The user broadcast the state of an AdamW that had none yet: a step with zero gradients was taken to make it, and the decay
    moved the weights."""
    check(ranks, weight_decay_and_broadcast, rtol=1e-3)


def groups_and_predivision(wrap: Wrap, data: Data) -> list[Tensor]:
    model = perceptron()
    groups = [list(model[0].parameters()), list(model[2].parameters())]
    optimizer = wrap(sgd(model), model.named_parameters(), gradient_predivide_factor=4.0, groups=groups)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()
    return list(model.parameters())


def test_predivision_with_groups(ranks: Worlds) -> None:
    """The user gave groups and a gradient_predivide_factor, which was ignored without a word."""
    check(ranks, groups_and_predivision)
