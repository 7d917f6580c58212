"""Horovod's errors: every row of the guide's table is provoked on two ranks, which raise what it says, and go on as it says. What
raises the same as with Horovod is provoked, too."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import Mismatch, PeerJoined, PeerLost
from gradwire.trainer.world.process_sets import NotIncluded, Refused
from gradwire.trainer.world.world import NotInitialized
from tests.pages import ROOT
from tests.ranks.forms import GROUPED, VERBS, Form, done, forms
from tests.ranks.training import on_ranks

RAISED = (Mismatch, Refused, NotIncluded, PeerJoined, PeerLost, NotInitialized, ValueError, AssertionError, UserWarning)
KINDS: dict[str, type[Exception] | None] = {kind.__name__: kind for kind in RAISED}
KINDS |= {"HorovodInternalError": hvd.HorovodInternalError, "nothing": None}

ALLGATHERS, ALLTOALLS, SCATTERS = (
    list(forms(*verbs).values())
    for verbs in (("allgather", "grouped_allgather"), ("alltoall",), ("reducescatter", "grouped_reducescatter"))
)
NAMED = [form for name, form in forms(*VERBS, *GROUPED).items() if name.endswith("_async")]


@dataclass(frozen=True)
class Row:
    program: str
    horovod: str
    here: str
    raised_on: str
    afterwards: str


def kinds(cell: str) -> list[type[Exception] | None]:
    return [KINDS[name] for name in re.findall(r"`(\w+)`", cell)] or [KINDS[cell]]


def rows() -> list[Row]:
    text = (ROOT / "docs/guides/from-horovod.md").read_text().split("## Errors")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def mine(ranks: tuple[Any, Any]) -> Any:
    """Return what is this rank's of what two ranks give."""
    return ranks[hvd.rank()]


def calls(verbs: list[Form], *given: tuple[Tensor, Tensor], **options: Any) -> list[Callable[[], Any]]:
    """Return each verb's call with this rank's tensor of each pair."""
    return [lambda v=verb, p=pair: done(v(mine(p), **options)) for verb in verbs for pair in given]


ones = torch.ones
INTS = torch.int32
BEYOND = [(ones(2, 3), ones(2, 4)), (ones(4, 2), ones(4, 2, 1)), (ones(2, 6), ones(4, 3))]
TYPES = [(ones(2, 2, dtype=INTS), ones(2, 2))]
#: Of these the parts have equally many elements, too, in the second and third.
SHAPES = [(ones(17, 3), ones(18, 3)), (ones(8, 6), ones(16, 3)), (ones(12, 6), ones(12, 2, 3)), (ones(7), ones(5))]


def held_by_all(verb: Form) -> None:
    """Raise as the second call does, and then find the first one as it should be."""
    handle = verb(ones(2), name="loss")
    try:
        verb(ones(2), name="loss")
    finally:
        hvd.synchronize(handle)


def held_by_one(verb: Form) -> None:
    handle = verb(ones(2), name="loss")
    try:
        if hvd.rank() == 0:
            verb(ones(2), name="loss")
    finally:
        hvd.synchronize(handle)


def refused_by_one() -> None:
    """Rank 0 refuses what rank 1 calls, and goes on."""
    handle = hvd.allreduce_async(ones(21), name="loss")
    if hvd.rank() == 1:
        hvd.synchronize(handle)
    else:
        with pytest.raises(ValueError, match=r"rank 0: allreduce: the name 'loss' is in flight"):
            hvd.allreduce(ones(21), name="loss")
        hvd.synchronize(handle)
    with pytest.raises(Mismatch, match=r"rank 0 called barrier.*rank 0 refused a allreduce with name='loss'") as error:
        hvd.barrier() if hvd.rank() == 0 else hvd.allreduce(ones(21), name="loss")
    raise error.value


def across_a_barrier() -> None:
    """Rank 1 is in step again when it has repeated the call that failed."""
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(ones(24))
        hvd.barrier()
        hvd.synchronize(handle)
    else:
        error = raised(hvd.barrier)
        hvd.barrier()
        assert error is not None
        raise error


def other_order() -> None:
    names = mine((("first", "second"), ("second", "first")))
    lengths = {"first": 22, "second": 23}
    errors = [raised(lambda name=name: hvd.allreduce(ones(lengths[name]), name=name)) for name in names]
    assert all(type(error) is Mismatch for error in errors), errors
    raise errors[0]


def outside() -> None:
    alone = hvd.add_process_set([0])
    try:
        if hvd.rank() == 1:
            hvd.allreduce(ones(2), process_set=alone)
    finally:
        hvd.remove_process_set(alone)


def joined(verb: Form) -> None:
    if hvd.rank() == 1:
        hvd.join()
        return
    try:
        done(verb(ones(3)))
    finally:
        hvd.join()


def wrapped(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2, bias=False)


def misnamed(names: list[tuple[str, int]]) -> None:
    model = nn.Linear(3, 2)
    wrapped(model, named_parameters=[(name, list(model.parameters())[place]) for name, place in names])


class Odd(nn.Module):
    """Has parameters and entries of its state_dict() that are None, integers without gradients, and values of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 1.0 + hvd.rank()))
        self.version = nn.Parameter(torch.tensor([3, 4]) + hvd.rank(), requires_grad=False)
        self.register_parameter("bias", None)
        self.register_buffer("is_ready", torch.tensor([hvd.rank() == 0]))

    def get_extra_state(self) -> Any:
        return None

    def set_extra_state(self, state: Any) -> None:
        assert state is None


def broadcast_what_is_none() -> None:
    for takes_parameters in (
        lambda model: model.state_dict(),
        lambda model: [model.weight, model.bias, model.version, model.is_ready],
        lambda model: [("weight", model.weight), ("bias", None), ("version", model.version), ("ready", model.is_ready)],
    ):
        model = Odd()
        hvd.broadcast_parameters(takes_parameters(model), root_rank=0)
        assert model.weight.tolist() == [1.0] * 4
        assert (model.version.tolist(), model.is_ready.tolist()) == ([3, 4], [True])
    inner = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9)
    for optimizer in (inner, hvd.DistributedOptimizer(inner, model.named_parameters())):
        inner.state.clear()
        if hvd.rank() == 0:
            inner.state[model.weight] = {"momentum_buffer": torch.arange(4.0), "note": None}
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert inner.param_groups[0]["lr"] == 0.1
        assert list(inner.state) == [model.weight]
        assert inner.state[model.weight]["momentum_buffer"].tolist() == [0, 1, 2, 3]
        assert inner.state[model.weight]["note"] is None
        inner.state[model.weight] = {"momentum_buffer": None}
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert inner.state[model.weight]["momentum_buffer"] is None
    model.weight.sum().backward()
    optimizer.step()
    assert (model.version.grad, model.version.tolist()) == (None, [3, 4])
    assert torch.equal(hvd.broadcast(model.weight.grad, root_rank=0), model.weight.grad)


def scatter_of_equal_lengths() -> None:
    with pytest.raises(
        Mismatch, match=r"float32\[24, 24\], shape=\[..., 6\],.*shape=\[..., 3\],.*; they differ in shape$"
    ):
        hvd.reducescatter(mine((ones(8, 6), ones(16, 3))), op=hvd.Sum)
    assert hvd.reducescatter(ones(4, 3), op=hvd.Sum).tolist() == [[2.0] * 3] * 2
    hvd.reducescatter(ones(16, 3) if hvd.rank() else ones(8, 6), op=hvd.Max)


def step_after_synchronize() -> None:
    model = linear()
    optimizer = wrapped(model)
    for ends in (
        optimizer.zero_grad,
        optimizer.step,
    ):  # one batch is dropped; another one is stepped with as Horovod says
        model(ones(1, 3)).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            ends()
        optimizer.step()
    model(ones(1, 3)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="^optimizer.step.. called without optimizer.skip_synchronize.. context after"):
        optimizer.step()  # programs filter Horovod's warning by its first words
    optimizer.synchronize()
    optimizer.step()


def zero_grad_between() -> None:
    model = linear()
    optimizer = wrapped(model)
    model(ones(1, 3)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()


def skip_with_adasum() -> None:
    model = linear()
    optimizer = wrapped(model, op=hvd.Adasum)
    model(ones(1, 3)).sum().backward()
    with optimizer.skip_synchronize():
        optimizer.step()


def lost() -> None:
    if hvd.rank() == 1:
        hvd.shutdown()
    else:
        hvd.allreduce(ones(2))


def uninitialized() -> None:
    hvd.shutdown()
    try:
        hvd.allreduce(ones(2))
    finally:
        hvd.init()


#: By what the guide says that the program does.
PROVOKED: dict[str, list[Callable[[], Any]]] = {
    "gives `allgather` or `alltoall` tensors of different dtypes, or of shapes that differ beyond dimension 0": [
        *calls([*ALLGATHERS, *ALLTOALLS], *BEYOND, *TYPES),
        *calls(ALLGATHERS, (ones(()), ones(1))),
    ],
    "gives `alltoall` splits whose sum is not the number of rows, or no splits and rows that the ranks cannot share equally": [
        *(lambda verb=verb: done(verb(ones(4), splits=mine(([2, 2], [2, 1])))) for verb in ALLTOALLS),
        *calls(ALLTOALLS, (ones(4), ones(3))),
    ],
    "gives `allreduce`, `broadcast` or `reducescatter` different shapes, dtypes, ops, factors or roots, or calls different "
    "verbs": [
        *calls(
            [hvd.allreduce, hvd.allreduce_async, lambda x: hvd.grouped_allreduce([x, x])],
            (ones(6), ones(7)),
            *BEYOND,
            *TYPES,
        ),
        lambda: hvd.allreduce(ones(3), op=mine((hvd.Sum, hvd.Max))),
        lambda: hvd.allreduce(ones(4), op=hvd.Sum, prescale_factor=mine((1.0, 2.0))),
        *calls([hvd.broadcast, hvd.broadcast_async], (ones(6), ones(7)), *TYPES, root_rank=0),
        lambda: hvd.broadcast(ones(8), root_rank=hvd.rank()),
        *calls(SCATTERS, *SHAPES, *TYPES),
        scatter_of_equal_lengths,
        lambda: mine((lambda: hvd.allreduce(ones(9)), lambda: hvd.broadcast(ones(9), 0)))(),
    ],
    "begins named operations in another order on one rank, or before a `barrier` and on other ranks after it": [
        other_order,
        across_a_barrier,
    ],
    "gives `reducescatter` a scalar, or `op=Adasum`": [
        *calls(SCATTERS, (ones(()), ones(()))),
        *calls(SCATTERS, (ones(4), ones(4)), op=hvd.Adasum),
    ],
    "reuses a name in flight, on one rank, in a call that the others make": [refused_by_one],
    "calls a verb on a rank outside of the call's `process_set`": [outside],
    "calls `allgather` or `broadcast` while a rank has joined": [
        partial(joined, verb) for verb in forms("allgather", "broadcast").values()
    ],
    "calls a verb when a rank has ended": [lost],
    "calls a verb before `init()`": [uninitialized],
    "calls `zero_grad()` between `backward()` and `step()`, or `skip_synchronize()` with `op=Adasum`": [
        zero_grad_between,
        skip_with_adasum,
    ],
    "broadcasts the state of LBFGS": [
        lambda: hvd.broadcast_optimizer_state(
            hvd.DistributedOptimizer(torch.optim.LBFGS(linear().parameters())), root_rank=0
        )
    ],
}

#: What the guide does not list, because Horovod does the same.
SAME: dict[Row, list[Callable[[], Any]]] = {
    Row("reuses a name in flight", "`ValueError`", "`ValueError`", "that rank", "work"): [
        *(partial(held_by_all, verb) for verb in NAMED),
        *(partial(held_by_one, verb) for verb in NAMED),
    ],
    Row("gives arguments that do not fit together", "`ValueError`", "`ValueError`", "that rank", "work"): [
        lambda: hvd.allreduce(ones(2), average=True, op=hvd.Sum),
        partial(misnamed, [("weight", 0), ("weight", 1)]),
        partial(misnamed, [("weight", 0)]),
        lambda: wrapped(linear(), op=hvd.Sum, gradient_predivide_factor=2.0),
    ],
    Row("steps after synchronize()", "`UserWarning`", "`UserWarning`", "that rank", "work"): [step_after_synchronize],
    Row("broadcasts None, or integer parameters", "nothing", "nothing", "", "work"): [broadcast_what_is_none],
}


def raised(case: Callable[[], Any]) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            case()
        except Exception as error:
            return error
    return None


def check(row: Row, error: Exception | None, everyones: list[bool], case: str) -> None:
    """Compare what this rank raised, and which ranks raised, with the row."""
    here, horovod = kinds(row.here), kinds(row.horovod)
    if here == [None]:
        assert row.raised_on == ""
        assert everyones == [False, False], case
        return
    assert all(everyones) if "all" in row.raised_on else any(everyones), f"{case}, raised on {everyones}"
    if error is not None:
        assert any(type(error) is kind for kind in here), case
        assert (
            horovod == [None] or "stall" in row.horovod or any(isinstance(error, kind) for kind in horovod if kind)
        ), case


@pytest.mark.parametrize("row", [*rows(), *SAME], ids=lambda row: row.program)
@on_ranks(2, initialized=False)
def test_an_error(row: Row) -> None:
    hvd.init()
    try:
        for number, case in enumerate(SAME.get(row) or PROVOKED[row.program]):
            error = raised(case)
            if row.afterwards.startswith("need"):
                hvd.shutdown()
                hvd.init()
            else:
                assert row.afterwards.startswith("work")
            assert hvd.allreduce(ones(64), op=hvd.Sum).tolist() == [2.0] * 64, f"case {number}: {error!r}"
            check(row, error, hvd.allgather_object(error is not None), f"case {number}: {error!r}")
    finally:
        hvd.shutdown()


def test_each_row_is_provoked() -> None:
    assert [row.program for row in rows()] == list(PROVOKED)
