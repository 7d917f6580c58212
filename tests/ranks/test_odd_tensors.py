"""Tensors of unusual kinds: through every verb they give what ordinary ones give, or are refused before anything is sent."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.masked import masked_tensor

from gradwire.collectives import Communicator
from gradwire.collectives.compression.registry import CODECS, make_codec
from gradwire.collectives.schedules.algorithms import PLANNERS
from tests.harness import ABOVE_TRANSPORTS, Worlds, wide
from tests.ranks.exact import SEVERAL_SEGMENTS, Checks, communicator, contribution, reduced
from tests.ranks.test_collectives import ODD, VERBS, Case, elements
from tests.ranks.training import on_ranks

FEEDBACK = [name for name in CODECS if name != "none" and make_codec(name).takes_feedback]
SOME = [*zip(CODECS, cycle(ODD), strict=False)]
EVERY = [(codec, kind) for codec in CODECS for kind in ODD]


def own(comm: Communicator, numel: int) -> Tensor:
    return contribution(comm.rank, comm.size, numel, torch.float32)


def odd_and_ordinary_in_turn() -> None:
    """An allreduce of one is what one of the other is, prepared or not; of every verb, test_collectives.py tries both."""
    with Checks() as checks, communicator() as comm:
        mean = reduced(comm.size, 10, torch.float32) / comm.size
        for kind, make in ODD.items():
            for algorithm in ("auto", "ring", "native"):
                with checks.case(kind=kind, algorithm=algorithm):
                    for tensor in (own(comm, 10), make(own(comm, 10)), own(comm, 10)):
                        comm.allreduce(tensor, "average", algorithm=algorithm)
                        checks.equal(elements(tensor), mean)
                    tensor = make(own(comm, 10))
                    comm.prepare_allreduce(tensor, "average", algorithm=algorithm)()
                    checks.equal(elements(tensor), mean)
        for kind, make in ODD.items():
            with communicator() as first_sees_it, checks.case(kind=kind):
                for tensor in (make(own(comm, 10)), own(comm, 10)):
                    first_sees_it.allreduce(tensor)
                    checks.equal(elements(tensor), reduced(comm.size, 10, torch.float32))


def with_codecs(pairs: list[tuple[str, str]]) -> None:
    """What codecs make of an odd tensor is what they make of an ordinary one, with and without feedback."""
    with Checks() as checks, communicator() as comm:
        for codec, kind in pairs:
            feedbacks = [comm.new_feedback(codec, 300) if codec in FEEDBACK else None for _ in range(2)]
            for step in range(2):
                with checks.case(codec=codec, kind=kind, step=step):
                    odd, ordinary = ODD[kind](own(comm, 300)), own(comm, 300)
                    for tensor, feedback in zip((odd, ordinary), feedbacks, strict=True):
                        comm.allreduce(tensor, compression=codec, feedback=feedback, step=step)
                    checks.equal(odd.detach(), ordinary)


def in_and_out_of_inference_mode() -> None:
    """What a Communicator keeps from a call in inference mode serves the calls outside of it, and the other way round."""
    for inside_first in (True, False):
        with Checks() as checks, communicator() as comm:
            with torch.inference_mode(inside_first):
                feedbacks = {codec: comm.new_feedback(codec, 300) for codec in FEEDBACK}
            for inside in (inside_first, not inside_first):
                with torch.inference_mode() if inside else nullcontext():
                    for name, (collective, verb, *_) in VERBS.items():
                        for number, algorithm in enumerate(("auto", next(iter(PLANNERS[collective])), "native")):
                            with checks.case(verb=name, algorithm=algorithm, inside=inside):
                                case = Case(comm, algorithm, torch.float32, "sum", SEVERAL_SEGMENTS, "ordinary", 0)
                                call, tensors, wanted = verb(case)
                                call(algorithm=algorithm, async_op=bool(number % 2)).wait()
                                for tensor, values in zip(tensors, wanted, strict=True):
                                    checks.equal(elements(tensor), values.reshape(-1))
                    for codec, feedback in feedbacks.items():
                        with checks.case(codec=codec, inside=inside):
                            comm.allreduce(own(comm, 300), compression=codec, feedback=feedback)
                    with checks.case(objects="in inference mode", inside=inside):
                        assert comm.allgather_object(comm.rank) == list(range(comm.size))


def keeping_nan() -> None:
    """NaN wins in min and max, whichever rank has it, by every algorithm; all other numbers as ever."""
    with Checks() as checks, communicator() as comm:
        rank, size = comm.rank, comm.size
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            numbers = torch.tensor([1.5, -2.5, 0.0, float("inf"), -float("inf"), float(rank), -float(rank)] * size)
            numbers[rank::size] = float("nan") if rank % 2 else -float("nan")
            numbers = torch.cat([numbers, torch.tensor([-1.5, -0.25, 3.0, torch.finfo(dtype).max] * size) * (rank - 1)])
            numbers = numbers[: numbers.numel() // size * size].to(dtype)
            everyones = list(torch.empty(size, numbers.numel(), dtype=dtype))
            comm.allgather(everyones, numbers)
            for op in ("min", "max"):
                wanted = getattr(torch.stack(everyones), "a" + op)(0)
                part = wanted.split(numbers.numel() // size)[rank]
                for verb in ("allreduce", "reduce", "reduce_scatter"):
                    for algorithm in comm.algorithms(verb):
                        with checks.case(dtype=dtype, op=op, verb=verb, algorithm=algorithm):
                            tensor, output = numbers.clone(), torch.zeros_like(part)
                            there = numbers if verb == "reduce" and rank > 0 else wanted
                            if verb == "reduce_scatter":
                                comm.reduce_scatter(output, tensor, op, algorithm=algorithm)
                                tensor, there = output, part
                            else:
                                getattr(comm, verb)(tensor, op=op, algorithm=algorithm)
                            checks.equal(tensor.nan_to_num(99.0), there.nan_to_num(99.0))


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(4)


def distributed() -> Tensor:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False)


def inside_vmap(use: Callable[[Tensor], object]) -> None:
    torch.func.vmap(lambda row: (use(row), row)[1])(torch.ones(2, 4))


#: Tensors whose elements do not lie in memory of their own.
WITHOUT_MEMORY: dict[str, tuple[Callable[[], Tensor], str]] = {
    "DTensor": (distributed, r"DTensor.*to_local\(\)"),
    "parameter that is a DTensor": (lambda: torch.nn.Parameter(distributed()), r"DTensor.*to_local\(\)"),
    "fake": (fake, "FakeTensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"nested tensor.*values\(\)"),
    "nested, jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        r"nested tensor.*values\(\)",
    ),
    "masked": (lambda: masked_tensor(torch.ones(4), torch.ones(4, dtype=torch.bool)), "MaskedTensor"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(4)), "no memory"),
    "zero": (lambda: torch._efficientzerotensor(4), "no memory"),
    "meta": (lambda: torch.ones(4, device="meta"), "meta has no memory"),
}


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
@on_ranks(2, initialized=False)
def test_without_memory(name: str) -> None:
    """By every verb, after an ordinary tensor of the kind has taken the quick way, with nothing sent."""
    make, message = WITHOUT_MEMORY[name]
    odd = make()
    with communicator() as comm:
        ordinary = torch.ones(4)
        calls: list[Callable[[], object]] = [
            lambda: comm.allreduce(odd),
            lambda: comm.allreduce(odd, async_op=True),
            lambda: comm.allreduce(odd, compression="int8"),
            lambda: comm.allreduce(odd, compression="fp16", algorithm="ring"),
            lambda: comm.grouped_allreduce([ordinary, odd]),
            lambda: comm.reduce(odd),
            lambda: comm.reduce_scatter(odd, ordinary),
            lambda: comm.reduce_scatter(ordinary, odd),
            lambda: comm.allgather(odd, ordinary),
            lambda: comm.allgather(ordinary, odd),
            lambda: comm.broadcast(odd),
            lambda: comm.gather(odd, None, 1 - comm.rank),
            lambda: comm.gather(ordinary, [odd, odd], comm.rank),
            lambda: comm.scatter(odd, None, 1 - comm.rank),
            lambda: comm.scatter(ordinary, [odd, odd], comm.rank),
            lambda: comm.alltoall(odd, ordinary),
            lambda: comm.alltoall(ordinary, odd),
        ]
        for _ in range(2):
            comm.allreduce(torch.ones(4))
        for mistaken in range(comm.size):
            if comm.rank == mistaken:
                for call in calls:
                    with pytest.raises(TypeError, match=f"rank {comm.rank}: .*{message}"):
                        call()
            tensor = torch.ones(4)
            comm.allreduce(tensor)
            assert torch.equal(tensor, torch.full((4,), float(comm.size)))


@on_ranks(2, initialized=False)
def test_inside_vmap() -> None:
    with communicator() as comm:
        for _ in range(2):
            comm.allreduce(torch.ones(4))
        for verb in (comm.allreduce, comm.broadcast):
            with pytest.raises(TypeError, match="no memory"):
                inside_vmap(verb)
        comm.barrier()


@ABOVE_TRANSPORTS
@pytest.mark.parametrize("check", [odd_and_ordinary_in_turn, in_and_out_of_inference_mode, keeping_nan])
def test_it_holds(ranks: Worlds, check: Callable[[], None]) -> None:
    ranks(3).run(check)


@ABOVE_TRANSPORTS
@pytest.mark.parametrize("pairs", [SOME, *wide(EVERY)], ids=["some kinds", "every kind"])
def test_with_every_codec(ranks: Worlds, pairs: list[tuple[str, str]]) -> None:
    ranks(2).run(with_codecs, pairs)


@on_ranks(2)
@pytest.mark.wide
def test_verbs_in_a_compiled_function() -> None:
    """They are called; the compiler neither traces nor compiles them."""
    with communicator() as comm:

        def step(values: Tensor) -> Tensor:
            doubled = values * 2
            comm.allreduce(doubled)
            work = comm.allreduce(doubled, async_op=True)
            everyones = torch.zeros(2 * 4)
            work.wait()
            comm.allgather(everyones, doubled)
            return everyones + 1

        def next_step(values: Tensor) -> Tensor:
            doubled = values * 2
            comm.allreduce(doubled, async_op=True, awaited=True).wait()
            sent, received, other = torch.full_like(doubled, float(comm.rank)), torch.empty_like(doubled), 1 - comm.rank
            sending, receiving = comm.isend(sent, other), comm.irecv(received, other)
            receiving.wait()
            sending.wait()
            if comm.rank == 0:
                comm.send(doubled, 1)
            else:
                comm.recv(doubled, 0)
            prepared = comm.prepare_allreduce(doubled)
            prepared()
            prepared.start(awaited=True).wait()
            return doubled + received

        compiled: list[str] = []

        def record(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
            compiled.extend(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        run, run_next = torch.compile(step, backend=record), torch.compile(next_step, backend=record)
        for _ in range(2):
            assert torch.equal(run(torch.ones(4)), torch.full((8,), 9.0))
            assert torch.equal(run_next(torch.ones(4)), torch.full((4,), 17.0 - comm.rank))
        assert compiled == ["mul", "zeros", "add", "mul", "full_like", "empty_like", "add"]  # none of the verbs'
