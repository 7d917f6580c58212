"""Tensors of unusual kinds: through every verb they give what ordinary ones give, or are refused before anything is sent."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.masked import masked_tensor

from gradwire.collectives import Communicator
from gradwire.collectives.compression.registry import CODECS
from tests.harness import ON_EVERY_TRANSPORT, Worlds
from tests.ranks.exact import SEVERAL_SEGMENTS, Checks, communicator, contribution, reduced

pytestmark = ON_EVERY_TRANSPORT


class Named(Tensor):
    """A subclass that keeps its elements as a Tensor does."""


def of_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def every_second(tensor: Tensor) -> Tensor:
    """Of a single element torch says that it is contiguous, whatever the stride."""
    return torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)[::2].copy_(tensor)


#: A tensor of the same elements.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda tensor: torch._neg_view(-tensor),
    "imaginary part of a conjugate": lambda tensor: torch.complex(tensor, -tensor).conj().imag,
    "of inference mode": of_inference_mode,
    "negated, of inference mode": lambda tensor: torch._neg_view(of_inference_mode(-tensor)),
    "strided": every_second,
    "parameter": torch.nn.Parameter,
    "subclass": lambda tensor: tensor.as_subclass(Named),
}
Make = Callable[[Tensor], Tensor]
Verb = Callable[[Communicator, Make, int, Any], tuple[Any, list[Tensor], list[Tensor]]]


def own(comm: Communicator, numel: int, rank: int | None = None) -> Tensor:
    return contribution(comm.rank if rank is None else rank, comm.size, numel, torch.float32)


def all_own(comm: Communicator, numel: int) -> list[Tensor]:
    return [own(comm, numel, rank) for rank in range(comm.size)]


def zeros(comm: Communicator, make: Make, numel: int) -> list[Tensor]:
    return [make(torch.zeros(numel)) for _ in range(comm.size)]


def allreduce(comm: Communicator, make: Make, numel: int, options: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    tensor = make(own(comm, numel))
    return comm.allreduce(tensor, **options), [tensor], [reduced(comm.size, numel, torch.float32)]


def grouped(comm: Communicator, make: Make, numel: int, options: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    tensors = [make(own(comm, numel)), make(own(comm, 5)), own(comm, numel)]
    return (
        comm.grouped_allreduce(tensors, **options),
        tensors,
        [reduced(comm.size, tensor.numel(), torch.float32) for tensor in tensors],
    )


def reduce(comm: Communicator, make: Make, numel: int, options: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    tensor = make(own(comm, numel))
    there = reduced(comm.size, numel, torch.float32)
    return comm.reduce(tensor, 1, **options), [tensor], [there if comm.rank == 1 else own(comm, numel)]


def reduce_scatter(comm: Communicator, make: Make, numel: int, options: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    output, source = make(torch.zeros(numel)), make(own(comm, numel * comm.size))
    there = reduced(comm.size, numel * comm.size, torch.float32).split(numel)[comm.rank]
    return comm.reduce_scatter(output, source, **options), [output, source], [there, own(comm, numel * comm.size)]


def allgather(comm: Communicator, make: Make, numel: int, options: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    output, source = make(torch.zeros(numel * comm.size)), make(own(comm, numel))
    there = torch.cat(all_own(comm, numel))
    return comm.allgather(output, source, **options), [output, source], [there, own(comm, numel)]


def broadcast(comm: Communicator, make: Make, numel: int, options: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    tensor = make(own(comm, numel))
    return comm.broadcast(tensor, 1, **options), [tensor], [own(comm, numel, 1)]


def gather(comm: Communicator, make: Make, numel: int, options: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    outputs = zeros(comm, make, numel) if comm.rank == 1 else []
    return (
        comm.gather(make(own(comm, numel)), outputs or None, 1, **options),
        outputs,
        all_own(comm, numel)[: len(outputs)],
    )


def scatter(comm: Communicator, make: Make, numel: int, options: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    output = make(torch.zeros(numel))
    sources = [make(each) for each in all_own(comm, numel)] if comm.rank == 1 else None
    return comm.scatter(output, sources, 1, **options), [output], [own(comm, numel)]


def alltoall(comm: Communicator, make: Make, numel: int, options: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    output, source = make(torch.zeros(numel * comm.size)), make(own(comm, numel * comm.size))
    there = torch.cat([each.split(numel)[comm.rank] for each in all_own(comm, numel * comm.size)])
    return comm.alltoall(output, source, **options), [output, source], [there, own(comm, numel * comm.size)]


VERBS: dict[str, Verb] = {
    "allreduce": allreduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "allgather": allgather,
    "broadcast": broadcast,
    "gather": gather,
    "scatter": scatter,
    "alltoall": alltoall,
}


def through_every_verb(kind: str) -> list[str]:
    """By every algorithm, at once and in the background, the first time and (allreduce goes another way then) again."""
    checks, make = Checks(), KINDS[kind]
    with communicator() as comm:
        verbs = [(name, verb, algorithm) for name, verb in VERBS.items() for algorithm in comm.algorithms(name)]
        verbs.append(("grouped", grouped, "auto"))
        for name, verb, algorithm in verbs:
            for numel in (1, SEVERAL_SEGMENTS):
                for async_op in (False, True, False):
                    with checks.case(verb=name, algorithm=algorithm, numel=numel, async_op=async_op):
                        options = {"algorithm": algorithm, "async_op": async_op}
                        work, tensors, wanted = verb(comm, make, numel, options)
                        if async_op:
                            work.wait()
                        for tensor, values in zip(tensors, wanted, strict=True):
                            checks.equal(tensor, values)
        for algorithm in comm.algorithms("allreduce"):
            mean = reduced(comm.size, 10, torch.float32) / comm.size
            for prepared in (False, False, True):
                with checks.case(op="average", algorithm=algorithm, prepared=prepared):
                    tensor = make(own(comm, 10))
                    if prepared:
                        comm.prepare_allreduce(tensor, "average", algorithm=algorithm)()
                    else:
                        comm.allreduce(tensor, "average", algorithm=algorithm)
                    checks.equal(tensor.detach(), mean)
        for ordinary_first in (True, False):
            with checks.case(ordinary_first=ordinary_first):
                for tensor in (own(comm, 10), make(own(comm, 10)))[:: 1 if ordinary_first else -1]:
                    comm.allreduce(tensor)
                    checks.equal(tensor, reduced(comm.size, 10, torch.float32))
    return checks.failures


def with_every_codec(kind: str) -> list[str]:
    """What codecs make of an odd tensor is what they make of an ordinary one, with and without feedback."""
    checks, make = Checks(), KINDS[kind]
    with communicator() as comm:
        for codec in CODECS:
            feedbacks = [None, None] if codec == "none" else [comm.new_feedback(codec, 300) for _ in range(2)]
            for step in range(2):
                with checks.case(codec=codec, step=step):
                    odd, ordinary = make(own(comm, 300)), own(comm, 300)
                    for tensor, feedback in zip((odd, ordinary), feedbacks, strict=True):
                        comm.allreduce(tensor, codec=codec, feedback=feedback, step=step)
                    checks.equal(odd.detach(), ordinary)
    return checks.failures


def in_and_out_of_inference_mode() -> list[str]:
    """What a Communicator keeps from a call in inference mode serves the calls outside of it, and the other way round."""
    checks = Checks()
    for inside_first in (True, False):
        with communicator() as comm:
            with torch.inference_mode(inside_first):
                feedbacks = {codec: comm.new_feedback(codec, 300) for codec in CODECS if codec != "none"}
            for inside in (inside_first, not inside_first):
                with torch.inference_mode() if inside else nullcontext():
                    for name, verb in VERBS.items():
                        for algorithm in comm.algorithms(name):
                            for async_op in (False, True):
                                with checks.case(verb=name, algorithm=algorithm, inside=inside, async_op=async_op):
                                    options = {"algorithm": algorithm, "async_op": async_op}
                                    work, tensors, wanted = verb(comm, torch.clone, SEVERAL_SEGMENTS, options)
                                    if async_op:
                                        work.wait()
                                    for tensor, values in zip(tensors, wanted, strict=True):
                                        checks.equal(tensor, values)
                    for codec, feedback in feedbacks.items():
                        with checks.case(codec=codec, inside=inside):
                            comm.allreduce(own(comm, 300), codec=codec, feedback=feedback)
                    with checks.case(objects="in inference mode", inside=inside):
                        assert comm.allgather_object(comm.rank) == list(range(comm.size))
    return checks.failures


def keeping_nan() -> list[str]:
    """NaN wins in min and max, whichever rank has it, by every algorithm; all other numbers as ever."""
    checks = Checks()
    with communicator() as comm:
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
                            if verb == "allreduce":
                                comm.allreduce(tensor, op, algorithm=algorithm)
                                checks.equal(tensor.nan_to_num(99.0), wanted.nan_to_num(99.0))
                            elif verb == "reduce":
                                comm.reduce(tensor, 0, op, algorithm=algorithm)
                                there = wanted if rank == 0 else numbers
                                checks.equal(tensor.nan_to_num(99.0), there.nan_to_num(99.0))
                            else:
                                comm.reduce_scatter(output, tensor, op, algorithm=algorithm)
                                checks.equal(output.nan_to_num(99.0), part.nan_to_num(99.0))
    return checks.failures


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


def refused(name: str) -> None:
    """By every verb, after an ordinary tensor of the kind has taken the quick way, with nothing sent."""
    make, message = WITHOUT_MEMORY[name]
    odd = make()
    with communicator() as comm:
        ordinary = torch.ones(4)
        calls: list[Callable[[], object]] = [
            lambda: comm.allreduce(odd),
            lambda: comm.allreduce(odd, async_op=True),
            lambda: comm.allreduce(odd, codec="int8"),
            lambda: comm.allreduce(odd, codec="fp16", algorithm="ring"),
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


def refused_inside_vmap() -> None:
    with communicator() as comm:
        for _ in range(2):
            comm.allreduce(torch.ones(4))
        for verb in (comm.allreduce, comm.broadcast):
            with pytest.raises(TypeError, match="no memory"):
                inside_vmap(verb)
        comm.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_through_every_verb(ranks: Worlds, kind: str) -> None:
    assert ranks(3).run(through_every_verb, kind) == [[]] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_with_every_codec(ranks: Worlds, kind: str) -> None:
    assert ranks(2).run(with_every_codec, kind) == [[]] * 2


def test_in_and_out_of_inference_mode(ranks: Worlds) -> None:
    assert ranks(3).run(in_and_out_of_inference_mode) == [[]] * 3


def test_nan_in_min_and_max(ranks: Worlds) -> None:
    assert ranks(3).run(keeping_nan) == [[]] * 3


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_without_memory(ranks: Worlds, name: str) -> None:
    ranks(2).run(refused, name)


def test_inside_vmap(ranks: Worlds) -> None:
    ranks(2).run(refused_inside_vmap)
