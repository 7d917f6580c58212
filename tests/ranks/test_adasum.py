"""Adasum against the definition, worked out on one rank: of tensors, and of what an optimizer's steps change."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import Communicator
from tests.harness import wide
from tests.ranks.training import assert_same_on_all_ranks, copies, loss_of, on_ranks, perceptron, sgd, share


def gradient(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Gradients that have a part in common, the same on whichever rank one asks."""
    common = torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    own = torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)
    return (common + own * (rank + 1)).to(dtype)


def two(a: Tensor, b: Tensor) -> Tensor:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa) if aa > 0 else 1) * a + (1 - dot / (2 * bb) if bb > 0 else 1) * b


def by_hand(vectors: list[Tensor]) -> Tensor:
    """Combine the halves of the ranks, of which the second is the larger one."""
    half = len(vectors) // 2
    return two(by_hand(vectors[:half]), by_hand(vectors[half:])) if half else vectors[0].double()


@on_ranks(5, *wide(1))
def test_adasum_is_as_defined() -> None:
    size = hvd.size()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in ((3,), (7, 5), (0,), ()):
            wanted = by_hand([gradient(rank, dtype, *shape) for rank in range(size)])
            given = gradient(hvd.rank(), dtype, *shape)
            before = given.clone()
            result = hvd.allreduce(given, op=hvd.Adasum)
            assert torch.equal(given, before), "not in place"
            assert (result.dtype, result.shape) == (given.dtype, given.shape)
            # Within one rounding: sums in another order may fall on the other side.
            spacing = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-13
            torch.testing.assert_close(result.double(), wanted, rtol=spacing, atol=spacing * 1e-2)
            assert_same_on_all_ranks([result.view(torch.uint8) if result.dim() else result.double()])
            assert torch.equal(hvd.allreduce(given, op=hvd.Adasum), result), "the same every time"
            handle = hvd.allreduce_async_(given, op=hvd.Adasum)
            assert hvd.poll(handle)
            assert hvd.synchronize(handle) is given
            assert torch.equal(given, result)


@on_ranks(4)
def test_extremes() -> None:
    """On four ranks: orthogonal gradients are added, equal ones averaged, opposite ones cancel, and zeros do not count."""
    rank, size = hvd.rank(), hvd.size()
    orthogonal = torch.zeros(size)
    orthogonal[rank] = rank + 1
    assert hvd.allreduce(orthogonal, op=hvd.Adasum).tolist() == [1, 2, 3, 4]
    equal = torch.tensor([3.0, -4.0, 0.5])
    assert torch.equal(hvd.allreduce(equal, op=hvd.Adasum), equal)
    assert hvd.allreduce(torch.tensor([1.0, 2.0]) * (-1) ** rank, op=hvd.Adasum).tolist() == [0, 0]
    only_two = torch.tensor([1.0, 2.0]) if rank == 2 else torch.zeros(2)
    assert hvd.allreduce(only_two, op=hvd.Adasum).tolist() == [1, 2]
    huge = torch.full((3,), 1e30)  # whose squares are beyond float32
    assert torch.equal(hvd.allreduce(huge, op=hvd.Adasum), huge)
    infinite = hvd.allreduce(torch.full((3,), float("inf") if rank == 1 else 1.0), op=hvd.Adasum)
    assert not infinite.isfinite().any(), "GradScaler is to notice"
    assert hvd.allreduce(equal, op=hvd.Adasum, prescale_factor=2.0, postscale_factor=3.0).tolist() == [18, -24, 3]
    strided = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(hvd.allreduce(strided, op=hvd.Adasum), strided)
    assert hvd.allreduce_(strided, op=hvd.Adasum) is strided
    assert torch.equal(strided, torch.arange(12.0).view(3, 4).t())
    halved = hvd.allreduce(equal, op=hvd.Adasum, compression=hvd.Compression.fp16)
    assert (halved.dtype, halved.tolist()) == (torch.float32, equal.tolist())


@on_ranks(4)
def test_grouped() -> None:
    """Every tensor of a group has dot products of its own, whatever is beside it."""
    dtypes = [torch.float32, torch.float16, torch.float32, torch.float64, torch.float32]
    shapes = [(3, 2), (5,), (0,), (2,), (11,)]
    given = [gradient(hvd.rank(), dtype, *shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    alone = [hvd.allreduce(tensor, op=hvd.Adasum) for tensor in given]
    for together in (
        hvd.grouped_allreduce(given, op=hvd.Adasum),
        hvd.synchronize(hvd.grouped_allreduce_async(given, op=hvd.Adasum)),
        hvd.grouped_allreduce_([tensor.clone() for tensor in given], op=hvd.Adasum),
    ):
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=torch.finfo(one.dtype).eps, atol=0)
        assert_same_on_all_ranks(together)
    assert hvd.grouped_allreduce([], op=hvd.Adasum) == []


@on_ranks(4)
def test_refusals() -> None:
    """Found before anything is sent: the rank that gives them does so alone, and the next verb works."""
    if hvd.rank() == 1:
        with pytest.raises(TypeError, match=r"op='adasum' needs floating-point tensors, not torch.int32"):
            hvd.grouped_allreduce([torch.ones(2), torch.ones(2, dtype=torch.int32)], op=hvd.Adasum)
        with pytest.raises(ValueError, match="codec 'int8' is for the sum or average"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum, compression="int8")
        for verb in (hvd.reducescatter, hvd.reducescatter_async):
            with pytest.raises(ValueError, match="op must be one of average, sum, min, max, product, not 'adasum'"):
                verb(torch.ones(4), op=hvd.Adasum)
    assert hvd.allreduce(torch.ones(1), op=hvd.Adasum).item() == 1


@on_ranks(4)
def test_in_a_process_set() -> None:
    group = torch.distributed.new_group([1, 2, 3])
    if hvd.rank() > 0:
        assert isinstance(group, torch.distributed.ProcessGroup)
        with Communicator(group) as communicator:
            wanted = by_hand([gradient(rank, torch.float64, 9) for rank in (1, 2, 3)])
            result = hvd.allreduce(gradient(hvd.rank(), torch.float64, 9), op=hvd.Adasum, process_set=communicator)
            torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)


@on_ranks()
@pytest.mark.parametrize(("size", "options"), [(4, {}), (2, {"compression": hvd.Compression.fp16})])
def test_an_optimizer_combines_what_the_steps_of_all_ranks_change(options: dict[str, Any]) -> None:
    """The state of each rank's optimizer is its own, as a shadow of it shows; the last step is by a closure."""
    model, shadow = perceptron(), perceptron()
    model[2].bias.requires_grad_(False)
    shadow[2].bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Adasum, **options)
    own = sgd(shadow.parameters())
    tolerance = {"rtol": 0.01, "atol": 1e-4} if options else {"rtol": 1e-4, "atol": 1e-6}

    def loss_at(step: int, net: nn.Module, each: torch.optim.Optimizer) -> Tensor:
        each.zero_grad()
        for part in range(2):
            loss = loss_of(net, share(step, part, 2))
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            before = copies(model.parameters())
            shadow.load_state_dict(model.state_dict())
            for net, each in ((shadow, own), (model, optimizer)):
                if step == 3:
                    each.step(partial(loss_at, step, net, each))  # type: ignore[arg-type]
                else:
                    loss_at(step, net, each)
                    each.step()
            assert_same_on_all_ranks(model.parameters())
            changes = [after - start for after, start in zip(copies(shadow.parameters()), before, strict=True)]
            everyones = hvd.allgather_object(changes)
            for place, (start, parameter) in enumerate(zip(before, model.parameters(), strict=True)):
                change = by_hand([theirs[place] for theirs in everyones])
                torch.testing.assert_close(parameter.detach(), start + change.float(), **tolerance)
    optimizer.close()
    for refused, match in (({"compression": "int8"}, "no codec"), ({"gradient_predivide_factor": 2.0}, "needs op=")):
        with pytest.raises(ValueError, match=match):
            hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum, **refused)
