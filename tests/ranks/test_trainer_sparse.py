"""Sparse gradients of embeddings: what one process has of the whole batch, and the same bits on all ranks."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from tests.ranks.training import BATCH, STEPS, assert_close, assert_same_on_all_ranks, distributed, on_ranks

ROWS = 40
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "sparse adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
}


def words(step: int) -> Tensor:
    """The global batch: of each sample three words, some of them several times."""
    return torch.randint(0, ROWS, (BATCH, 3), generator=torch.Generator().manual_seed(step))


class Bag(nn.Module):
    """Two tables of words, of which the second is seldom looked into."""

    def __init__(self, *, sparse: bool, dense_too: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, 4, sparse=sparse)
        self.rare = nn.Embedding(ROWS, 2, sparse=sparse)
        self.out = nn.Linear(4, 2) if dense_too else None

    def forward(self, samples: Tensor, *, rare: bool) -> Tensor:
        found = self.words(samples).mean(1)
        out = found[:, :2] if self.out is None else self.out(found)
        return (out + self.rare(samples[:, 0]) if rare else out).square().sum(1).mean()


def losses(model: Bag, step: int, parts: int, ranks: Iterable[int]) -> list[Tensor]:
    """Return what these of three ranks are to lose. The rare table is for the first rank's samples alone, and not for every
    step: its mean has zeros for the others."""
    return [
        model(part, rare=rank == 0 and step % 2 == 0)
        for rank in ranks
        for part in words(step).chunk(3)[rank].chunk(parts)
    ]


def train(model: Bag, optimizer: torch.optim.Optimizer, parts: int, set_to_none: bool, ranks: Iterable[int]) -> None:
    ranks = list(ranks)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for loss in losses(model, step, parts, ranks):
            (loss / len(ranks)).backward()
        optimizer.step()


@on_ranks(3)
@pytest.mark.parametrize(
    ("name", "options", "set_to_none"),
    [
        ("sgd", {"gradient_predivide_factor": 4.0, "groups": 2}, False),
        ("sparse adam", {}, True),
        ("sgd", {"backward_passes_per_step": 4}, True),
        ("sgd", {"sparse_as_dense": True, "backward_passes_per_step": 4}, False),
        ("sgd", {"sparse_as_dense": True, "gradient_as_bucket_view": False}, True),
        ("sparse adam", {"sparse_as_dense": True}, True),
        ("sparse adam", {"sparse_as_dense": True, "backward_passes_per_step": 4, "bucket_bytes": 64}, True),
        ("adagrad", {}, True),
        ("sgd", {"policy": {"out.*": "none", "*": hvd.ErrorFeedback("int8")}}, True),
        ("sgd", {"compression": "bf16"}, True),
    ],
    ids=str,
)
def test_as_one_process(name: str, options: dict[str, Any], set_to_none: bool) -> None:
    """Ranks have other numbers of rows, and of one table some have no gradient."""
    parts = options.get("backward_passes_per_step", 1)
    model, alone = (Bag(sparse=True, dense_too=name != "sparse adam") for _ in range(2))
    optimizer = hvd.DistributedOptimizer(MAKERS[name](model.parameters()), model.named_parameters(), **options)
    train(model, optimizer, parts, set_to_none, [hvd.rank()])
    assert_same_on_all_ranks(model.parameters())
    train(alone, MAKERS[name](alone.parameters()), parts, True, range(3))
    casts = "compression" in options
    tolerance = {"rtol": 0.05, "atol": 0.02} if casts else {"rtol": 1e-4, "atol": 1e-5}
    assert_close(model.parameters(), alone.parameters(), **tolerance)
    if casts:
        assert not all(map(torch.equal, model.parameters(), alone.parameters())), "nothing was rounded"
    gradient = model.words.weight.grad
    assert gradient is not None
    assert gradient.is_sparse is not options.get("sparse_as_dense", False)
    if gradient.is_sparse:
        assert gradient.is_coalesced()
        assert_same_on_all_ranks([gradient.indices(), gradient.values()])


@on_ranks(2)
def test_other_optimizers_get_dense_gradients() -> None:
    """Such as Adam, which refuses sparse ones."""
    model, alone = (Bag(sparse=sparse, dense_too=True) for sparse in (True, False))
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), sparse_as_dense=True)
    train(model, optimizer, 1, True, [hvd.rank()])
    train(alone, torch.optim.Adam(alone.parameters(), weight_decay=0.1), 1, True, range(2))
    assert_close(model.parameters(), alone.parameters(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["closure", "next_forward"])
@on_ranks(2)
def test_a_sparse_optimizer_gets_sparse_gradients_back(way: str) -> None:
    """From a closure too, and where updates wait for the next forward."""
    tables = [nn.Embedding(6, 2, sparse=True, dtype=torch.float64) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    hvd.broadcast_parameters([table.weight for table in tables], root_rank=0)
    options: dict[str, Any] = {"rule": hvd.rules.NextForward(tables[0])} if way == "next_forward" else {}
    inner, alone = (torch.optim.SparseAdam(list(table.parameters()), lr=0.1) for table in tables)
    optimizer = hvd.DistributedOptimizer(inner, sparse_as_dense=True, **options)

    def loss(table: nn.Embedding, step: int, rank: int) -> Tensor:
        return (table(torch.tensor([step, 3 + rank])) - 1.0).square().sum()

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        found = loss(tables[0], step, hvd.rank())
        found.backward()
        return found

    for step in range(3):
        if way == "closure":
            optimizer.step(lambda step=step: closure(step))
        else:
            closure(step)
            optimizer.step()
        alone.zero_grad()
        (sum(loss(tables[1], step, rank) for rank in range(2)) / 2).backward()
        alone.step()
    optimizer.close()
    assert_close([tables[0].weight], [tables[1].weight], rtol=1e-9, atol=1e-12)


@on_ranks(3)
def test_a_gradient_that_is_sparse_on_one_rank_alone_is_refused() -> None:
    """Its rows would be lost without a word, were the dense ones of the other ranks to outweigh it. All ranks raise the error in
    the same step, also one that has no gradient, and one that waits in the next forward only."""
    row = torch.tensor([1])
    for kind in ("", "a rank without", "int8", "next_forward", "sum"):
        layer = nn.Linear(1, 3, bias=False)
        weight = layer.weight
        options: dict[str, Any] = {
            "int8": {"compression": "int8"},
            "next_forward": {"rule": hvd.rules.NextForward(layer)},
            "sum": {"op": hvd.Sum},
        }.get(kind, {})
        optimizer = distributed([weight], **options)
        for _ in range(2):
            layer(torch.ones(1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.settle()
        with pytest.raises(ValueError, match="sparse_as_dense"):  # noqa: PT012
            if hvd.rank() == 1:
                torch.embedding(weight, row, sparse=True).sum().backward()
            elif hvd.rank() == 0 or kind != "a rank without":
                layer(torch.ones(1)).sum().backward()
            optimizer.step()
            optimizer.settle()
        optimizer.close()


@on_ranks(2)
@pytest.mark.parametrize("steps", [1, 2])  # in the first step nobody knows yet that it is sparse
def test_sums(steps: int) -> None:
    table = nn.Embedding(4, 1, sparse=True)
    optimizer = distributed(table.parameters(), op=hvd.Sum)
    for _ in range(steps):
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank(), 3])).sum().backward()
        gradient = table.weight.grad
        assert gradient is not None
        assert gradient.to_dense().flatten().tolist() == [1, 1, 0, 2]
        optimizer.step()
    optimizer.synchronize()  # a sum that is summed again stays what it is
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().flatten().tolist() == [1, 1, 0, 2]
    with pytest.raises(RuntimeError, match="zero_grad"):
        table(torch.tensor([0])).sum().backward()


@on_ranks(2)
def test_accumulation_and_freezing() -> None:
    """A backward() after the exchange adds to the average; frozen tables keep out of it, and come back."""
    tables = nn.ModuleList(nn.Embedding(4, 1, sparse=True) for _ in range(2))
    optimizer = distributed(tables.parameters())

    def run() -> None:
        sum(table(torch.tensor([2 * hvd.rank()])).sum() for table in tables).backward()  # type: ignore[union-attr]

    def rows(table: nn.Module) -> list[float] | None:
        gradient = table.weight.grad
        return None if gradient is None else gradient.to_dense().flatten().tolist()  # type: ignore[operator, union-attr]

    run()
    run()
    assert [rows(table) for table in tables] == [[1, 0, 1, 0]] * 2
    optimizer.step()
    optimizer.zero_grad()
    tables[0].weight.requires_grad_(False)  # type: ignore[operator, union-attr]
    run()
    assert [rows(table) for table in tables] == [None, [0.5, 0, 0.5, 0]]
    optimizer.step()
    tables[0].weight.requires_grad_(True)  # type: ignore[operator, union-attr]
    for _ in range(2):
        optimizer.zero_grad()
        run()
        assert [rows(table) for table in tables] == [[0.5, 0, 0.5, 0]] * 2
        optimizer.step()


class Large(nn.Module):
    """A table of more than four megabytes, and what else uses it: nothing, its rows, or all of it."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.words = nn.EmbeddingBag(70_000, 16, sparse=True) if use == "bag" else nn.Embedding(70_000, 16, sparse=True)
        self.out = nn.Linear(16, 3)

    def forward(self, samples: Tensor) -> Tensor:
        found = self.words(samples) if self.use == "bag" else self.words(samples).mean(1)
        loss = self.out(found).square().sum(1).mean()
        return loss + self.words.weight.square().sum() if self.use == "all of it" else loss


def mapped_bytes() -> int:
    """Return the size of the largest segment of shared memory that this process has mapped."""
    maps = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "gradwire-" in line
    ]
    return max((int(end, 16) - int(begin, 16) for begin, end in maps), default=0)


@on_ranks(2)
@pytest.mark.parametrize("use", ["bag", "its rows", "all of it"])
def test_a_large_table_is_never_exchanged_as_a_dense_one(use: str) -> None:
    """Unless all of it has a gradient, as where weights are tied."""
    model, alone = Large(use), Large(use)
    before = mapped_bytes()
    optimizer = distributed(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    table_bytes = model.words.weight.nbytes
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        model(words(step).chunk(2)[hvd.rank()]).backward()
        alone(words(step)).backward()
        optimizer.step()
        plain.step()
        assert model.words.weight.grad is not None
        assert model.words.weight.grad.is_sparse is (use != "all of it")
        if use != "all of it":
            assert optimizer.stats.bytes_sent < table_bytes / 10
            assert mapped_bytes() <= max(before, table_bytes / 10)
    assert_same_on_all_ranks(model.parameters())
    assert_close(model.parameters(), alone.parameters(), rtol=1e-4, atol=1e-5)
    if use == "all of it":  # from the second step on without indices, as any dense gradient
        assert optimizer.stats.bytes_sent < 4 * table_bytes


@on_ranks(2)
def test_large_tables_that_are_added_or_found_dense() -> None:
    first, second = Large("its rows"), Large("all of it")
    optimizer = distributed(first.parameters(), op=hvd.Sum)
    optimizer.add_param_group({"params": list(second.parameters())})
    samples = words(0).chunk(2)[hvd.rank()]
    for _ in range(2):
        optimizer.zero_grad()
        (first(samples) + second(samples)).backward()
        optimizer.step()
    assert first.words.weight.grad is not None
    assert second.words.weight.grad is not None
    assert (first.words.weight.grad.is_sparse, second.words.weight.grad.is_sparse) == (True, False)
    with pytest.raises(RuntimeError, match="zero_grad"):
        second(samples).backward()
