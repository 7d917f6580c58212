"""Optimizers of copies have the settings and the state of those that they are made of, and nothing of other parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.copies import of_copies


def stepped() -> tuple[torch.optim.SGD, list[nn.Parameter]]:
    """Return an optimizer that has a state, of two param groups."""
    parameters = [nn.Parameter(torch.full((2,), float(number))) for number in range(3)]
    groups = [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.5)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full((2,), float(number + 1))
    optimizer.step()
    return optimizer, parameters


def copies_of(*parameters: nn.Parameter) -> dict[Tensor, nn.Parameter]:
    return {parameter: nn.Parameter(parameter.detach().clone()) for parameter in parameters}


def test_the_copies_of_all_step_as_the_originals_do() -> None:
    optimizer, parameters = stepped()
    copies = copies_of(*parameters)
    made = of_copies(optimizer, copies)
    for parameter, copied in copies.items():
        parameter.grad = copied.grad = torch.ones(2)
    optimizer.step()
    before = [copied.detach().clone() for copied in copies.values()]
    made.step()
    for parameter, copied, unmoved in zip(parameters, copies.values(), before, strict=True):
        assert torch.equal(parameter, copied)
        assert not torch.equal(copied, unmoved)  # and the optimizer left them alone


class NotCopied:
    def __deepcopy__(self, memo: object) -> NotCopied:
        raise AssertionError("the state of a parameter without a copy is copied")


def test_nothing_is_left_of_parameters_without_a_copy() -> None:
    optimizer, parameters = stepped()
    optimizer.state[parameters[0]]["large"] = NotCopied()
    (copied,) = (copies := copies_of(parameters[1])).values()
    made = of_copies(optimizer, copies)
    assert [(group["lr"], group["params"]) for group in made.param_groups] == [(0.5, [copied]), (0.25, [])]
    assert list(made.state) == [copied]
    assert made.state_dict()["state"][0]["momentum_buffer"].tolist() == [2.0, 2.0]
    assert len(optimizer.state) == 3
