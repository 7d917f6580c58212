"""A caller's mistake is a ValueError or TypeError on the caller, before anything is sent; the Communicator goes on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.schedules.algorithms import PLANNERS
from tests.harness import EXCHANGE_TIMEOUT_S
from tests.ranks.exact import Checks, communicator, contribution, reduced
from tests.ranks.training import on_ranks

ONE, TWO = torch.ones(1), torch.ones(2)


def with_feedback(comm: Communicator, codec: str, numel: int = 2, **options: Any) -> None:
    comm.allreduce(TWO, feedback=comm.new_feedback(codec, numel), **options)


#: By the error that it is: what its message says, and the call.
MISTAKES: dict[type[Exception], dict[str, tuple[str, Callable[[Communicator], object]]]] = {
    TypeError: {
        "no tensor": ("Tensor", lambda c: c.allreduce([1.0])),
        "a list as src": ("src", lambda c: c.broadcast(TWO, [0])),
        "complex": ("complex64.*float32", lambda c: c.allreduce(torch.ones(2, dtype=torch.complex64))),
        "sparse": ("dense", lambda c: c.allreduce(TWO.to_sparse())),
        "average of bool": ("bool", lambda c: c.allreduce(torch.ones(2, dtype=torch.bool), "average")),
        "scaled integers": ("prescale", lambda c: c.allreduce(torch.ones(2, dtype=torch.int32), prescale=0.5)),
        "group with a non-tensor": ("Tensor", lambda c: c.grouped_allreduce([TWO, 1])),
        "message that is no tensor": ("Tensor", lambda c: c.send([1.0], 1 - c.rank)),
        "message to no rank": ("dst=None.*whole number", lambda c: c.send(TWO, None)),
        "send, asynchronous": ("isend", lambda c: c.send(TWO, 1 - c.rank, async_op=True)),
        "recv, asynchronous": ("irecv", lambda c: c.recv(TWO, 1 - c.rank, async_op=True)),
    },
    ValueError: {
        "a list as op": ("op", lambda c: c.allreduce(TWO, ["sum"])),
        "codec, unknown": ("'zip'.*int8.*powersgd", lambda c: c.allreduce(TWO, compression="zip")),
        "codec of matrices": ("matrices", lambda c: c.allreduce(TWO, compression="powersgd")),
        "codec, op": ("'max'", lambda c: c.allreduce(TWO, "max", compression="int8")),
        "codec, integers": ("int32", lambda c: c.allreduce(TWO.int(), compression="int8")),
        "codec, algorithm": (
            "'onebit'.*'ring'.*auto, two_shot$",
            lambda c: c.allreduce(TWO, compression="onebit", algorithm="ring"),
        ),
        "codec, native": (
            "'int8'.*'native'.*two_shot, ring",
            lambda c: c.allreduce(TWO, compression="int8", algorithm="native"),
        ),
        "algorithm without codec": ("'two_shot'", lambda c: c.allreduce(TWO, algorithm="two_shot")),
        "draws without a step": (
            "rank [01]: codec 'randomk' selects by the step .* give step=, or feedback=",
            lambda c: c.allreduce(TWO, compression="randomk"),
        ),
        "feedback on a ring": (
            "'int8' with error feedback.*'ring'.*auto, two_shot$",
            lambda c: with_feedback(c, "int8", compression="int8", algorithm="ring"),
        ),
        "feedback without codec": ("needs a codec", lambda c: with_feedback(c, "int8")),
        "feedback of another size": (
            "Int8.*2 elements.*4 on",
            lambda c: with_feedback(c, "int8", 4, compression="int8"),
        ),
        "feedback of another codec": ("Int8.*Int4", lambda c: with_feedback(c, "int4", compression="int8")),
        "feedback that grows": ("QSGD", lambda c: c.new_feedback("qsgd", 3)),
        "seed of feedback": ("seed='one'", lambda c: c.new_feedback("int8", 3, seed="one")),
        "step before the first": ("step=-1", lambda c: c.allreduce(TWO, compression="int8", step=-1)),
        "unknown op": ("'median'.*'sum', 'average', 'min', 'max', 'product'", lambda c: c.allreduce(TWO, "median")),
        "op that cannot be hashed": (r"\[.sum.\].*.sum., .average.", lambda c: c.prepare_allreduce(TWO, ["sum"])),
        "ReduceOp without a name here": ("sum", lambda c: c.allreduce(TWO, dist.ReduceOp.BXOR)),
        "unknown algorithm": ("'quick'.*ring.*native", lambda c: c.allreduce(TWO, algorithm="quick")),
        "algorithm of another verb": ("'ring'.*direct", lambda c: c.alltoall(TWO, TWO.clone(), algorithm="ring")),
        "asynchronous too": ("'median'", lambda c: c.allreduce(TWO, "median", async_op=True)),
        "seed that is no whole number": ("seed=1.5", lambda c: c.allreduce(TWO, compression="int8", seed=1.5)),
        "step that is no whole number": ("step=1.5", lambda c: c.allreduce(TWO, compression="int8", step=1.5)),
        "message to itself": ("is this rank", lambda c: c.send(TWO, c.rank)),
        "message to nobody": ("allowed are 0 to 1", lambda c: c.send(TWO, 2)),
        "message from nobody": ("allowed are 0 to 1", lambda c: c.recv(TWO.clone(), -1)),
        "message, tag": ("from 0 to 65535", lambda c: c.send(TWO, 1 - c.rank, tag=1 << 16)),
        "message, overlapping": ("clone", lambda c: c.recv(ONE.expand(4), 1 - c.rank)),
        "root too high": ("src=2.*0 to 1", lambda c: c.broadcast(TWO, 2)),
        "root negative": ("dst=-1.*0 to 1", lambda c: c.reduce(TWO, -1)),
        "allgather, short output": ("output.*3 elements", lambda c: c.allgather(torch.ones(3), TWO)),
        "allgather, short list": ("output", lambda c: c.allgather([TWO.clone()], TWO)),
        "allgather, own part too small": ("output", lambda c: c.allgather([ONE.clone(), ONE.clone()], TWO)),
        "allgather, another dtype": ("dtype", lambda c: c.allgather(torch.ones(4, dtype=torch.int32), TWO)),
        "reduce_scatter, short input": ("input.*3 elements", lambda c: c.reduce_scatter(TWO, torch.ones(3))),
        "reduce_scatter, long list": ("input", lambda c: c.reduce_scatter(ONE, [ONE, ONE, ONE])),
        "allgather, native but unequal": (
            "unequal.*native",
            lambda c: c.allgather([TWO.clone(), ONE.clone()], (TWO, ONE)[c.rank], algorithm="native"),
        ),
        "gather, no output on dst": ("output", lambda c: c.gather(TWO, None, c.rank)),
        "gather, output elsewhere": ("output", lambda c: c.gather(TWO, [TWO, TWO], 1 - c.rank)),
        "scatter, no input on src": ("input", lambda c: c.scatter(TWO, None, c.rank)),
        "scatter, input of another size": ("input", lambda c: c.scatter(TWO, [TWO, ONE], c.rank)),
        "alltoall, odd size": ("3", lambda c: c.alltoall(torch.ones(3), torch.ones(3))),
        "alltoall, other size": ("without splits", lambda c: c.alltoall(torch.ones(4), TWO.clone())),
        "alltoall, one splits": ("splits", lambda c: c.alltoall(TWO, TWO.clone(), None, [1, 1])),
        "alltoall, wrong sum": ("splits", lambda c: c.alltoall(TWO, TWO.clone(), [1, 1], [2, 1])),
        "alltoall, negative": ("splits", lambda c: c.alltoall(TWO, TWO.clone(), [1, 1], [3, -1])),
        "alltoall, too many": ("splits", lambda c: c.alltoall(TWO, TWO.clone(), [1, 1], [1, 1, 0])),
        "barrier, no time": (r"barrier: timeout_s=0 must be positive and finite", lambda c: c.barrier(timeout_s=0)),
        "barrier, no limit": ("timeout_s=inf must be", lambda c: c.barrier(timeout_s=float("inf"), async_op=True)),
        "scatter_object, short": ("objects", lambda c: c.scatter_object([1], c.rank)),
    },
}


def assert_exchanges(comm: Communicator, op: str = "sum", *, numel: int = 100, **options: object) -> None:
    tensor = contribution(comm.rank, comm.size, numel, torch.float32, op)
    comm.allreduce(tensor, **{"op": op, **options})  # type: ignore[arg-type]
    assert torch.equal(tensor, reduced(comm.size, numel, torch.float32, op))


@on_ranks(2, initialized=False)
def test_every_mistake() -> None:
    """Make each on one rank alone, at a time when a message to the other would be taken for the next operation's."""
    with communicator() as comm:
        for error, mistakes in MISTAKES.items():
            for name, (message, mistake) in mistakes.items():
                for mistaken in range(comm.size):
                    if comm.rank == mistaken:
                        with Checks().case(mistake=name), pytest.raises(error, match=message):
                            mistake(comm)
                    assert_exchanges(comm)


@on_ranks(2, initialized=False)
def test_making_one() -> None:
    for arguments in (*({"timeout_s": wrong} for wrong in (0, -1.0, float("nan"), float("inf"))), {"segment_bytes": 0}):
        with pytest.raises(ValueError, match="positive"):
            Communicator(**arguments)  # type: ignore[arg-type]
    with communicator() as comm:
        before = comm.timeout_s
        for wrong in (0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="positive and finite"):
                comm.timeout_s = wrong
        assert comm.timeout_s == before
    with pytest.raises(TypeError, match=r"segment_bytes=1\.5.*whole number"):
        Communicator(segment_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group"):
        Communicator(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match=r"'reduse'.*allreduce"), communicator() as comm:
        comm.algorithms("reduse")


@pytest.mark.parametrize(
    ("variable", "text", "said", "wrong_on"),
    [
        ("COLLECTIVES_SHARED_MEMORY", "no", r"COLLECTIVES_SHARED_MEMORY='no' must be 0 .* or 1", [0]),
        # What else is wrong with tables, tests/unit/test_selection.py says.
        (
            "COLLECTIVES_ALLREDUCE",
            "quick:0-max",
            "COLLECTIVES_ALLREDUCE.*'quick'.*ring.*rsag.*tree.*direct.*native",
            [0, 1],
        ),
    ],
)
@on_ranks(2, initialized=False)
def test_wrong_variables(variable: str, text: str, said: str, wrong_on: list[int]) -> None:
    """Find them before a rank has connected. Where one has them alone, the others raise its error, and all may try again."""
    is_wrong = dist.get_rank() in wrong_on
    with pytest.MonkeyPatch.context() as patch:
        if is_wrong:
            patch.setenv(variable, text)
        with pytest.raises(ValueError if is_wrong else CollectiveError, match=said):
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    with communicator() as comm:
        comm.barrier()


@on_ranks(1, 3, initialized=False)
def test_names_of_algorithms() -> None:
    with communicator() as comm:
        for verb, planners in PLANNERS.items():
            shared = ("shared",) if comm.size > 1 and verb in ("allreduce", "barrier") else ()
            assert comm.algorithms(verb) == (*planners, *shared, "native")


@pytest.mark.parametrize(
    ("segments_bytes", "tables", "message"),
    [
        ((200, 400, 200), ("", "", ""), "segment_bytes=200 on ranks 0, 2; segment_bytes=400 on rank 1"),
        ((None, None, 1 << 20), ("", "", ""), "segment_bytes=None on ranks 0, 1; .*1048576 on rank 2"),
        (
            (200, 200, 200),
            ("", "tree", "direct"),
            "on rank 0; .*COLLECTIVES_REDUCE='tree' on rank 1; .*COLLECTIVES_REDUCE='direct' on rank 2",
        ),
    ],
)
@on_ranks(3, initialized=False)
def test_settings_that_differ(segments_bytes: tuple[int | None, ...], tables: tuple[str, ...], message: str) -> None:
    """Make one with settings of each rank's own: all hear alike that they differ, and go on."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if tables[rank]:
            patch.setenv("COLLECTIVES_REDUCE", tables[rank])
        with pytest.raises(ValueError, match=f"rank {rank}: .*{message}"):
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=segments_bytes[rank])
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S + rank, segment_bytes=200) as comm:
        assert_exchanges(comm, numel=999, algorithm="ring")


@on_ranks(3, initialized=False)
def test_table_from_the_environment() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTIVES_ALLREDUCE", "recursive_doubling:0-16K;tree:16K-max")
        comm = Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    with comm:
        assert_exchanges(comm, numel=1)
        assert_exchanges(comm, numel=10_000)
        chosen = [comm.chosen("allreduce", nbytes) for nbytes in (0, 16 * 1024 - 1, 16 * 1024, 1 << 30)]
        assert chosen == ["recursive_doubling"] * 2 + ["tree"] * 2


@on_ranks(3, initialized=False)
def test_splits_that_differ_between_ranks_choose_one_algorithm() -> None:
    """By the most bytes that a rank sends: at times, some send less than the bound in the table, and some more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTIVES_ALLTOALL", "native:0-1K;direct:1K-max")
        comm = Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    with comm:
        for scale in (1, 30, 100):
            counts = [[scale * (1 + sender) * (1 + receiver) for receiver in range(3)] for sender in range(3)]
            sent = torch.arange(sum(counts[comm.rank]), dtype=torch.float32) + 10_000 * comm.rank
            incoming = [row[comm.rank] for row in counts]
            comm.alltoall(landed := torch.zeros(sum(incoming)), sent, incoming, counts[comm.rank])
            wanted = [torch.arange(sum(row), dtype=torch.float32).split(row)[comm.rank] for row in counts]
            assert torch.equal(landed, torch.cat([10_000 * sender + part for sender, part in enumerate(wanted)]))
