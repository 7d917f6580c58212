"""What the tests of the trainer share: small models, batches divided among ranks, and the same training in one process."""

from __future__ import annotations

import functools
import inspect
import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import Communicator
from tests.harness import RUN_TIMEOUT_S, World, Worlds

P = ParamSpec("P")
R = TypeVar("R")
Data = Callable[..., tuple[Tensor, Tensor]]

BATCH = 24  # divisible by the world sizes in use
STEPS = 5


def in_world(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function of a rank between hvd.init() and hvd.shutdown()."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        hvd.init()
        try:
            return function(*args, **kwargs)
        finally:
            hvd.shutdown()

    return run


def on_ranks(*sizes: Any, initialized: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of what each rank does.

    The function runs on so many ranks, or on each of several numbers of them in turn, with the test's parameters and fixtures as
    its arguments; without sizes, parametrize `size` yourself. initialized: whether hvd.init() has been called.
    """

    def make(body: Callable[..., None]) -> Callable[..., None]:
        on_a_rank = in_world(body) if initialized else body

        @functools.wraps(body)
        def test(ranks: Worlds | None = None, size: int = sizes[0] if sizes else 0, **arguments: Any) -> None:
            if ranks is None:  # on a rank, which finds this function by its name
                on_a_rank(**arguments)
            else:
                ranks(size).run(test, **arguments)

        fixtures = ["ranks"] if len(sizes) == 1 else ["ranks", "size"]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in fixtures]
        own = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("size", sizes)(test) if len(sizes) > 1 else test

    return make


def without_a_copy(comm: Communicator) -> bool:
    """Return whether the last reduction in shared memory did not copy its tensor."""
    shared: Any = comm._engine._transport._near.reductions
    return bool(shared.group.context[shared.group.kernels.DIRECT])


def assert_survived(world: World, victims: Iterable[int], deadline_s: float = RUN_TIMEOUT_S) -> list[Any]:
    """Return what each rank but the victims returned of what the world has started, within a deadline."""
    survivors = [rank for rank in range(world.size) if rank not in set(victims)]
    outcomes = world.collect(deadline_s, ranks=survivors)
    for outcome in outcomes:
        assert outcome.status == "returned", str(outcome)
    return [outcome.value for outcome in outcomes]


def perceptron(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step, inputs and targets, or one of `parts` pieces of it."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs, targets = torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)
    return inputs.chunk(parts)[part], targets.chunk(parts)[part]


def share(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the global batch, or one of `parts` pieces of that."""
    length = BATCH // hvd.size() // parts
    start = hvd.rank() * length * parts + part * length
    inputs, targets = batch(step)
    return inputs[start : start + length], targets[start : start + length]


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = data
    return nn.functional.mse_loss(model(inputs), targets)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that moves a parameter whose gradient is zero, but not one that has none."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def distributed(parameters: Iterable[Tensor], lr: float = 1.0, **options: Any) -> hvd.DistributedOptimizer:
    """Return a DistributedOptimizer of plain SGD."""
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=lr), **options)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, steps: Iterable[int]) -> list[float]:
    """Train on the batches of these steps; return the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, data(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_as_in_one_process(
    train: Callable[[Any, Any, Data], Any],
    make: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: sgd(model.parameters()),
    model_of: Callable[[], nn.Module] = perceptron,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **options: Any,
) -> None:
    """Train on the ranks' shares of batches with a DistributedOptimizer of these options, and on whole batches without one: the
    weights, and what `train` returns, must be close, the weights of replicas equal, and nothing may warn."""
    alone, together = model_of(), model_of()
    expected = train(alone, make(alone), batch)
    options = {"bucket_bytes": 200, **options}
    if options.get("rule") is hvd.rules.NextForward:
        options["rule"] = hvd.rules.NextForward(together)
    optimizer = hvd.DistributedOptimizer(make(together), together.named_parameters(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(together, optimizer, share)
    optimizer.close()
    assert_same_on_all_ranks(together.parameters())
    assert_close(together.parameters(), alone.parameters(), rtol=rtol, atol=atol)
    if expected is not None:
        assert found == pytest.approx(expected, rel=1e-4)


# One rank's own data, for training that no single process repeats on a whole batch


def network(width: int = 16, seed: int = 0) -> nn.Sequential:
    """Return a model whose first matrix codecs are for, where its width is 700."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def batch_of(step: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 6, generator=generator).to(dtype), torch.randn(4, 3, generator=generator).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Train on batches of this rank's own, in the dtype of the model."""
    dtype = next(model.parameters()).dtype
    take_steps(model, optimizer, lambda step: batch_of(step, hvd.rank(), dtype), steps)


def assert_goes_on(
    made: Callable[[], tuple[nn.Module, Any]], stops: Iterable[int], steps: int
) -> tuple[nn.Module, Any]:
    """Train a model with its optimizer, and save now and then; what comes after that, done again from what was saved, must end
    alike to the bit. Return both, the optimizer closed."""
    model, optimizer = made()
    saved = {}
    for step in range(steps):
        if step in stops:
            saved[step] = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, [step])
    for at, state in saved.items():
        again, resumed = made()
        again.load_state_dict(state["model"])
        resumed.load_state_dict(state["optimizer"])
        train(again, resumed, range(at, steps))
        assert_equal(model.parameters(), again.parameters())
        resumed.close()
    optimizer.close()
    return model, optimizer


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def state_of(model: nn.Module, optimizer: hvd.DistributedOptimizer) -> list[Tensor]:
    """Return parameters and optimizer state."""
    parameters = list(model.state_dict().values())
    states = optimizer.state_dict()["state"]
    kept = [states[number][name] for number in sorted(states) for name in sorted(states[number])]
    return copies([*parameters, *(each for each in kept if isinstance(each, Tensor))])


def gradients(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def through_a_file(state: Any) -> Any:
    """Return what torch.load() makes of what torch.save() writes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Compare bit for bit."""
    for number, (one, other) in enumerate(zip(tensors, others, strict=True)):
        assert torch.equal(one, other), f"tensor {number}"


def assert_same_on_all_ranks(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Compare bit for bit, on all ranks or on those of a group."""
    mine = [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group)
    for rank, theirs in enumerate(everyones):
        assert theirs == mine, f"rank {rank} has other values than rank {dist.get_rank(group)}"


def assert_close(actual: Iterable[Tensor], expected: Iterable[Tensor], **tolerance: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), **tolerance)


def buckets_of(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of the gradients that share memory, in their order there, by the address of the memory."""
    found: dict[int, list[str]] = {}
    parameters = [(name, each) for name, each in model.named_parameters() if each.grad is not None]
    for name, parameter in sorted(parameters, key=lambda pair: pair[1].grad.data_ptr()):  # type: ignore[union-attr]
        assert parameter.grad is not None
        found.setdefault(parameter.grad.untyped_storage().data_ptr(), []).append(name)
    return found


def spy(optimizer: hvd.DistributedOptimizer, look: Callable[[Tensor, dict[str, Any]], None]) -> None:
    """Have `look` called before every allreduce of the optimizer, with its tensor and options."""
    communicator = optimizer.communicator  # this one alone
    allreduce, prepare_allreduce = communicator.allreduce, communicator.prepare_allreduce

    def looked_at(tensor: Tensor, *args: Any, **options: Any) -> Any:
        look(tensor, options)
        return allreduce(tensor, *args, **options)

    def prepared(tensor: Tensor, *args: Any, **options: Any) -> Any:
        operation = prepare_allreduce(tensor, *args, **options)
        start = operation.start

        def looked_at_start(**how: Any) -> Any:
            look(tensor, options)
            return start(**how)

        operation.start = looked_at_start  # type: ignore[method-assign]
        return operation

    communicator.allreduce = looked_at  # type: ignore[method-assign]
    communicator.prepare_allreduce = prepared  # type: ignore[method-assign]
