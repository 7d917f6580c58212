"""Process sets: who takes part, whose root it is, and what happens to those outside."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.trainer.world.process_sets import ProcessSetLike
from gradwire.trainer.world.world import current_world
from tests.ranks.forms import done, forms
from tests.ranks.training import on_ranks

SIZE = 4


def mine() -> Tensor:
    return torch.tensor([float(hvd.rank())])


def parameters_of(root: int, process_set: ProcessSetLike) -> Tensor:
    tensor = mine()
    hvd.broadcast_parameters([tensor], root, process_set)
    return tensor


def learning_rate_of(root: int, process_set: ProcessSetLike) -> float:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=float(hvd.rank()))
    hvd.broadcast_optimizer_state(optimizer, root, process_set=process_set)
    return float(optimizer.param_groups[0]["lr"])


def calls(process_set: ProcessSetLike, ranks: list[int], root: int) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Yield every form of every verb by name, called with a process set of these ranks; and what it gives them."""
    rows = 12 // len(ranks)
    for verb, options, given, wanted in (
        ("allreduce", {}, mine(), [sum(ranks) / len(ranks)]),
        ("grouped_allreduce", {"op": hvd.Max}, mine(), [max(ranks)]),
        ("allgather", {}, mine(), ranks),
        ("grouped_allgather", {}, mine(), ranks),
        ("reducescatter", {"op": hvd.Sum}, mine().repeat(12), [sum(ranks)] * rows),
        ("alltoall", {}, mine().repeat(12), [rank for rank in ranks for _ in range(rows)]),
        ("broadcast", {"root_rank": root}, mine(), [root]),
    ):
        for name, form in forms(verb).items():
            yield name, partial(form, given.clone(), process_set=process_set, **options), wanted
    yield "broadcast_object", lambda: hvd.broadcast_object(hvd.rank(), root, process_set=process_set), root
    yield "broadcast_parameters", lambda: parameters_of(root, process_set), [root]
    yield "broadcast_optimizer_state", lambda: learning_rate_of(root, process_set), root
    yield "allgather_object", lambda: hvd.allgather_object(hvd.rank(), process_set=process_set), ranks
    yield "barrier", lambda: hvd.barrier(process_set=process_set), None


def result(call: Callable[[], Any]) -> Any:
    """Return what a call gives, as numbers: of a group its only tensor, of an alltoall the rows alone."""
    given = done(call())
    if isinstance(given, (list, tuple)) and isinstance(given[0], Tensor):
        given = given[0]
    return given.tolist() if isinstance(given, Tensor) else given


@on_ranks(SIZE)
def test_every_verb_in_every_set() -> None:
    """Disjoint, overlapping and unordered sets: members get what members gave, from a root of the world; others an error
    at once."""
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 2], (3, 1), range(1, 4), {2})]
    assert [ps.ranks for ps in sets] == [[0, 2], [1, 3], [1, 2, 3], [2]]
    assert [ps.process_set_id for ps in sets] == [1, 2, 3, 4]
    for ps, ranks in [*((ps, ps.ranks) for ps in sets), (hvd.global_process_set, [0, 1, 2, 3]), (None, [0, 1, 2, 3])]:
        for name, call, wanted in calls(ps, ranks, ranks[-1]):
            if hvd.rank() in ranks:
                assert result(call) == wanted, (name, ps)
                continue
            with pytest.raises(hvd.HorovodInternalError, match="this process is not part of ProcessSet"):
                call()
            with pytest.raises(ValueError, match=f"^rank {hvd.rank()}: "):
                call()


@on_ranks(SIZE)
def test_the_same_call_in_all_sets() -> None:
    sets = [hvd.global_process_set, *(hvd.add_process_set(ranks) for ranks in ([0, 2], [1, 3], [1, 2, 3], [2]))]
    ours = [ps for ps in sets if ps.included()]
    handles = []
    for turn in range(3):
        ours.append(ours.pop(0))
        for ps in ours[hvd.rank() % 2 :] + ours[: hvd.rank() % 2]:
            handles.append((ps, hvd.allreduce_async(mine(), name=f"same {turn}", op=hvd.Sum, process_set=ps)))
    for ps, handle in reversed(handles):
        assert hvd.synchronize(handle).item() == sum(ps.ranks), ps


@on_ranks(SIZE)
def test_what_sets_say() -> None:
    """size() on all ranks, rank() and included() on members and on others, before, during and after registration."""
    ps = hvd.ProcessSet([2, 0])
    assert (ps.process_set_id, ps.ranks, ps.size(), ps.rank(), ps.included()) == (None, [0, 2], None, None, None)
    with pytest.raises(ValueError, match=r"ProcessSet\(process_set_id=None, ranks=\[0, 2\]\) is not registered"):
        hvd.allreduce(mine(), process_set=ps)
    assert not hvd.remove_process_set(ps)
    assert hvd.add_process_set(ps) is ps
    assert (ps.process_set_id, ps.size(), ps.included()) == (1, 2, hvd.rank() in (0, 2))
    if ps.included():
        assert ps.rank() == [0, 2].index(hvd.rank())
    else:
        with pytest.raises(ValueError, match="this process is not part of ProcessSet"):
            ps.rank()
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.size(), everyone.rank()) == (0, SIZE, hvd.rank())
    assert everyone.included()
    assert not hvd.remove_process_set(everyone)
    if ps.included():
        hvd.barrier(ps)
    assert hvd.remove_process_set(ps)
    assert not hvd.remove_process_set(ps)
    assert (ps.process_set_id, ps.size()) == (None, None)
    with pytest.raises(ValueError, match="is not registered"):
        hvd.allreduce(mine(), process_set=ps)
    again = hvd.add_process_set([0, 2])
    assert again.process_set_id == 2, "a number is not given twice"
    if again.included():
        assert hvd.allgather(mine(), process_set=again).tolist() == [0, 2]


@on_ranks(SIZE)
def test_refused_sets() -> None:
    hvd.add_process_set([0, 1])
    for wrong, message in [
        ([1, 0], "there is a process set of these ranks already"),
        (range(SIZE), "there is a process set of these ranks already"),
        ([0, SIZE], r"from 0 to 3, not \[0, 4\]"),
        ([-1], r"from 0 to 3, not \[-1\]"),
        ([1, 1], r"each once, .* not \[1, 1\]"),
        ([], "at least one rank"),
        (["a"], "ranks must be whole numbers"),
        (3, "ranks must be whole numbers"),
        (None, "ranks must be whole numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            hvd.add_process_set(wrong)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"rank 0 called add_process_set with \[\[0\]\], rank 1 add_process_set with \[\[1\]\]"
    ):
        hvd.add_process_set([min(hvd.rank(), 1)])
    assert len(current_world().process_sets) == 2
    assert hvd.add_process_set([3]).process_set_id == 2
    for wrong in ([0], object(), "all"):
        with pytest.raises(ValueError, match=f"rank {hvd.rank()}: process_set is .*: a ProcessSet is needed"):
            hvd.allreduce(mine(), process_set=wrong)  # type: ignore[arg-type]


@on_ranks(SIZE)
def test_roots() -> None:
    ps = hvd.add_process_set([1, 3])
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    if ps.included():
        for call in (
            lambda: hvd.broadcast(mine(), 0, process_set=ps),
            lambda: hvd.broadcast_async_(mine(), 0, process_set=ps),
            lambda: hvd.broadcast_object(1, 0, process_set=ps),
            lambda: hvd.broadcast_parameters([mine()], 0, ps),
            lambda: hvd.broadcast_optimizer_state(optimizer, 0, process_set=ps),
        ):
            with pytest.raises(ValueError, match="root_rank=0 does not take part; ranks of the world that do are 1, 3"):
                call()
        assert hvd.broadcast(mine(), 3, process_set=ps).tolist() == [3]
    with pytest.raises(ValueError, match="root_rank=4 does not take part; ranks of the world that do are 0, 1, 2, 3"):
        hvd.broadcast(mine(), SIZE)
    with pytest.raises(TypeError, match="root_rank must be a whole number, not '0'"):
        hvd.broadcast(mine(), "0")  # type: ignore[arg-type]


@on_ranks(SIZE)
def test_made_from_torch() -> None:
    """A group's ranks, and a Communicator's, make a process set; given themselves, they count roots in the world."""
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = groups[hvd.rank() // 2]
    with Communicator(group) as communicator:
        first = hvd.rank() // 2 * 2
        assert hvd.ProcessSet(group).ranks == hvd.ProcessSet(communicator).ranks == [first, first + 1]
        for process_set in (group, communicator):
            assert hvd.broadcast(mine(), first + 1, process_set=process_set).tolist() == [first + 1]
    with pytest.raises(ValueError, match=r"with \[\[0, 1\]\], rank 2 add_process_set with \[\[2, 3\]\]"):
        hvd.add_process_set(hvd.ProcessSet(group))
    ps = hvd.add_process_set(hvd.ProcessSet([0, 1]))
    assert ps.size() == 2


@on_ranks(SIZE, initialized=False)
def test_static_sets() -> None:
    """init() registers sets, which other ranks may build in another order of ranks, and again in the next world."""
    even, odd = hvd.ProcessSet([0, 2]), hvd.ProcessSet([3, 1])
    for _ in range(2):
        hvd.init(process_sets=[even, odd, [0]])
        assert (even.process_set_id, odd.process_set_id) == (1, 2)
        ours = odd if odd.included() else even
        assert hvd.allgather(mine(), process_set=ours).tolist() == ours.ranks
        assert len(current_world().process_sets) == 4
        hvd.shutdown()
        assert (even.process_set_id, even.ranks) == (None, [0, 2])
    for wrong, message in [([[0], [0]], "already"), ([[9]], "from 0 to 3"), ("static", "\"dynamic\", not 'static'")]:
        with pytest.raises(ValueError, match=message):
            hvd.init(process_sets=wrong)  # type: ignore[arg-type]
        assert not hvd.is_initialized()
    hvd.init(process_sets="dynamic")
    assert hvd.add_process_set([1]).size() == 1
    hvd.shutdown()


@on_ranks(SIZE, initialized=False)
def test_smaller_worlds() -> None:
    """Two worlds of two at once, one of them in an order of its own."""
    launched = torch.distributed.get_rank()
    hvd.init([0, 2] if launched in (0, 2) else [3, 1], process_sets=[[1]])
    gathered = hvd.allgather(torch.tensor([float(launched)])).tolist()
    root = hvd.broadcast(torch.tensor([float(launched)]), 1).tolist()
    ps = hvd.add_process_set([0])
    assert (ps.included(), ps.size()) == (hvd.rank() == 0, 1)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    (weight * hvd.rank()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert weight.item() == -0.5
    place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    hvd.shutdown()
    number = 0 if launched in (0, 3) else 1
    members = [0, 2] if launched in (0, 2) else [3, 1]
    assert (place, gathered, root) == ([number, 2, number, 2], members, members[1:])


@on_ranks(SIZE, initialized=False)
def test_wrong_worlds() -> None:
    """A list that others contradict, or that this process is not in, is refused on all processes."""
    rank = torch.distributed.get_rank()
    for comm, message in [
        ([0, 1], r"rank 2 gave \[0, 1\]"),
        ([rank, rank], r"rank 0 gave \[0, 0\]"),
        ([rank, 4], r"rank 0 gave \[0, 4\]"),
        ([0, 1] if rank else [0], r"rank 1 gave \[0, 1\]"),
        ([0] if rank == 0 else None, r"rank 1 gave \[0, 1, 2, 3\]"),
    ]:
        with pytest.raises(ValueError, match=f"^rank {rank}: init.* takes different ranks .*{message}"):
            hvd.init(comm=comm)
    with pytest.raises(ValueError, match="ranks must be whole numbers"):
        hvd.init(comm=3)
    hvd.init(comm=[] if rank else None)
    assert hvd.size() == SIZE
    hvd.shutdown()
    order = [3, 1, 0, 2]
    hvd.init(comm=order)
    assert (hvd.rank(), hvd.local_rank()) == (order.index(rank), order.index(rank))
    assert hvd.allgather(torch.tensor([rank])).tolist() == order
    assert hvd.broadcast(torch.tensor([rank]), 0, process_set=torch.distributed.group.WORLD).tolist() == [3]
    with pytest.raises(ValueError, match=r"after init\(comm=\), a process set is made of a list of ranks"):
        hvd.add_process_set(hvd.ProcessSet(torch.distributed.group.WORLD))  # type: ignore[arg-type]
    hvd.shutdown()


@on_ranks(SIZE)
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_trained_in_sets(compression: str) -> None:
    ps = hvd.add_process_set([0, 2])
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    before = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        compression=compression,
        process_set=ps,
    )
    for step in range(2):
        if step == 1:
            assert hvd.remove_process_set(ps), "which an optimizer outlives"
            hvd.add_process_set(ps)
        optimizer.zero_grad()
        loss = (model.weight * hvd.rank()).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=ps)
    moved = before - model.weight.detach()
    assert torch.allclose(moved, moved[0, 0].expand_as(moved), atol=0.1)
    everyone = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    everyone.close()
    optimizer.close()
    assert round(moved.mean().item(), 1) == (6.0 if hvd.rank() == 3 else 2.0)
