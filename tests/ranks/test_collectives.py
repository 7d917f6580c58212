"""The verbs of a Communicator, each by every algorithm, on worlds and hosts of several sizes: exact, and alike on all ranks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.collectives.schedules.algorithms import PLANNERS
from tests.harness import EXCHANGE_TIMEOUT_S, ON_EVERY_TRANSPORT, Worlds, wide_rows
from tests.ranks.exact import (
    DTYPES,
    FLOATING,
    OPS,
    SEVERAL_SEGMENTS,
    Checks,
    communicator,
    contribution,
    cover,
    on_host,
    reduced,
)
from tests.ranks.training import on_ranks

#: Worlds, each as the names of its ranks' hosts, small and large ones; among those of a kind, the cases of a verb are divided.
LAYOUTS = ("a", "aa", "aaa", "aabb", "abcab")
LARGE_LAYOUTS = ("aaaaa", "aaaaaaaa", "aaaabbb", "abcabcab")
#: Of these, those for a transport whose paths the others do not add to.
ON_SOCKETS, ON_A_PROCESS_GROUP = ("aabb", "aaaaa"), ("aabb", "abcab")
#: By a name, numbers of elements in a world of a size.
NUMELS: dict[str, Callable[[int], int]] = {
    "none": lambda size: 0,
    "one": lambda size: 1,
    "one less than ranks": lambda size: size - 1,
    "as many as ranks": lambda size: size,
    "one more than ranks": lambda size: size + 1,
    "one segment": lambda size: 39,
    "several segments": lambda size: SEVERAL_SEGMENTS,
}


class Named(Tensor):
    """A subclass that keeps its elements as a Tensor does."""


def of_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def every_second(tensor: Tensor) -> Tensor:
    """Of a single element torch says that it is contiguous, whatever the stride."""
    return torch.ones(2 * tensor.numel(), dtype=tensor.dtype)[::2].copy_(tensor)


def transposed(tensor: Tensor) -> Tensor:
    """In three rows where there are so many elements, in columns otherwise."""
    rows = 3 if tensor.numel() % 3 == 0 else 1
    return tensor.view(-1, rows).t().contiguous().t()


#: How to make a tensor of the same elements: of an ordinary kind, and of odd ones.
ORDINARY: dict[str, Callable[[Tensor], Tensor]] = {"ordinary": torch.clone, "transposed": transposed}
ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda tensor: torch._neg_view(-tensor),
    "imaginary part of a conjugate": lambda tensor: torch.complex(tensor, -tensor).conj().imag,
    "of inference mode": of_inference_mode,
    "negated, of inference mode": lambda tensor: torch._neg_view(of_inference_mode(-tensor)),
    "strided": every_second,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()),
    "subclass": lambda tensor: tensor.as_subclass(Named),
}
KINDS = ORDINARY | ODD
#: Where a rank's output begins in the memory of its input, by where its part begins there.
OVER: dict[str, Callable[[int], int]] = {
    "over its own part": lambda part: part,
    "over the first part": lambda part: 0,
    "one element on": lambda part: 1,
    "one element before": lambda part: -1,
}


def clash(one: Any, other: Any) -> bool:
    """Say which values of two parameters cannot meet: a dtype and an op, or a dtype and a kind."""
    if one is torch.bool and (other == "average" or "negated" in str(other)):
        return True
    if one is torch.uint8 and "negated" in str(other):
        return True
    return isinstance(one, torch.dtype) and one not in (torch.float32, torch.float64) and "conjugate" in str(other)


@dataclass(frozen=True)
class Case:
    """What a verb is called with. place: a number that says which rank is the root, and how lists are cut."""

    comm: Communicator
    algorithm: str
    dtype: torch.dtype
    op: str
    numel: int
    kind: str
    place: int

    @property
    def root(self) -> int:
        return self.place % self.comm.size

    def of(self, rank: int, numel: int | None = None) -> Tensor:
        return contribution(rank, self.comm.size, self.numel if numel is None else numel, self.dtype, self.op)

    def own(self, numel: int | None = None) -> Tensor:
        return self.of(self.comm.rank, numel)

    def everyones(self, numel: int | None = None) -> list[Tensor]:
        return [self.of(rank, numel) for rank in range(self.comm.size)]

    def total(self, numel: int | None = None) -> Tensor:
        return reduced(self.comm.size, self.numel if numel is None else numel, self.dtype, self.op)

    def make(self, tensor: Tensor) -> Tensor:
        return KINDS.get(self.kind, torch.clone)(tensor)

    def zeros(self, numel: int) -> Tensor:
        return self.make(torch.zeros(numel, dtype=self.dtype))

    def pair(self, numel: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return an output of numel elements, and an input of these values, which may lie in the same memory."""
        if self.kind not in OVER:
            return self.zeros(numel), self.make(values)
        shift = OVER[self.kind](self.comm.rank * (values.numel() - numel) // max(1, self.comm.size - 1))
        memory = torch.zeros(2 * (values.numel() + numel) + abs(shift), dtype=self.dtype)
        start = values.numel() + numel if shift < 0 else 0
        memory[start : start + values.numel()] = values
        return memory[start + shift : start + shift + numel], memory[start : start + values.numel()]

    def apart(self, source: Tensor) -> list[Tensor]:
        """Return the inputs that an output does not lie over, which must stay as they are."""
        return [] if self.kind in OVER else [source]

    def counts(self) -> tuple[int, Sequence[Sequence[int]]]:
        """Return the columns of a table, and how many of its rows go from rank i to rank j: as many as they come, or to the next
        rank only."""
        size = self.comm.size
        if self.place == 1:
            return 3, [[10 * (j == (i + 1) % size) for j in range(size)] for i in range(size)]
        return 3, [[(i + 2 * j) % 4 * self.numel for j in range(size)] for i in range(size)]

    def cuts(self) -> list[int]:
        """Return the lengths of the ranks' parts of a list: equal, all different, or none but one.

        Backends only know equal ones.
        """
        size, numel = self.comm.size, self.numel
        equal, uneven, last = [numel] * size, [numel * rank for rank in range(size)], [0] * (size - 1) + [numel]
        return equal if self.algorithm == "native" else (equal, uneven, last)[self.place]


#: The call that is still to be given its algorithm; the tensors that it writes or must not write; what they hold then.
Example = tuple[Callable[..., Any], list[Tensor], list[Tensor]]


def allreduce(case: Case) -> Example:
    tensor = case.make(case.own())
    return partial(case.comm.allreduce, tensor, case.op), [tensor], [case.total()]


def scaled_allreduce(case: Case) -> Example:
    prescale, postscale = ((0.5, 1.0), (1.0, 2.0), (0.5, 4.0))[case.place]
    tensor = case.make(case.own())
    call = partial(case.comm.allreduce, tensor, case.op, prescale=prescale, postscale=postscale)
    return call, [tensor], [case.total() * (prescale * postscale)]


def grouped_allreduce(case: Case) -> Example:
    """Of tensors of two dtypes and several kinds."""
    others = [(case.dtype, 5), (torch.float32, case.numel), (torch.int64, 0), (torch.int64, 3)]
    rank, size, op = case.comm.rank, case.comm.size, case.op
    tensors = [case.make(case.own()), *(contribution(rank, size, numel, dtype, op) for dtype, numel in others)]
    wanted = [case.total(), *(reduced(size, numel, dtype, op) for dtype, numel in others)]
    return partial(case.comm.grouped_allreduce, tensors, op), tensors, wanted


def reduce(case: Case) -> Example:
    tensor = case.make(case.own())
    wanted = case.total() if case.comm.rank == case.root else case.own()
    return partial(case.comm.reduce, tensor, case.root, case.op), [tensor], [wanted]


def reduce_scatter(case: Case) -> Example:
    rank, numel, whole = case.comm.rank, case.numel, case.numel * case.comm.size
    output, source = case.pair(numel, case.own(whole))
    wanted = [case.total(whole)[rank * numel : (rank + 1) * numel], case.own(whole)]
    return partial(case.comm.reduce_scatter, output, source, case.op), [output, *case.apart(source)], wanted


def reduce_scatter_list(case: Case) -> Example:
    cuts, rank = case.cuts(), case.comm.rank
    own = case.own(sum(cuts)).split(cuts)
    sources, output = [case.make(part) for part in own], case.zeros(cuts[rank])
    wanted = case.total(sum(cuts)).split(cuts)[rank]
    return partial(case.comm.reduce_scatter, output, sources, case.op), [output, *sources], [wanted, *own]


def allgather(case: Case) -> Example:
    output, source = case.pair(case.numel * case.comm.size, case.own())
    return (
        partial(case.comm.allgather, output, source),
        [output, *case.apart(source)],
        [torch.cat(case.everyones()), case.own()],
    )


def allgather_list(case: Case) -> Example:
    cuts = case.cuts()
    everyones = [case.of(*each) for each in enumerate(cuts)]
    outputs, source = [case.zeros(numel) for numel in cuts], case.make(everyones[case.comm.rank])
    return partial(case.comm.allgather, outputs, source), [*outputs, source], [*everyones, everyones[case.comm.rank]]


def broadcast(case: Case) -> Example:
    tensor = case.make(case.own())
    return partial(case.comm.broadcast, tensor, case.root), [tensor], [case.of(case.root)]


def gather(case: Case) -> Example:
    output, source = case.pair(case.numel, case.own())
    if case.comm.rank != case.root:
        return partial(case.comm.gather, source, None, case.root), [source], [case.own()]
    outputs = [output, *(case.zeros(case.numel) for _ in range(case.comm.size - 1))]
    wanted = [*case.everyones(), case.own()]
    return partial(case.comm.gather, source, outputs, case.root), [*outputs, *case.apart(source)], wanted


def scatter(case: Case) -> Example:
    output, source = case.pair(case.numel, case.of(0))
    if case.comm.rank != case.root:
        return partial(case.comm.scatter, output, None, case.root), [output], [case.own()]
    sources = [source, *map(case.make, case.everyones()[1:])]
    tensors = [output, *sources] if case.apart(source) else [output]
    return partial(case.comm.scatter, output, sources, case.root), tensors, [case.own(), *case.everyones()]


def alltoall(case: Case) -> Example:
    rank, numel, whole = case.comm.rank, case.numel, case.numel * case.comm.size
    output, source = case.pair(whole, case.own(whole))
    wanted = torch.cat([each[rank * numel : (rank + 1) * numel] for each in case.everyones(whole)])
    return partial(case.comm.alltoall, output, source), [output, *case.apart(source)], [wanted, case.own(whole)]


def alltoall_splits(case: Case) -> Example:
    rank, size, (columns, counts) = case.comm.rank, case.comm.size, case.counts()
    sources = [case.of(i, columns * sum(counts[i])).view(-1, columns) for i in range(size)]
    wanted = torch.cat([sources[i].split(list(counts[i]))[rank] for i in range(size)])
    output, source = torch.zeros(columns, len(wanted), dtype=case.dtype).t(), sources[rank].t().contiguous().t()
    if case.kind == "ordinary":
        output, source = output.contiguous(), source.contiguous()
    received = [counts[i][rank] for i in range(size)]
    call = partial(case.comm.alltoall, output, source, received, list(counts[rank]))
    return call, [output, source], [wanted, sources[rank]]


#: By name: the collective, how to call it, and the dtypes, ops and kinds of tensors that it is called with.
Verb = tuple[str, Callable[[Case], Example], Sequence[torch.dtype], Sequence[str], Sequence[str]]
VERBS: dict[str, Verb] = {
    "allreduce": ("allreduce", allreduce, DTYPES, OPS, [*KINDS]),
    "scaled_allreduce": ("allreduce", scaled_allreduce, FLOATING, OPS[:-1], [*ORDINARY]),
    "grouped_allreduce": ("allreduce", grouped_allreduce, DTYPES, OPS, [*KINDS]),
    "reduce": ("reduce", reduce, DTYPES, OPS, [*KINDS]),
    "reduce_scatter": ("reduce_scatter", reduce_scatter, DTYPES, OPS, [*KINDS, *OVER]),
    "reduce_scatter_list": ("reduce_scatter", reduce_scatter_list, DTYPES, OPS, [*ORDINARY]),
    "allgather": ("allgather", allgather, DTYPES, ["sum"], [*KINDS, *OVER]),
    "allgather_list": ("allgather", allgather_list, DTYPES, ["sum"], [*ORDINARY]),
    "broadcast": ("broadcast", broadcast, DTYPES, ["sum"], [*KINDS]),
    "gather": ("gather", gather, DTYPES, ["sum"], [*KINDS, *OVER]),
    "scatter": ("scatter", scatter, DTYPES, ["sum"], [*KINDS, *OVER]),
    "alltoall": ("alltoall", alltoall, DTYPES, ["sum"], [*KINDS, *OVER]),
    "alltoall_splits": ("alltoall", alltoall_splits, DTYPES, ["sum"], [*ORDINARY]),
}


def elements(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor).reshape(-1)


@cache
def rows_of(layouts: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Return what verbs are called with in these worlds together: each row a layout, a verb, and its parameters."""
    rows = []
    for name, (collective, _, dtypes, ops, kinds) in VERBS.items():
        algorithms = (*PLANNERS[collective], "shared", "native", "auto")
        of_verb = cover(layouts, algorithms, dtypes, ops, [*NUMELS], kinds, range(3), (True, False), clash=clash)
        rows += [(layout, name, *row) for layout, *row in of_verb]
    return rows


def exact(layout: str, rows: list[tuple[Any, ...]]) -> None:
    """Call verbs as the rows say, in the background or at once, and at once again: what is known goes another way."""
    with on_host(layout[dist.get_rank()]):
        comm = communicator()
    with Checks() as checks, comm:
        hosts = tuple(tuple(rank for rank, host in enumerate(layout) if host == each) for each in dict.fromkeys(layout))
        assert comm.topology.hosts == hosts
        for name, algorithm, dtype, op, numel, kind, place, async_op in rows:
            collective, verb, *_ = VERBS[name]
            algorithm = algorithm if algorithm in ("auto", *comm.algorithms(collective)) else "auto"
            for in_background in (async_op, False):
                with checks.case(
                    verb=name, algorithm=algorithm, dtype=dtype, op=op, numel=numel, kind=kind, place=place
                ):
                    case = Case(comm, algorithm, dtype, op, NUMELS[numel](comm.size), kind, place)
                    call, tensors, wanted = verb(case)
                    work = call(algorithm=algorithm, async_op=in_background)
                    if in_background:
                        work.wait()
                    for tensor, values in zip(tensors, wanted, strict=False):
                        checks.equal(elements(tensor), values.reshape(-1))
                        if kind == "strided" and tensor._base is not None:
                            assert tensor._base[1::2].eq(1).all(), "what lies between the elements has changed"


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        *(("shared_memory", layout) for layout in LAYOUTS),
        *wide_rows(*(("shared_memory", layout) for layout in LARGE_LAYOUTS)),
        *wide_rows(*(("sockets", layout) for layout in ON_SOCKETS)),
        *wide_rows(*(("process_group", layout) for layout in ON_A_PROCESS_GROUP)),
    ],
    indirect=["ranks"],
)
def test_every_verb_is_exact(ranks: Worlds, layout: str) -> None:
    # The first layout has most of the cases: one rank, which is quick.
    layouts = LAYOUTS if layout in LAYOUTS else ("a", *LARGE_LAYOUTS)
    mine = [row for each, *row in rows_of(layouts) if each == layout]
    ranks(len(layout)).run(exact, layout, mine)


def digests(layout: str, rows: list[tuple[str, torch.dtype, str]]) -> list[str]:
    """One digest of the bits of each result of random numbers, zeros of both signs, and what is no number."""
    found, oddities = [], torch.tensor([0.0, -0.0, -0.0, torch.nan, -torch.nan, torch.inf]).repeat(50)
    with on_host(layout[dist.get_rank()]):
        comm = communicator()
    with comm:
        generator = torch.Generator().manual_seed(comm.rank)
        for algorithm, dtype, op in rows:
            tensor = torch.randn(SEVERAL_SEGMENTS, generator=generator)
            tensor[: len(oddities)] = oddities.roll(comm.rank)
            tensor = tensor.to(dtype)
            comm.allreduce(tensor, op, algorithm=algorithm if algorithm in comm.algorithms("allreduce") else "auto")
            found.append(hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest())
    return found


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        *(("shared_memory", layout) for layout in ("aaa", "aabc", "abcd")),
        *wide_rows(("shared_memory", "a" * 8), ("sockets", "a" * 5), ("process_group", "a" * 5)),
    ],
    indirect=["ranks"],
)
def test_bits_are_the_same_on_all_ranks_and_in_every_run(ranks: Worlds, layout: str) -> None:
    rows = cover((*PLANNERS["allreduce"], "shared", "native", "auto"), FLOATING, OPS)
    first, second = (ranks(len(layout)).run(digests, layout, rows) for _ in range(2))
    assert first == [first[0]] * len(layout)
    assert second == first


@ON_EVERY_TRANSPORT
@on_ranks(3, initialized=False)
def test_shapes_without_dimensions_or_elements() -> None:
    """Tensors of no dimension and of no elements keep their shape."""
    with Checks() as checks, communicator() as comm:
        for algorithm in ("rsag", "native", "auto"):
            for tensor in (contribution(comm.rank, comm.size, 1, torch.float32)[0], torch.empty(3, 0, 2)):
                with checks.case(algorithm=algorithm, shape=tensor.shape):
                    wanted = reduced(comm.size, tensor.numel(), torch.float32).view(tensor.shape)
                    comm.allreduce(tensor, algorithm=algorithm)
                    checks.equal(tensor, wanted)


def every_row_of_the_table(layout: str) -> None:
    """'auto' on messages of the sizes that its table tells apart."""
    sizes = (4_000, 40_000, 300_000, 2_200_000)
    with on_host(layout[dist.get_rank()]):
        comm = Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    with Checks() as checks, comm:
        rows = {rule.algorithm for rule in comm.tables["allreduce"]}
        assert rows == {comm.chosen("allreduce", nbytes) for nbytes in sizes}
        for nbytes in sizes:
            with checks.case(nbytes=nbytes):
                numbers = torch.arange(nbytes // 4) % 1000.0
                tensor = numbers * (comm.rank + 1)
                comm.allreduce(tensor)
                checks.equal(tensor, numbers * sum(range(comm.size + 1)))


@ON_EVERY_TRANSPORT
@pytest.mark.parametrize("layout", ["aa", "ab", "aaaa", "abcd", "aabb"])
def test_auto_by_size_and_hosts(ranks: Worlds, layout: str) -> None:
    ranks(len(layout)).run(every_row_of_the_table, layout)


def thing(rank: int) -> dict[str, object]:
    """Something picklable whose size grows with the rank; every field tells the ranks apart."""
    return {"rank": rank, "text": "x" * (1000 * rank), "nested": [(rank, None), {rank}], "values": [float(rank)] * 3}


class Noted:
    """Unpickles as its rank, and is counted."""

    unpickled: ClassVar[list[int]] = []

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> tuple[Callable[[int], int], tuple[int]]:
        return self.come, (self.rank,)

    @classmethod
    def come(cls, rank: int) -> int:
        cls.unpickled.append(rank)
        return rank


@on_ranks(3, initialized=False)
def test_nobody_unpickles_what_is_not_for_it() -> None:
    with communicator() as comm:
        for root in range(comm.size):
            Noted.unpickled.clear()
            comm.gather_object(Noted(comm.rank), root)
            assert Noted.unpickled == ([*range(comm.size)] if comm.rank == root else [])
            Noted.unpickled.clear()
            everything = [Noted(rank) for rank in range(comm.size)]
            assert comm.scatter_object(everything if comm.rank == root else None, root) == comm.rank
            assert Noted.unpickled == [comm.rank]


@ON_EVERY_TRANSPORT
@on_ranks(1, 3, initialized=False)
def test_objects() -> None:
    with communicator() as comm:
        everything = [thing(rank) for rank in range(comm.size)]
        assert comm.allgather_object(thing(comm.rank)) == everything
        for root in range(comm.size):
            is_root = comm.rank == root
            assert comm.broadcast_object(thing(root) if is_root else None, root) == thing(root)
            assert comm.gather_object(thing(comm.rank), root) == (everything if is_root else None)
            assert comm.scatter_object(everything if is_root else None, root) == thing(comm.rank)
        records = [{"rank": rank, "names": ["é" * rank], "share": 0.1 * rank} for rank in range(comm.size)]
        assert comm.allgather_record(records[comm.rank]) == records
        with pytest.raises(TypeError, match="not JSON serializable"):
            comm.allgather_record(object())
        tensor = comm.broadcast_object(torch.arange(1000) if comm.rank == 0 else None)
        assert torch.equal(tensor, torch.arange(1000))


def barriers() -> list[tuple[float, float]]:
    """When this rank entered and left barriers by each algorithm, one rank after the other coming late."""
    times = []
    with communicator() as comm:
        for algorithm in (*PLANNERS["barrier"], "native", "auto"):
            for late in range(comm.size):
                if comm.rank == late:
                    time.sleep(0.02)
                entered = time.monotonic()
                comm.barrier(algorithm=algorithm)
                times.append((entered, time.monotonic()))
    return times


@ON_EVERY_TRANSPORT
@pytest.mark.parametrize("world", [2, 5])  # 5 is no power of two, and takes three rounds of doubling
def test_nobody_leaves_a_barrier_before_all_have_entered(ranks: Worlds, world: int) -> None:
    for at_once in zip(*ranks(world).run(barriers), strict=True):
        assert max(entered for entered, _ in at_once) <= min(left for _, left in at_once)
