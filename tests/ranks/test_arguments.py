"""A caller's mistake is a ValueError or TypeError on the caller, before anything is sent; the Communicator goes on."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import Communicator
from gradwire.collectives.plan.algorithms import PLANNERS
from tests.harness import EXCHANGE_TIMEOUT_S, Worlds
from tests.ranks.exact import Checks, communicator, contribution, reduced

IN_SHARED_MEMORY = ("allreduce", "barrier")
ONE, TWO = torch.ones(1), torch.ones(2)
Mistake = Callable[[Communicator], object]

MISTAKES: dict[str, tuple[type[Exception], str, Mistake]] = {
    "no tensor": (TypeError, "Tensor", lambda c: c.allreduce([1.0])),
    "complex": (TypeError, "complex64.*float32", lambda c: c.allreduce(torch.ones(2, dtype=torch.complex64))),
    "sparse": (TypeError, "dense", lambda c: c.allreduce(TWO.to_sparse())),
    "unknown op": (
        ValueError,
        "'median'.*'sum', 'average', 'min', 'max', 'product'",
        lambda c: c.allreduce(TWO, "median"),
    ),
    "ReduceOp without a name here": (ValueError, "sum", lambda c: c.allreduce(TWO, dist.ReduceOp.BXOR)),
    "average of bool": (TypeError, "bool", lambda c: c.allreduce(torch.ones(2, dtype=torch.bool), "average")),
    "scaled integers": (TypeError, "prescale", lambda c: c.allreduce(torch.ones(2, dtype=torch.int32), prescale=0.5)),
    "unknown algorithm": (ValueError, "'quick'.*ring.*native", lambda c: c.allreduce(TWO, algorithm="quick")),
    "algorithm of another verb": (
        ValueError,
        "'ring'.*direct",
        lambda c: c.alltoall(TWO, TWO.clone(), algorithm="ring"),
    ),
    "asynchronous too": (ValueError, "'median'", lambda c: c.allreduce(TWO, "median", async_op=True)),
    "seed that is no whole number": (ValueError, "seed=1.5", lambda c: c.allreduce(TWO, codec="int8", seed=1.5)),
    "step that is no whole number": (ValueError, "step=1.5", lambda c: c.allreduce(TWO, codec="int8", step=1.5)),
    "group with a non-tensor": (TypeError, "Tensor", lambda c: c.grouped_allreduce([TWO, 1])),
    "root too high": (ValueError, "src=2.*0 to 1", lambda c: c.broadcast(TWO, 2)),
    "root negative": (ValueError, "dst=-1.*0 to 1", lambda c: c.reduce(TWO, -1)),
    "allgather, short output": (ValueError, "output.*3 elements", lambda c: c.allgather(torch.ones(3), TWO)),
    "allgather, short list": (ValueError, "output", lambda c: c.allgather([TWO.clone()], TWO)),
    "allgather, own part too small": (ValueError, "output", lambda c: c.allgather([ONE.clone(), ONE.clone()], TWO)),
    "allgather, another dtype": (ValueError, "dtype", lambda c: c.allgather(torch.ones(4, dtype=torch.int32), TWO)),
    "reduce_scatter, short input": (ValueError, "input.*3 elements", lambda c: c.reduce_scatter(TWO, torch.ones(3))),
    "reduce_scatter, long list": (ValueError, "input", lambda c: c.reduce_scatter(ONE, [ONE, ONE, ONE])),
    "allgather, native but unequal": (
        ValueError,
        "unequal.*native",
        lambda c: c.allgather([TWO.clone(), ONE.clone()], (TWO, ONE)[c.rank], algorithm="native"),
    ),
    "gather, no output on dst": (ValueError, "output", lambda c: c.gather(TWO, None, c.rank)),
    "gather, output elsewhere": (ValueError, "output", lambda c: c.gather(TWO, [TWO, TWO], 1 - c.rank)),
    "scatter, no input on src": (ValueError, "input", lambda c: c.scatter(TWO, None, c.rank)),
    "scatter, input of another size": (ValueError, "input", lambda c: c.scatter(TWO, [TWO, ONE], c.rank)),
    "alltoall, odd size": (ValueError, "3", lambda c: c.alltoall(torch.ones(3), torch.ones(3))),
    "alltoall, other size": (ValueError, "without splits", lambda c: c.alltoall(torch.ones(4), TWO.clone())),
    "alltoall, one splits": (ValueError, "splits", lambda c: c.alltoall(TWO, TWO.clone(), None, [1, 1])),
    "alltoall, wrong sum": (ValueError, "splits", lambda c: c.alltoall(TWO, TWO.clone(), [1, 1], [2, 1])),
    "alltoall, negative": (ValueError, "splits", lambda c: c.alltoall(TWO, TWO.clone(), [1, 1], [3, -1])),
    "alltoall, too many": (ValueError, "splits", lambda c: c.alltoall(TWO, TWO.clone(), [1, 1], [1, 1, 0])),
    "scatter_object, short": (ValueError, "objects", lambda c: c.scatter_object([1], c.rank)),
}


def make_every_mistake() -> None:
    """Each rank alone makes the mistake, at a time when a message to the other would be taken for the next operation's."""
    with communicator() as comm:
        for (name, (error, message, mistake)), mistaken in product(MISTAKES.items(), range(comm.size)):
            if comm.rank == mistaken:
                with Checks().case(mistake=name), pytest.raises(error, match=message):
                    mistake(comm)
            tensor = contribution(comm.rank, comm.size, 100, torch.float32)
            comm.allreduce(tensor)
            assert torch.equal(tensor, reduced(comm.size, 100, torch.float32))


def making_one() -> None:
    for arguments in (
        {"timeout_s": 0},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"segment_bytes": 0},
    ):
        with pytest.raises(ValueError, match="positive"):
            Communicator(**arguments)
    with pytest.raises(TypeError, match=r"segment_bytes=1\.5.*whole number"):
        Communicator(segment_bytes=1.5)
    with pytest.raises(ValueError, match="group"):
        Communicator(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match=r"'reduse'.*allreduce"), communicator() as comm:
        comm.algorithms("reduse")


def with_a_wrong_switch() -> None:
    """One rank alone has it: nobody has connected when it is found."""
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLLECTIVES_SHARED_MEMORY", "no")
            with pytest.raises(ValueError, match=r"COLLECTIVES_SHARED_MEMORY='no' must be 0 .* or 1"):
                Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    with communicator() as comm:
        comm.barrier()


def names_of_algorithms() -> dict[str, tuple[str, ...]]:
    with communicator() as comm:
        return {verb: comm.algorithms(verb) for verb in PLANNERS}


def torch_names_of_ops() -> None:
    with communicator() as comm:
        for theirs, ours in (
            (dist.ReduceOp.SUM, "sum"),
            (dist.ReduceOp.AVG, "average"),
            (dist.ReduceOp.MIN, "min"),
            (dist.ReduceOp.MAX, "max"),
            (dist.ReduceOp.PRODUCT, "product"),
        ):
            tensor = contribution(comm.rank, comm.size, 10, torch.float32, ours)
            comm.allreduce(tensor, theirs)
            assert torch.equal(tensor, reduced(comm.size, 10, torch.float32, ours))


def with_the_table(variable: str, text: str) -> dict[int, str]:
    """What allreduce's 'auto' is, by message size, in a process that has the variable set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, text)
        comm = Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    with comm:
        for numel in (1, 10_000):
            tensor = contribution(comm.rank, comm.size, numel, torch.float32)
            comm.allreduce(tensor)
            assert torch.equal(tensor, reduced(comm.size, numel, torch.float32))
        return {nbytes: comm.chosen("allreduce", nbytes) for nbytes in (0, 16 * 1024 - 1, 16 * 1024, 1 << 30)}


def with_settings_of_its_own(settings: dict[int, tuple[int | None, dict[str, str]]], message: str) -> None:
    """Each rank makes one with its own segment_bytes and tables; all hear alike that they differ, and go on."""
    segment_bytes, tables = settings[dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        for variable, text in tables.items():
            patch.setenv(variable, text)
        with pytest.raises(ValueError, match=f"rank {dist.get_rank()}: .*{message}"):
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=segment_bytes)
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S + dist.get_rank(), segment_bytes=200) as comm:
        tensor = contribution(comm.rank, comm.size, 999, torch.float32)
        comm.allreduce(tensor, algorithm="ring")
        assert torch.equal(tensor, reduced(comm.size, 999, torch.float32))


def with_a_wrong_table() -> None:
    """What else is wrong with tables, tests/unit/test_selection.py says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTIVES_ALLREDUCE", "quick:0-max")
        with pytest.raises(ValueError, match=r"COLLECTIVES_ALLREDUCE.*'quick'.*ring.*rsag.*tree.*direct.*native"):
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    with communicator() as comm:
        comm.barrier()


@pytest.mark.parametrize("mistaken", [make_every_mistake, making_one, with_a_wrong_switch, with_a_wrong_table])
def test_mistakes(ranks: Worlds, mistaken: Callable[[], None]) -> None:
    ranks(2).run(mistaken)


@pytest.mark.parametrize("world", [1, 3])
def test_names_of_algorithms(ranks: Worlds, world: int) -> None:
    shared = ("shared",) if world > 1 else ()
    names = {verb: (*PLANNERS[verb], *(shared if verb in IN_SHARED_MEMORY else ()), "native") for verb in PLANNERS}
    assert ranks(world).run(names_of_algorithms) == [names] * world


def test_torch_names_of_ops(ranks: Worlds) -> None:
    ranks(3).run(torch_names_of_ops)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({0: (200, {}), 1: (400, {}), 2: (200, {})}, "segment_bytes=200 on ranks 0, 2; segment_bytes=400 on rank 1"),
        ({0: (None, {}), 1: (None, {}), 2: (1 << 20, {})}, "segment_bytes=None on ranks 0, 1; .*1048576 on rank 2"),
        (
            {0: (200, {}), 1: (200, {"COLLECTIVES_REDUCE": "tree"}), 2: (200, {"COLLECTIVES_REDUCE": "direct"})},
            "on rank 0; .*COLLECTIVES_REDUCE='tree' on rank 1; .*COLLECTIVES_REDUCE='direct' on rank 2",
        ),
    ],
)
def test_settings_that_differ(
    ranks: Worlds, settings: dict[int, tuple[int | None, dict[str, str]]], message: str
) -> None:
    ranks(3).run(with_settings_of_its_own, settings, message)


@pytest.mark.parametrize("world", [1, 3])
def test_table_from_the_environment(ranks: Worlds, world: int) -> None:
    text = "recursive_doubling:0-16K;tree:16K-max"
    names = dict(zip((0, 16 * 1024 - 1, 16 * 1024, 1 << 30), ["recursive_doubling"] * 2 + ["tree"] * 2, strict=True))
    assert ranks(world).run(with_the_table, "COLLECTIVES_ALLREDUCE", text) == [names] * world
