"""Optimizers of copies have the settings and the state of those that they are made of, and nothing of other parameters."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradwire.trainer.optimizers.copies import of_copies


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


def test_a_state_that_an_optimizer_makes_in_its_constructor() -> None:
    """It must not lack a part, as Adagrad notices when it is copied."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    copies = copies_of(parameters[1])
    made = of_copies(torch.optim.Adagrad(parameters, initial_accumulator_value=0.5), copies)
    assert [state["sum"].tolist() for state in made.state.values()] == [[0.5, 0.5]]
    assert list(made.state) == list(copies.values())


def test_the_state_moves_with_the_parameters() -> None:
    """To another device, of which there is one on every machine."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {
        "mean": torch.ones(2),
        "nested": [torch.ones(2)],
        "there": torch.ones(2, device="meta"),
    }
    copied = nn.Parameter(torch.empty(2, device="meta"))
    state = of_copies(optimizer, {parameter: copied}).state[copied]
    assert {tensor.device.type for tensor in (state["mean"], *state["nested"], state["there"])} == {"meta"}
    assert optimizer.state[parameter]["mean"].device.type == "cpu"


class NotCopied:
    def __deepcopy__(self, memo: object) -> None:
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


class WithAttributes(torch.optim.SGD):
    """Steps by what it keeps beside its state: decay, and how often it has stepped."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        super().__init__(parameters, lr=1.0)
        self.decay = decay
        self.steps = [0]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.steps[0] += 1
        for group in self.param_groups:
            group["lr"] = self.decay ** self.steps[0]
        super().step()


def test_attributes_of_its_own_are_copied() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = WithAttributes([parameter], decay=0.5)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # which wraps step() in an attribute
    (copied,) = (copies := copies_of(parameter)).values()
    made = of_copies(optimizer, copies)
    copied.grad = torch.ones(2)
    made.step()
    made.step()
    assert copied.tolist() == [-0.75, -0.75]
    assert parameter.tolist() == [0.0, 0.0]
    assert optimizer.steps == [0]


def first_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"][:1]


@pytest.mark.parametrize(
    ("made", "error"), [(lambda _: threading.Lock(), "cannot be copied"), (first_parameters, "holds parameters")]
)
def test_an_attribute_that_cannot_be_copied_is_named(
    made: Callable[[torch.optim.Optimizer], object], error: str
) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.extra = made(optimizer)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=rf"SGD\.extra {error}"):
        of_copies(optimizer, copies_of(parameter))
