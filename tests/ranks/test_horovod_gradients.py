"""Gradients through Horovod's verbs, and theirs, against closed formulas worked out on every rank by itself, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as hvd
from gradwire.collectives import Communicator
from tests.harness import wide
from tests.ranks.training import on_ranks

Lists = Callable[[list[Tensor]], list[Tensor]]
Case = tuple[Callable[[Tensor], Tensor], list[Tensor], Lists, Lists]
"""A verb, the inputs of all ranks, and as functions of the tensors of all ranks, the results and the gradients of the inputs."""


def values(rank: int, *shape: int, salt: int = 0) -> Tensor:
    """What a rank has: any rank can say it of any other."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0)


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def second(verb: Callable[..., list[Tensor]], **options: Any) -> Callable[[Tensor], Tensor]:
    """Return a grouped verb as a function of the second of two tensors, whose rows differ from those of the first."""
    return lambda x: verb([torch.cat([x, x]).detach().clone().requires_grad_(), x], **options)[1]


def everywhere(reduce: Callable[[list[Tensor]], Tensor], size: int, times: float = 1) -> Lists:
    return lambda xs: [times * reduce(xs)] * size


def cut(reduce: Callable[[list[Tensor]], Tensor], rows: list[int], times: float = 1) -> Lists:
    """Return the rows of the reduction, of which each rank gets some."""
    return lambda xs: [times * part for part in reduce(xs).split(rows)]


def turned(rows: list[list[int]]) -> Lists:
    """Return what each rank receives if rank r sends rows[r][s] to rank s."""
    pieces = lambda xs: [x.split(splits) for x, splits in zip(xs, rows, strict=True)]  # noqa: E731
    return lambda xs: [torch.cat(parts) for parts in zip(*pieces(xs), strict=True)]


def reductions(size: int, process_set: Any) -> list[Case]:
    """Allreduce: with g(r) for the gradient of rank r's result, allreduce(g) with the same op and factors. Reducescatter: all
    g(r) one after the other, times the factors; times the number of ranks under Sum. Of 5 rows, the first ranks get more."""
    inputs = [values(rank, 5, 2) for rank in range(size)]
    rows = [(5 + size - 1 - rank) // size for rank in range(size)]
    cases: list[Case] = []
    for op, reduce, times in ((hvd.Average, mean, 1), (hvd.Sum, total, size)):
        for factors, scale in (({}, 1.0), ({"prescale_factor": 0.5, "postscale_factor": 3.0}, 1.5)):
            options = {"op": op, "process_set": process_set, **factors}
            reduced = everywhere(reduce, size, scale)
            cases += [
                (verb, inputs, reduced, reduced)
                for verb in (partial(hvd.allreduce, **options), second(hvd.grouped_allreduce, **options))
            ]
            cases += [
                (verb, inputs, cut(reduce, rows, scale), everywhere(torch.cat, size, scale * times))
                for verb in (partial(hvd.reducescatter, **options), second(hvd.grouped_reducescatter, **options))
            ]
    return cases


def movements(size: int, process_set: Any) -> list[Case]:
    """Allgather: this rank's rows of the average of all g(r); rank r has r + 1 rows. Alltoall: the rows of all g(r) that come
    from this rank's rows; rank r sends s + 1 rows to rank s, or 2."""
    inputs, lengths = [values(rank, rank + 1, 2) for rank in range(size)], list(range(1, size + 1))
    gathers = partial(hvd.allgather, process_set=process_set), second(hvd.grouped_allgather, process_set=process_set)
    cases: list[Case] = [(verb, inputs, everywhere(torch.cat, size), cut(mean, lengths)) for verb in gathers]
    for rows, splits in (([2] * size, None), (lengths, lengths)):
        inputs = [values(rank, sum(rows), 2) for rank in range(size)]
        back = [[row] * size for row in rows]
        exchange = partial(hvd.alltoall, splits=splits, process_set=process_set)
        verb = exchange if splits is None else lambda x, exchange=exchange: exchange(x)[0]
        cases.append((verb, inputs, turned([rows] * size), turned(back)))
    return cases


def broadcasts(size: int, process_set: Any) -> list[Case]:
    """On the root the average of all g(r), elsewhere 0."""
    root, inputs = size - 1, [values(rank, 3) for rank in range(size)]
    on_root: Lists = lambda gs: [mean(gs) * (rank == root) for rank in range(size)]  # noqa: E731
    verb = partial(hvd.broadcast, root_rank=root, process_set=process_set)
    return [(verb, inputs, everywhere(lambda xs: xs[root], size), on_root)]


def check(case: Case, rank: int) -> None:
    """Compare the gradient of the sum of cubes of a verb's results, and the gradients of the sum of squares of that."""
    verb, inputs, forward, backward = case
    leaf = inputs[rank].clone().requires_grad_()
    results = forward(inputs)
    found = verb(leaf)
    close(found, results[rank])
    (gradient,) = torch.autograd.grad((found**3).sum(), leaf, create_graph=True)
    slopes = [(3 * result**2).requires_grad_() for result in results]
    gradients = backward(slopes)
    close(gradient, gradients[rank])
    (second_gradient,) = torch.autograd.grad((gradient**2).sum(), leaf)
    of_slopes = torch.autograd.grad(gradients, slopes, [2 * each.detach() for each in gradients])
    close(second_gradient, backward([6 * result * each for result, each in zip(results, of_slopes, strict=True)])[rank])


@on_ranks(2, 3, *wide(1, 4))
def test_gradients_and_their_gradients_are_horovods() -> None:
    for make in (reductions, movements, broadcasts):
        for case in make(hvd.size(), None):
            check(case, hvd.rank())


@on_ranks(3)
def test_gradients_count_the_ranks_of_the_process_set() -> None:
    """Of ranks 0 and 1, the root is rank 1 however roots are counted."""
    for ranks, kinds in (([1, 2], (reductions, movements)), ([0, 1], (broadcasts,))):
        group = torch.distributed.new_group(ranks)
        if hvd.rank() in ranks:
            assert isinstance(group, torch.distributed.ProcessGroup)
            with Communicator(group) as communicator:
                for make in kinds:
                    for case in make(communicator.size, communicator):
                        check(case, communicator.rank)


@on_ranks(2)
def test_a_penalty_of_gradients_counts_every_path() -> None:
    """The gradients of a loss that does not use a verb alone: their squares depend on the average too."""
    inputs = [values(rank, 3, salt=11) for rank in range(hvd.size())]
    leaf = inputs[hvd.rank()].clone().requires_grad_()
    (gradient,) = torch.autograd.grad((leaf * hvd.allreduce(leaf)).sum(), leaf, create_graph=True)
    gradient.square().sum().backward()
    # gradient = 2 * average of all; so half of its square's gradient is 2 * (average of 2 * gradient)
    assert leaf.grad is not None
    close(leaf.grad, 8 * mean(inputs))


@on_ranks(2)
def test_ops_without_a_gradient_say_so_and_casts_have_one() -> None:
    leaf = torch.ones(hvd.size(), requires_grad=True)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        result = hvd.allreduce(leaf, op=op).sum()
        with pytest.raises(RuntimeError, match=f"allreduce with op='{op}' has no gradient; only 'sum' and 'average'"):
            result.backward()
    result = hvd.grouped_reducescatter([leaf], op=hvd.Max)[0].sum()
    with pytest.raises(RuntimeError, match="reducescatter with op='max' has no gradient"):
        result.backward()
    for verb in (hvd.allreduce, hvd.reducescatter):  # powers of two are exact in float16
        leaf = torch.ones(hvd.size(), requires_grad=True)
        result = verb(leaf, compression=hvd.Compression.fp16, op=hvd.Sum)
        result.backward(torch.full_like(result, 2.0 ** hvd.rank()))
        assert leaf.grad is not None
        assert leaf.grad.tolist() == ([3.0, 3.0] if verb is hvd.allreduce else [2.0, 4.0])
