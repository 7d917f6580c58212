"""Ranks with batches of different sizes: weigh() gives all of them the gradient of the joint batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from gradwire.collectives import Mismatch
from tests.harness import ABOVE_TRANSPORTS, wide
from tests.ranks.training import (
    assert_equal,
    assert_same_on_all_ranks,
    copies,
    distributed,
    loss_of,
    on_ranks,
    perceptron,
    through_a_file,
)

STEPS = 8
CHANGING = None
"""The sizes of batches that change in every pass."""

Batch = tuple[Tensor, Tensor]


def batches(number: int, sizes: Sequence[int] | None, ranks: int) -> list[Batch]:
    """Return the batches of all ranks in a pass. sizes: by rank."""
    generator = torch.Generator().manual_seed(number)
    if sizes is None:
        sizes = torch.randint(0, 6, (ranks,), generator=generator).tolist()
        sizes[number % ranks] += 1  # so that there is a sample
    return [(torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)) for size in sizes]


def joined(parts: Sequence[Batch]) -> Batch:
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_close(found: nn.Module, expected: nn.Module, rtol: float = 1e-6) -> None:
    """Compare parameters, relative to the largest element of each."""
    for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=rtol * float(theirs.abs().max()))


def passes(step: int, count: int, sizes: Sequence[int] | None, ranks: int) -> Iterator[tuple[bool, list[Batch]]]:
    """Yield whether a pass of a step is the last, and the batches of all ranks in it."""
    for part in range(count):
        yield part == count - 1, batches(100 * step + part, sizes, ranks)


def train_together(
    model: nn.Module,
    optimizer: hvd.DistributedOptimizer,
    sizes: Sequence[int] | None,
    steps: range = range(STEPS),
    *,
    count: int = 1,
    clip: float | None = None,
) -> None:
    """Train on this rank's batches. A rank without samples calls backward() in every second pass, with NaN as its loss."""
    for step in steps:
        optimizer.zero_grad()
        for number, (_, parts) in enumerate(passes(step, count, sizes, hvd.size())):
            mine = parts[hvd.rank()]
            optimizer.weigh(len(mine[0]))
            if len(mine[0]) or (step + number) % 2:
                loss_of(model, mine).backward()
        if clip is None:
            optimizer.step()
            continue
        optimizer.synchronize()
        optimizer.clip_grad_norm_(clip)
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.settle()


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sizes: Sequence[int] | None,
    ranks: int,
    steps: range = range(STEPS),
    *,
    count: int = 1,
    clip: float | None = None,
) -> None:
    """Train on the joint batches of all ranks."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, joined([part for _, parts in passes(step, count, sizes, ranks) for part in parts])).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


RULES: dict[str, Callable[[nn.Module], Any]] = {
    "default": lambda model: None,
    "sharded": lambda model: hvd.rules.Sharded(),
    "next_forward": hvd.rules.NextForward,
}
SIZES = [(2, (1, 4)), (2, (0, 7)), (3, (3, 5, 2)), (4, CHANGING)]


@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("size", "sizes"), SIZES)
@on_ranks()
def test_trains_as_one_process_on_the_joint_batch(
    sizes: Sequence[int] | None, rule: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    together, alone = perceptron(), perceptron()
    optimizer = hvd.DistributedOptimizer(make(together), rule=RULES[rule](together), bucket_bytes=200)
    train_together(together, optimizer, sizes)
    train_alone(alone, make(alone), sizes, hvd.size())
    assert_close(together, alone)
    assert_same_on_all_ranks(list(together.parameters()))


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.3},
        {"count": 3},
        {"count": 3, "per_step": 5},
        {"gradient_as_bucket_view": False, "count": 2},
        {"gradient_predivide_factor": 3.0},
        {"exchange_plan": hvd.ExchangePlan(None, at_end=True)},
    ],
    ids=str,
)
@ABOVE_TRANSPORTS
@on_ranks(3)
def test_samples_of_passes_add_up(options: dict[str, Any]) -> None:
    options = dict(options)
    way = {name: options.pop(name) for name in ("clip", "count") if name in options}
    together, alone = perceptron(), perceptron()
    per_step = options.pop("per_step", way.get("count", 1))
    optimizer = hvd.DistributedOptimizer(
        momentum(together), together.named_parameters(), backward_passes_per_step=per_step, **options
    )
    train_together(together, optimizer, CHANGING, **way)
    train_alone(alone, momentum(alone), CHANGING, 3, **way)
    assert_close(together, alone)
    assert_same_on_all_ranks(list(together.parameters()))


class Scale(nn.Module):
    """One weight, whose gradient is the number passed to push()."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.optimizer = distributed([self.weight], **options)

    def push(self, gradient: float, samples: float | None) -> float | None:
        """Run backward(); return the weight's gradient afterwards."""
        if samples is not None:
            self.optimizer.weigh(samples)
        (self.weight * gradient).sum().backward()
        return None if self.weight.grad is None else float(self.weight.grad)


@on_ranks(2)
def test_a_sum_has_the_gradients_of_all_samples() -> None:
    model, rank = Scale(op=hvd.Sum), hvd.rank()
    assert model.push((3.0, 5.0)[rank], (4, 2)[rank]) == 22.0


@on_ranks(2)
def test_samples_may_be_fractions_and_tensors() -> None:
    model, rank = Scale(), hvd.rank()
    assert model.push((3.0, 5.0)[rank], (0.5, torch.tensor(1.5))[rank]) == 4.5
    model.optimizer.zero_grad()
    assert model.push((3.0, 5.0)[rank], (np.int64(1), np.float32(3))[rank]) == 4.5


@on_ranks(2)
def test_equal_samples_change_no_bit() -> None:
    weighed, plain = perceptron(), perceptron()
    first, second = distributed(weighed.parameters(), lr=0.1), distributed(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        mine = batches(step, (3, 3), 2)[hvd.rank()]
        for model, optimizer in ((weighed, first), (plain, second)):
            optimizer.zero_grad()
            if model is weighed:
                optimizer.weigh(3)
            loss_of(model, mine).backward()
            optimizer.step()
    assert_equal(weighed.parameters(), plain.parameters())


@on_ranks(2)
def test_the_last_call_before_a_pass_counts() -> None:
    """As when a batch is left out after weigh()."""
    model, rank = Scale(backward_passes_per_step=2), hvd.rank()
    model.optimizer.weigh(100)
    model.push((3.0, 5.0)[rank], (1, 3)[rank])
    model.optimizer.weigh(0)
    model.optimizer.weigh(50)
    assert model.push((1.0, 2.0)[rank], (1, 5)[rank]) == pytest.approx((3 + 15 + 1 + 10) / 10)


@on_ranks(2)
def test_zero_grad_forgets_passes_but_not_the_next_weight() -> None:
    model, rank = Scale(backward_passes_per_step=2), hvd.rank()
    model.push(7.0, 9)
    model.optimizer.weigh((1, 3)[rank])
    model.optimizer.zero_grad()
    model.push((3.0, 5.0)[rank], None)
    assert model.push(0.0, (1, 3)[rank]) == pytest.approx(18 / 8)


@pytest.mark.parametrize("discard", ["None", "zeros"])
@on_ranks(2)
def test_passes_that_the_program_discards_do_not_count(discard: str) -> None:
    """Also if their gradients are zero anyway."""
    model, rank = Scale(), hvd.rank()
    for gradient in (100.0, 0.0):
        with model.optimizer.no_sync():
            model.push(gradient, 9)
        model.zero_grad(set_to_none=discard == "None")
        assert model.push((3.0, 5.0)[rank], (1, 3)[rank]) == 4.5
        model.optimizer.zero_grad()


@on_ranks(2)
def test_passes_whose_gradients_are_zero_count() -> None:
    """A hinge loss has such gradients if every sample is beyond the margin."""
    model, rank = Scale(backward_passes_per_step=3), hvd.rank()
    model.push(0.0, (4, 2)[rank])
    model.optimizer.weigh(50)
    model.push(0.0, (1, 3)[rank])
    assert model.push((3.0, 5.0)[rank], (2, 4)[rank]) == pytest.approx(26 / 16)


@on_ranks(2)
def test_an_exchange_that_has_failed_leaves_nothing() -> None:
    model, rank = Scale(backward_passes_per_step=2), hvd.rank()
    model.push(1.0, (1, 3)[rank])
    with pytest.raises(KeyError):
        failing_backward(model.weight)
    model.optimizer.synchronize()
    model.optimizer.zero_grad()
    model.push((3.0, 5.0)[rank], (9, 1)[rank])
    assert model.push((3.0, 5.0)[rank], (9, 1)[rank]) == pytest.approx(3.2)


def failing_backward(weight: Tensor) -> None:
    def fail(gradient: Tensor) -> None:
        raise KeyError("from a hook of the user")

    hook = weight.register_hook(fail)
    try:
        (weight * 2).sum().backward()
    finally:
        hook.remove()


@on_ranks(2)
def test_an_average_may_be_added_to() -> None:
    """As without weights."""
    model, rank = Scale(), hvd.rank()
    assert model.push((3.0, 5.0)[rank], (1, 3)[rank]) == 4.5
    assert model.push((3.0, 5.0)[rank], (3, 1)[rank]) == 4.5 + 3.5
    model.optimizer.weigh((2, 7)[rank])
    model.optimizer.step()
    assert float(model.weight.grad) == 8.0  # type: ignore[arg-type]


@pytest.mark.parametrize("view", [True, False])
@on_ranks(2)
def test_a_parameter_that_only_a_rank_without_samples_uses(view: bool) -> None:
    """It has no gradient, as in the joint batch, and does not move, though the loss uses it twice and it is large."""
    both, one = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1 << 15))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([both, one], lr=1.0, weight_decay=0.5), gradient_as_bucket_view=view
    )
    optimizer.weigh(hvd.rank())
    loss = both.sum()
    if hvd.rank() == 0:
        loss = loss + (one * 3).sum() + one.square().sum()
    loss.backward()
    optimizer.step()
    assert one.grad is None
    assert (float(both), set(one.tolist())) == (-1.0, {1.0})


@on_ranks(2)
def test_a_parameter_that_is_unfrozen() -> None:
    first, later = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = distributed([first, later], backward_passes_per_step=2)
    for _ in range(2):
        optimizer.weigh(1)
        first.sum().backward()
    optimizer.zero_grad()
    later.requires_grad_(True)
    optimizer.weigh(0)
    ((first + later) * float("nan")).sum().backward()
    optimizer.weigh(2)
    (first + later).sum().backward()
    assert (first.grad, later.grad) == (torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("at_end", [True, False])
@on_ranks(2)
def test_optimizers_of_one_backward_in_any_order(at_end: bool) -> None:
    """Ranks reach them in different orders, and one rank has no samples in some steps."""
    models = [perceptron(seed) for seed in range(2)]
    plan = hvd.ExchangePlan(None, at_end=at_end)
    optimizers = [distributed(model.parameters(), lr=0.1, exchange_plan=plan) for model in models]
    rank = hvd.rank()
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
            optimizer.weigh(rank if step % 2 else 1 + rank)
        order = models if rank else models[::-1]
        torch.stack([loss_of(model, batches(step, (2, 2), 2)[rank]) for model in order]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_on_all_ranks([parameter for model in models for parameter in model.parameters()])


@on_ranks(2)
def test_no_sync_passes_count() -> None:
    model, rank = Scale(), hvd.rank()
    with model.optimizer.no_sync():
        model.push((3.0, 5.0)[rank], (1, 3)[rank])
    assert model.push((1.0, 2.0)[rank], (2, 4)[rank]) == pytest.approx((3 + 15 + 2 + 8) / 10)


@on_ranks(3)
def test_a_parameter_that_only_some_ranks_use() -> None:
    """Rank 0 has no samples, and rank 1 does not use the second parameter."""
    used, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    unused = nn.Parameter(torch.zeros(2))
    optimizer = distributed([used, other, unused])
    optimizer.weigh(hvd.rank())
    if hvd.rank():
        (used.sum() * 3 + (other.sum() * 6 if hvd.rank() == 2 else 0)).backward()
    optimizer.step()
    assert used.tolist() == [-3.0, -3.0]
    assert other.tolist() == [-4.0, -4.0]
    assert unused.grad is None


@pytest.mark.parametrize("samples", [2, 0])
@on_ranks(2)
def test_a_pass_without_samples_leaves_the_programs_own_gradient(samples: int) -> None:
    """samples: those of rank 0 in the other pass."""
    weight, own = nn.Parameter(torch.zeros(4)), torch.zeros(4)
    weight.grad = own
    optimizer = distributed([weight], backward_passes_per_step=2)
    optimizer.weigh(2 if hvd.rank() else samples)
    weight.sum().backward()
    optimizer.weigh(0)
    (weight.sum() * float("nan")).backward()
    assert weight.grad is own
    assert own.tolist() == [1.0] * 4


@on_ranks(2)
def test_the_loss_of_a_closure_is_that_of_the_joint_batch() -> None:
    model, alone = perceptron(), perceptron()
    optimizer = distributed(model.parameters(), lr=0.1)
    parts = batches(0, (0, 5), 2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        optimizer.weigh(len(parts[hvd.rank()][0]))
        loss = loss_of(model, parts[hvd.rank()])
        loss.backward()
        return loss

    torch.testing.assert_close(optimizer.step(closure), loss_of(alone, joined(parts)).detach())


@pytest.mark.parametrize("dense", [False, True])
@on_ranks(2)
def test_sparse_gradients(dense: bool) -> None:
    table, alone = nn.Embedding(9, 3, sparse=True), nn.Embedding(9, 3)
    alone.load_state_dict(table.state_dict())
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    hvd.broadcast_parameters(alone.state_dict(), root_rank=0)
    optimizer, plain = (
        distributed(table.parameters(), lr=0.5, sparse_as_dense=dense),
        torch.optim.SGD(alone.parameters(), 0.5),
    )
    for step in range(4):
        rows = [torch.arange(step), torch.tensor([1, 1, 4, 8]) - step % 2]
        optimizer.zero_grad()
        plain.zero_grad()
        optimizer.weigh(len(rows[hvd.rank()]))
        table(rows[hvd.rank()]).square().mean().backward()
        optimizer.step()
        alone(torch.cat(rows)).square().mean().backward()
        plain.step()
    assert_close(table, alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(2)
def test_half_precision(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(300, dtype=dtype))
    optimizer = distributed([weight])
    optimizer.weigh((100_000, 300_000)[hvd.rank()])  # more than float16 has numbers for
    (weight * (200.0, -40.0)[hvd.rank()]).sum().backward()
    assert weight.grad is not None
    assert weight.grad.unique().tolist() == [20.0]


@pytest.mark.parametrize("codec", ["int8", "onebit", "topk", "powersgd", *wide("chunktopk")])
@on_ranks(2)
def test_codecs_have_no_bias(codec: str) -> None:
    """Twice as many steps do not have twice the error, though samples change in every step: what an encoding leaves out comes in
    later steps, in the unit of the result."""
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = distributed([weight], compression=hvd.ErrorFeedback(codec) if codec == "int8" else codec)
    constant = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    total, errors = torch.zeros(64, 64), {}
    for step in range(401):
        samples = (1 + step % 3, 4 - step % 4)
        optimizer.zero_grad()
        optimizer.weigh(samples[hvd.rank()])
        (weight * constant[hvd.rank()]).sum().backward()
        optimizer.step()
        total += (samples[0] * constant[0] + samples[1] * constant[1]) / sum(samples)
        errors[step] = float((weight.detach() + total).norm())
    assert errors[400] < 1.5 * errors[200]
    assert errors[400] < 0.2 * total.norm()


@ABOVE_TRANSPORTS
@on_ranks(3)
def test_a_rank_that_has_joined_has_no_samples() -> None:
    """Rank 0 never has any, so it learns of the weights from the others."""
    counts = [0, 2, 4]
    model, alone = perceptron(), perceptron()
    optimizer, plain = hvd.DistributedOptimizer(momentum(model), bucket_bytes=200), momentum(alone)
    for step in range(counts[hvd.rank()]):
        optimizer.zero_grad()
        mine = batches(step, (3, 5, 2), 3)[hvd.rank()]
        optimizer.weigh(len(mine[0]))
        loss_of(model, mine).backward()
        optimizer.step()
    assert hvd.join() == 2
    for step in range(max(counts)):
        plain.zero_grad()
        parts = [part for rank, part in enumerate(batches(step, (3, 5, 2), 3)) if step < counts[rank]]
        loss_of(alone, joined(parts)).backward()
        plain.step()
    assert_close(model, alone)
    assert_same_on_all_ranks(list(model.parameters()))


@on_ranks(2)
def test_a_gradient_that_overflows_is_left_out_on_all_ranks() -> None:
    model = perceptron()
    optimizer, scaler = distributed(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copies(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        mine = batches(step, (1, 4), 2)[hvd.rank()]
        optimizer.weigh(len(mine[0]))
        loss = loss_of(model, mine)
        scaler.scale(loss * (float("inf") if step == hvd.rank() == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if not step:
            assert_equal(model.parameters(), before)
    alone = perceptron()
    loss_of(alone, joined(batches(1, (1, 4), 2))).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert_close(model, alone)


@pytest.mark.parametrize("compression", ["none", "onebit"])
@on_ranks(2)
def test_resumes_bit_for_bit(compression: str) -> None:
    def made() -> tuple[nn.Module, hvd.DistributedOptimizer]:
        model = perceptron()
        options: dict[str, Any] = {"policy": {"*": compression}, "bucket_bytes": 200}
        return model, hvd.DistributedOptimizer(momentum(model), model.named_parameters(), **options)

    model, optimizer = made()
    train_together(model, optimizer, CHANGING, range(4))
    state = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train_together(model, optimizer, CHANGING, range(4, 8))
    again, resumed = made()
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    train_together(again, resumed, CHANGING, range(4, 8))
    assert_equal(model.parameters(), again.parameters())


# Local updates, whose ranks step by themselves, and DDP


def simulated(size: int, *, every: int, count: int, fragments: int = 1) -> list[list[Tensor]]:
    """Return every rank's parameters after STEPS steps, taken one rank after the other."""
    models = [perceptron() for _ in range(size)]
    inner = [momentum(model) for model in models]
    common = copies(models[0].parameters())
    samples = [[0] * len(common) for _ in range(size)]
    assert fragments in (1, len(common))
    for step in range(1, STEPS + 1):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            mine = joined([parts[rank] for _, parts in passes(step - 1, count, CHANGING, size)])
            if len(mine[0]):
                loss_of(model, mine).backward()
                optimizer.step()
            samples[rank] = [each + len(mine[0]) for each in samples[rank]]
        for index, outer in enumerate(common):
            number = index if fragments > 1 else 0
            if (step - (number + 1) * every // fragments) % every:
                continue
            weights = torch.tensor([float(each[index]) for each in samples])
            own = [list(model.parameters())[index] for model in models]
            outer.copy_(sum(weight * each.detach() for weight, each in zip(weights, own, strict=True)) / weights.sum())
            for rank, parameter in enumerate(own):
                parameter.detach().copy_(outer)
                samples[rank][index] = 0
    return [copies(model.parameters()) for model in models]


@pytest.mark.parametrize(("count", "fragments"), [(1, 1), (2, 1), (1, 6)])
@on_ranks(3)
def test_local_updates_weigh_pseudo_gradients_by_all_samples_since_the_last(count: int, fragments: int) -> None:
    model, every = perceptron(), 6 if fragments > 1 else 3
    rule = hvd.rules.LocalUpdates(every=every, fragments=fragments)
    optimizer = hvd.DistributedOptimizer(momentum(model), rule=rule, backward_passes_per_step=count)
    train_together(model, optimizer, CHANGING, count=count)
    expected = simulated(3, every=every, count=count, fragments=fragments)[hvd.rank()]
    for mine, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=0, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize("warmup_steps", [0, 3])
@on_ranks(2)
def test_local_updates_resume_bit_for_bit(warmup_steps: int) -> None:
    def made() -> tuple[nn.Module, hvd.DistributedOptimizer]:
        model = perceptron()
        rule = hvd.rules.LocalUpdates(every=4, warmup_steps=warmup_steps, outer=None)
        return model, hvd.DistributedOptimizer(momentum(model), rule=rule)

    model, optimizer = made()
    train_together(model, optimizer, CHANGING, range(2))
    state = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train_together(model, optimizer, CHANGING, range(2, 9))
    again, resumed = made()
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    train_together(again, resumed, CHANGING, range(2, 9))
    assert_equal(model.parameters(), again.parameters())


@on_ranks(2)
def test_local_updates_need_a_weight_for_each_step() -> None:
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(momentum(model), rule=hvd.rules.LocalUpdates(every=2))
    for step in range(2):
        optimizer.zero_grad()
        if step:
            optimizer.weigh(2)
        loss_of(model, batches(step, (2, 2), 2)[hvd.rank()]).backward()
        if not step:
            optimizer.step()
    with pytest.raises(ValueError, match="rank 1: weigh"):
        optimizer.step()
    train_together(model, optimizer, (1, 4), range(4))


@on_ranks(2)
def test_local_updates_of_a_host_without_samples() -> None:
    """Its inner ranks do not move, and their pseudo-gradients do not count."""
    inner = [hvd.add_process_set([0]), hvd.add_process_set([1])]
    model, alone = perceptron(), perceptron()
    rule = hvd.rules.LocalUpdates(every=2, inner=inner[hvd.rank()])
    train_together(model, hvd.DistributedOptimizer(momentum(model), rule=rule), (0, 5), range(2))
    train_alone(alone, momentum(alone), (0, 5), 2, range(2))
    assert_close(model, alone)


@pytest.mark.parametrize(("view", "count"), [(False, 1), (True, 1), (True, 3)])
@on_ranks(3, initialized=False)
def test_ddp(view: bool, count: int) -> None:
    model, alone = perceptron(), perceptron()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=0.0005)  # type: ignore[arg-type]
    hook = hvd.ddp_comm_hook("none", model.named_parameters())
    ddp.register_comm_hook(None, hook)
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number, (is_last, parts) in enumerate(passes(step, count, CHANGING, 3)):
            mine = parts[dist.get_rank()]
            hook.weigh(len(mine[0]))
            if is_last or len(mine[0]) or number:
                with nullcontext() if is_last else ddp.no_sync():
                    loss_of(ddp, mine).backward()
        optimizer.step()
    train_alone(alone, adamw(alone), CHANGING, 3, count=count)
    assert_close(model, alone)
    assert_same_on_all_ranks(list(model.parameters()))
    hook.close()


@on_ranks(2, initialized=False)
def test_ddp_counts_passes_whose_gradients_are_zero_unless_they_are_discarded() -> None:
    module = nn.Linear(1, 1, bias=False)
    ddp, hook = DistributedDataParallel(module), hvd.ddp_comm_hook("none", module.named_parameters())
    ddp.register_comm_hook(None, hook)
    for discards, expected in ((False, 18 / 14), (True, 18 / 4), (False, 18 / 14)):
        module.zero_grad()
        hook.weigh(5)
        with ddp.no_sync():
            ddp(torch.zeros(1, 1)).sum().backward()
        if discards:
            module.zero_grad(set_to_none=False)
        hook.weigh((1, 3)[dist.get_rank()])
        ddp(torch.full((1, 1), (3.0, 5.0)[dist.get_rank()])).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.item() == pytest.approx(expected)
    hook.close()


@on_ranks(2, initialized=False)
def test_ddp_with_a_codec_has_no_bias() -> None:
    module = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    ddp, hook = DistributedDataParallel(module), hvd.ddp_comm_hook("onebit", module.named_parameters())
    ddp.register_comm_hook(None, hook)
    constant = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    total, errors = torch.zeros(64, 64), {}
    for step in range(401):
        samples = (step % 3, 4 - step % 4)
        module.zero_grad()
        hook.weigh(samples[dist.get_rank()])
        (ddp(torch.eye(64)).t() * constant[dist.get_rank()]).sum().backward()
        assert module.weight.grad is not None
        with torch.no_grad():
            module.weight -= module.weight.grad
        total += (samples[0] * constant[0] + samples[1] * constant[1]) / sum(samples)
        errors[step] = float((module.weight.detach() + total).norm())
    assert errors[400] < 1.5 * errors[200]
    hook.close()


@on_ranks(2, initialized=False)
def test_a_rank_in_ddps_join_has_no_samples() -> None:
    module, alone = perceptron(), perceptron()
    ddp, hook = DistributedDataParallel(module), hvd.ddp_comm_hook("none", module.named_parameters())
    ddp.register_comm_hook(None, hook)
    optimizer, plain = torch.optim.SGD(module.parameters(), lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)
    with ddp.join():
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            mine = batches(step, (1, 4), 2)[dist.get_rank()]
            hook.weigh(len(mine[0]))
            loss_of(ddp, mine).backward()
            optimizer.step()
    for step in range(3):
        plain.zero_grad()
        loss_of(alone, joined(batches(step, (1, 4), 2)[step // 2 :])).backward()
        plain.step()
    assert_close(module, alone)
    hook.close()


@on_ranks(1, initialized=False)
def test_weights_of_ddp_need_the_parameters() -> None:
    with pytest.raises(RuntimeError, match="named_parameters"):
        hvd.ddp_comm_hook("none").weigh(3)


@on_ranks(2, initialized=False)
def test_ddp_refuses_what_is_no_count() -> None:
    module = nn.Linear(3, 3)
    ddp, hook = DistributedDataParallel(module), hvd.ddp_comm_hook("none", module.named_parameters())
    ddp.register_comm_hook(None, hook)
    hook.weigh(-1 if dist.get_rank() else 2)
    with pytest.raises(ValueError, match=r"rank 1: weigh\("):
        ddp(torch.ones(1, 3)).sum().backward()
    hook.close()


# What is refused


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf")])
@pytest.mark.parametrize("late", [False, True])
@on_ranks(2)
def test_samples_that_are_no_count_are_an_error_on_all_ranks(samples: float, late: bool) -> None:
    """Nothing is lost: training goes on with the next batch."""
    model, rank = Scale(), hvd.rank()
    if late:
        model.push(1.0, 1)
        model.optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"^rank 1: weigh\("):
        model.push(1.0, samples if rank else 2)
    model.optimizer.zero_grad()
    assert model.push((3.0, 5.0)[rank], (1, 3)[rank]) == 4.5


@on_ranks(2)
def test_no_samples_at_all_are_an_error_on_all_ranks() -> None:
    model = Scale()
    with pytest.raises(ValueError, match="weigh"):
        model.push(1.0, 0)
    model.optimizer.zero_grad()
    assert model.push(1.0, hvd.rank()) == 1.0


@on_ranks(2)
def test_ranks_with_weights_and_ranks_without() -> None:
    model = Scale()
    model.push(1.0, None)
    model.optimizer.zero_grad()
    with pytest.raises(Mismatch, match=r"rank 1 called weigh\(\)"):
        model.push(1.0, 2 if hvd.rank() else None)


@pytest.mark.parametrize("when", ["pass", "first pass", "step"])
@on_ranks(2)
def test_a_missing_weight_is_an_error_on_all_ranks(when: str) -> None:
    model, rank = Scale(backward_passes_per_step=2), hvd.rank()
    for _ in range(2):
        model.push(1.0, 2)
    model.optimizer.zero_grad()
    if when == "step":
        if rank:
            model.optimizer.weigh(3)
        with pytest.raises(ValueError, match=r"^rank 0: "):
            model.optimizer.step()
        return
    model.push(1.0, None if rank and when == "first pass" else 2)
    with pytest.raises(ValueError, match=r"^rank 1: "):
        model.push(1.0, None if rank and when == "pass" else 2)


@on_ranks(1)
def test_samples_of_another_type() -> None:
    model = Scale()
    for samples in ("3", None, True):
        with pytest.raises(TypeError, match="samples"):
            model.optimizer.weigh(samples)  # type: ignore[arg-type]


@on_ranks(2)
def test_passes_are_not_added_to_an_average() -> None:
    """The average of an exchange stands for other samples than those passes."""
    model, rank = Scale(backward_passes_per_step=2), hvd.rank()
    model.push(1.0, 2)
    assert model.push(1.0, 1 + rank) == 1.0
    model.push(1.0, 2)
    with pytest.raises(ValueError, match=r"rank 1: .*zero_grad"):
        model.push(1.0, 1 + rank)


@on_ranks(2)
def test_a_sum_is_not_summed_again() -> None:
    model = Scale(op=hvd.Sum)
    assert model.push(1.0, 1) == 2.0
    model.optimizer.step()
    model.optimizer.weigh(1)
    with pytest.raises(ValueError, match=r"rank 1: .*zero_grad"):
        model.optimizer.step()


@on_ranks(2)
def test_a_rank_outside_of_the_process_set_has_no_weights() -> None:
    model = Scale(process_set=hvd.add_process_set([0]))
    if hvd.rank():
        with pytest.raises(RuntimeError, match="process_set"):
            model.optimizer.weigh(3)
    else:
        assert model.push(4.0, 3) == 4.0


@on_ranks(2)
def test_adasum_has_no_weights() -> None:
    with pytest.raises(RuntimeError, match="weigh"):
        Scale(op=hvd.Adasum).optimizer.weigh(3)
