"""Gradients through Horovod's verbs, against closed formulas worked out on every rank by itself, in float64."""

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


def values(rank: int, *shape: int, salt: int = 0) -> Tensor:
    """What a rank has: any rank can say it of any other."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gradients_of(verb: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """Return the inputs' gradients where the results of verb(*inputs) have the gradients `outputs`."""
    leaves = [tensor.requires_grad_() for tensor in inputs]
    results = verb(*leaves)
    torch.autograd.backward(results if isinstance(results, list) else [results], outputs)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0)


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def check(
    verb: Callable[..., Any], inputs: list[Tensor], outputs: list[list[Tensor]], wanted: list[Tensor], rank: int
) -> None:
    """outputs: of each result the gradients on all ranks; wanted: the gradients of this rank's inputs."""
    close(gradients_of(verb, inputs, [gradients[rank] for gradients in outputs]), wanted)


def of_allreduce(rank: int, size: int, process_set: Any) -> None:
    """g(r): gradient of rank r's result; the input's is allreduce(g) with the same op and factors."""
    one, two = ([values(r, *shape, salt=salt) for r in range(size)] for salt, shape in ((1, (2, 3)), (2, (5,))))
    for op, reduce in ((hvd.Average, mean), (hvd.Sum, total)):
        plain = partial(hvd.allreduce, op=op, process_set=process_set)
        scaled = partial(plain, prescale_factor=0.5, postscale_factor=3.0)
        grouped = partial(hvd.grouped_allreduce, op=op, process_set=process_set)
        check(plain, [values(rank, 2, 3)], [one], [reduce(one)], rank)
        check(scaled, [values(rank, 5)], [two], [1.5 * reduce(two)], rank)
        inputs = [values(rank, 2, 3), values(rank, 5)]
        check(lambda *xs, verb=grouped: verb(list(xs)), inputs, [one, two], [reduce(one), reduce(two)], rank)


def of_allgather(rank: int, size: int, process_set: Any) -> None:
    """This rank's rows of the average of all g(r). Rank r has r + 1 rows, or 2 r."""
    starts, doubled = rank * (rank + 1) // 2, rank * (rank - 1)
    one = [values(r, size * (size + 1) // 2, 2, salt=3) for r in range(size)]
    two = [values(r, size * (size - 1), salt=4) for r in range(size)]
    wanted = [mean(one)[starts : starts + rank + 1], mean(two)[doubled : doubled + 2 * rank]]
    inputs = [values(rank, rank + 1, 2), values(rank, 2 * rank)]
    check(partial(hvd.allgather, process_set=process_set), inputs[:1], [one], wanted[:1], rank)
    inputs = [values(rank, rank + 1, 2), values(rank, 2 * rank)]
    check(lambda *xs: hvd.grouped_allgather(list(xs), process_set=process_set), inputs, [one, two], wanted, rank)


def of_broadcast(rank: int, size: int, process_set: Any) -> None:
    """On the root the average of all g(r), elsewhere 0."""
    root = size - 1
    given = [values(r, 3, salt=5) for r in range(size)]
    broadcast = partial(hvd.broadcast, root_rank=root, process_set=process_set)
    assert broadcast(torch.tensor([float(rank)])).item() == root
    wanted = mean(given) if rank == root else torch.zeros(3, dtype=torch.float64)
    check(broadcast, [values(rank, 3)], [given], [wanted], rank)


def of_reducescatter(rank: int, size: int, process_set: Any) -> None:
    """All g(r) one after the other, times the factors; times the number of ranks under Sum."""
    lengths = [[(rows + size - 1 - r) // size for r in range(size)] for rows in (5, 2)]
    one, two = ([values(r, lengths[i][r], 2, salt=6 + i) for r in range(size)] for i in (0, 1))
    for op, times in ((hvd.Average, 1), (hvd.Sum, size)):
        plain = partial(hvd.reducescatter, op=op, process_set=process_set)
        scaled = partial(plain, prescale_factor=0.25, postscale_factor=3.0)
        grouped = partial(hvd.grouped_reducescatter, op=op, process_set=process_set)
        wanted = [times * torch.cat(one), times * torch.cat(two)]
        check(plain, [values(rank, 5, 2)], [one], wanted[:1], rank)
        check(scaled, [values(rank, 5, 2)], [one], [0.75 * wanted[0]], rank)
        inputs = [values(rank, 5, 2), values(rank, 2, 2)]
        check(lambda *xs, verb=grouped: verb(list(xs)), inputs, [one, two], wanted, rank)


def of_alltoall(rank: int, size: int, process_set: Any) -> None:
    """The rows of all g(r) that come from this rank's rows. Rank r sends s + 1 rows to rank s, or 2."""
    own = [values(r, size * (r + 1), 2, salt=8) for r in range(size)]
    wanted = torch.cat([own[s][rank * (s + 1) : (rank + 1) * (s + 1)] for s in range(size)])
    splits = list(range(1, size + 1))
    uneven = lambda x: hvd.alltoall(x, splits, process_set=process_set)[0]  # noqa: E731
    check(uneven, [values(rank, sum(splits), 2)], [own], [wanted], rank)
    own = [values(r, 2 * size, salt=9) for r in range(size)]
    wanted = torch.cat([own[s][2 * rank : 2 * rank + 2] for s in range(size)])
    check(partial(hvd.alltoall, process_set=process_set), [values(rank, 2 * size)], [own], [wanted], rank)


def every_verb(rank: int, size: int, process_set: Any) -> None:
    for of_verb in (of_allreduce, of_allgather, of_reducescatter, of_alltoall):
        of_verb(rank, size, process_set)


@on_ranks(2, 3, *wide(1, 4))
def test_gradients_are_horovods() -> None:
    every_verb(hvd.rank(), hvd.size(), None)
    of_broadcast(hvd.rank(), hvd.size(), None)


@on_ranks(3)
def test_gradients_count_the_ranks_of_the_process_set() -> None:
    """Of ranks 0 and 1, the root is rank 1 however roots are counted."""
    for ranks, verbs in (([1, 2], every_verb), ([0, 1], of_broadcast)):
        group = torch.distributed.new_group(ranks)
        if hvd.rank() in ranks:
            assert isinstance(group, torch.distributed.ProcessGroup)
            with Communicator(group) as communicator:
                verbs(communicator.rank, communicator.size, communicator)


Lists = Callable[[list[Tensor]], list[Tensor]]


def second_derivatives(inputs: list[Tensor], forward: Lists, backward: Lists) -> list[Tensor]:
    """Return, of one process that has the inputs of all ranks, the gradients of the sum of squares of the gradients of the sum of
    cubes of a verb's results. forward, backward: of the tensors of all ranks, the results of the verb and its gradients."""
    results = [result.detach() for result in forward(inputs)]
    slopes = [(3 * result**2).requires_grad_() for result in results]
    gradients = backward(slopes)
    of_slopes = torch.autograd.grad(gradients, slopes, [2 * gradient.detach() for gradient in gradients])
    return backward([6 * result * each for result, each in zip(results, of_slopes, strict=True)])


def on_root(tensors: list[Tensor], root: int) -> list[Tensor]:
    """Return the mean on the root, and zeros elsewhere."""
    return [mean(tensors) * (rank == root) for rank in range(len(tensors))]


@on_ranks(2, 3)
def test_gradients_have_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    inputs = [values(each, 2 * size, salt=10) for each in range(size)]
    rows = [slice(2 * each, 2 * each + 2) for each in range(size)]
    few = [each[:2] for each in inputs]
    copied = lambda reduce: lambda xs: [reduce(xs)] * size  # noqa: E731
    scattered = lambda reduce: lambda xs: [reduce(xs)[part] for part in rows]  # noqa: E731
    joined = lambda times: lambda gs: [times * torch.cat(gs)] * size  # noqa: E731
    turned = lambda xs: [torch.cat([x[part] for x in xs]) for part in rows]  # noqa: E731
    root = size - 1
    cases: list[tuple[Callable[[Tensor], Any], list[Tensor], Lists, Lists]] = [
        (partial(hvd.allreduce, op=hvd.Sum), inputs, copied(total), copied(total)),
        (partial(hvd.allreduce, op=hvd.Average), inputs, copied(mean), copied(mean)),
        (lambda x: hvd.grouped_allreduce([x], op=hvd.Average)[0], inputs, copied(mean), copied(mean)),
        (hvd.allgather, few, joined(1), scattered(mean)),
        (partial(hvd.broadcast, root_rank=root), inputs, copied(lambda xs: xs[root]), lambda gs: on_root(gs, root)),
        (partial(hvd.reducescatter, op=hvd.Average), inputs, scattered(mean), joined(1)),
        (partial(hvd.reducescatter, op=hvd.Sum), inputs, scattered(total), joined(size)),
        (hvd.alltoall, inputs, turned, turned),
    ]
    for verb, given, forward, backward in cases:
        leaf = given[rank].clone().requires_grad_()
        (gradient,) = torch.autograd.grad((verb(leaf) ** 3).sum(), leaf, create_graph=True)
        (found,) = torch.autograd.grad((gradient**2).sum(), leaf)
        close([found], [second_derivatives(given, forward, backward)[rank]])


@on_ranks(2)
def test_a_penalty_of_gradients_counts_every_path() -> None:
    """The gradients of a loss that does not use a verb alone: their squares depend on the average too."""
    inputs = [values(rank, 3, salt=11) for rank in range(hvd.size())]
    leaf = inputs[hvd.rank()].clone().requires_grad_()
    (gradient,) = torch.autograd.grad((leaf * hvd.allreduce(leaf)).sum(), leaf, create_graph=True)
    gradient.square().sum().backward()
    # gradient = 2 * average of all; so half of its square's gradient is 2 * (average of 2 * gradient)
    assert leaf.grad is not None
    close([leaf.grad], [8 * mean(inputs)])


def through_a_cast() -> None:
    """Powers of two are exact in float16."""
    size, rank = hvd.size(), hvd.rank()
    given = torch.full((4,), 2.0**rank)
    (reduced,) = gradients_of(
        lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum), [given], [given]
    )
    assert reduced.tolist() == [2.0**size - 1] * 4
    (scattered,) = gradients_of(
        lambda x: hvd.reducescatter(x, compression=hvd.Compression.fp16, op=hvd.Sum),
        [torch.ones(size)],
        [torch.full((1,), 2.0**rank)],
    )
    assert scattered.tolist() == [size * 2.0**r for r in range(size)]


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
    through_a_cast()
