"""Gradients whose memory the program has a hand in: given other memory, moved, its own, detached, changed by its hooks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from tests.ranks.training import (
    STEPS,
    Data,
    assert_as_in_one_process,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    loss_of,
    on_ranks,
    perceptron,
    sgd,
    share,
    take_steps,
)

Optimizer = torch.optim.Optimizer
Change = Callable[[nn.Module], object]


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def by_data(model: nn.Module) -> None:
    for gradient in gradients_of(model):
        gradient.data = gradient.data / (1 + gradient.data.norm())


def by_set(model: nn.Module) -> None:
    for gradient in gradients_of(model):
        gradient.set_(gradient * 0.5)


def there_and_back(model: nn.Module) -> None:
    """Do what .cuda() and .cpu() do, which is the same to parameters and gradients."""
    model.double()
    model.float()


def by_detaching(model: nn.Module) -> None:
    """Do what zero_grad() of old optimizers does."""
    for gradient in gradients_of(model):
        gradient.detach_()
        gradient.zero_()


CHANGES: dict[str, Change] = {"data": by_data, "set_": by_set, "to": there_and_back}
RULES: dict[str, dict[str, Any]] = {
    "backward": {},
    "next_forward": {"rule": hvd.rules.NextForward},
    "sharded": {"rule": hvd.rules.Sharded()},
    "copies": {"gradient_as_bucket_view": False},
}


@on_ranks(2)
@pytest.mark.parametrize("rule", RULES)
def test_gradients_may_get_other_memory(rule: str) -> None:
    """Between backward() and step(), where with rules.Sharded it counts if the values are the same; and after step()."""

    def train(model: nn.Module, optimizer: Optimizer, data: Data) -> None:
        for step, (name, after, set_to_none) in enumerate(
            (name, after, set_to_none)
            for name in CHANGES
            for after in (False, True)
            for set_to_none in (False, True)
            if rule != "sharded" or after
        ):
            loss_of(model, data(step)).backward()
            if after:
                optimizer.step()
            if isinstance(optimizer, hvd.DistributedOptimizer) and (after or name == "to"):
                optimizer.settle()  # before parameters are used
            CHANGES[name](model)
            if not after:
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    assert_as_in_one_process(train, **RULES[rule])


@on_ranks(2)
def test_a_change_of_a_share_of_a_gradient_is_not_ignored() -> None:
    for change in CHANGES.values():
        model = perceptron()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), rule=hvd.rules.Sharded())
        loss_of(model, share(0)).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        change(model)
        with pytest.raises(RuntimeError, match=r"changed since backward"):
            optimizer.step()
        assert_close(model.parameters(), before, rtol=0, atol=0)
        optimizer.close()


def views_of(model: nn.Module) -> Tensor:
    """Make the gradients views of one tensor, and return it."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


@on_ranks(2)
@pytest.mark.parametrize("rule", RULES)
def test_the_programs_own_buffer_has_the_averages(rule: str) -> None:
    """The program clips, and clears, the gradients in its buffer, which it makes after a step with others; in the end it fills
    the buffer by itself."""

    def train(model: nn.Module, optimizer: Any, data: Data) -> list[float]:
        is_whole = rule != "sharded" or data is batch
        take_steps(model, optimizer, data, [0])
        if not is_whole:
            optimizer.zero_grad()
        flat, norms = views_of(model), []
        for step in range(1, STEPS):
            if is_whole:
                flat.zero_()
            else:
                optimizer.zero_grad(set_to_none=False)  # with rules.Sharded, the next gradient needs it
            loss_of(model, data(step)).backward()
            if rule != "sharded":
                flat.clamp_(-0.1, 0.1)
                norms.append(float(flat.norm()))
            elif data is batch:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                norms.append(float(flat.norm()))
            else:
                optimizer.clip_grad_norm_(0.1)
                total = hvd.allreduce(flat, op=hvd.Sum)  # zeros outside of this rank's share
                norms.append(float(total.norm()))
            optimizer.step()
            assert all(gradient.data_ptr() >= flat.data_ptr() for gradient in gradients_of(model))
        optimizer.zero_grad(set_to_none=False)
        flat.copy_(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model, data(9)), [*model.parameters()])])
        )
        optimizer.step()
        return norms

    assert_as_in_one_process(train, **RULES[rule])


@on_ranks(2)
@pytest.mark.parametrize("rule", ["backward", "next_forward", "copies"])
def test_gradients_may_be_detached_and_kept(rule: str) -> None:
    def train(model: nn.Module, optimizer: Optimizer, data: Data) -> list[float]:
        kept: list[Tensor] = []
        for step in range(STEPS):
            by_detaching(model)
            loss_of(model, data(step)).backward()
            optimizer.step()
        if rule == "copies" or data is batch:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, data(step)).backward()
                kept.append(gradients_of(model)[0])
        return [float(gradient.sum()) for gradient in kept] if rule == "copies" else []

    assert_as_in_one_process(train, **RULES[rule])


@on_ranks(2)
@pytest.mark.parametrize("rule", ["backward", "next_forward", "sharded"])
def test_hooks_that_change_gradients_run_before_the_exchange(rule: str) -> None:
    """They are registered before and after the optimizer is made, and in mid-training; one of them replaces the gradient. The
    mean of clipped gradients is not that of the joint batch, so it is computed from those of each rank's part."""

    def clip(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.02, 0.02)

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5

    alone, together = perceptron(), perceptron()
    options = {"rule": hvd.rules.NextForward(together)} if rule == "next_forward" else RULES[rule]
    for parameter in list(together.parameters())[::2]:
        parameter.register_post_accumulate_grad_hook(clip)
    optimizer = hvd.DistributedOptimizer(sgd(together.parameters()), bucket_bytes=100, **options)
    for parameter in list(together.parameters())[1::2]:
        parameter.register_post_accumulate_grad_hook(clip)
    reference = sgd(alone.parameters())
    for step in range(STEPS):
        if step == 3:
            for parameter in together.parameters():
                parameter.register_post_accumulate_grad_hook(halve)
        take_steps(together, optimizer, share, [step])
        means = [torch.zeros_like(parameter) for parameter in alone.parameters()]
        for part in range(2):
            alone.zero_grad()
            loss_of(alone, batch(step, part, 2)).backward()
            for mean, gradient in zip(means, gradients_of(alone), strict=True):
                mean += gradient.clamp(-0.02, 0.02) * (0.25 if step >= 3 else 0.5)
        for parameter, mean in zip(alone.parameters(), means, strict=True):
            parameter.grad = mean
        reference.step()
    optimizer.close()
    assert_same_on_all_ranks(together.parameters())
    assert_close(together.parameters(), alone.parameters(), rtol=1e-4, atol=1e-5)


MOVES: dict[str, Change] = {
    "double": nn.Module.double,
    "bfloat16": nn.Module.bfloat16,
    "a part": lambda model: model[2].double(),  # type: ignore[index]
}


@on_ranks(2)
@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("rule", ["backward", "next_forward", "sharded"])
def test_parameters_may_be_moved(rule: str, compression: str) -> None:
    """Before the first step, and in mid-training; gradients and the weights have the digits of the new dtype."""

    class Mixed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x.to(layer.weight.dtype) if isinstance(layer, nn.Linear) else x)
            return x

    for move in MOVES.values():
        for at in (0, 2):

            def model_of() -> nn.Module:
                return Mixed(*perceptron())

            def train(model: nn.Module, optimizer: Optimizer, data: Data, move: Change = move, at: int = at) -> None:
                for step in range(4):
                    if step == at:
                        if isinstance(optimizer, hvd.DistributedOptimizer):
                            optimizer.settle()
                        move(model)
                    optimizer.zero_grad()
                    inputs, targets = data(step)
                    output = model(inputs)
                    nn.functional.mse_loss(output.double(), targets.double()).backward()
                    optimizer.step()

            options = {**RULES[rule], **({} if compression == "none" else {"policy": {"0.*": compression}})}
            tolerance = 1e-10 if move is nn.Module.double and at == 0 and compression == "none" else 0.03
            plain = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731  # without state of a dtype
            assert_as_in_one_process(train, plain, model_of, rtol=tolerance, atol=tolerance, **options)
