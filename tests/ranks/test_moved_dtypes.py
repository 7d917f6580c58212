"""Dtypes that no verb reduces, such as complex and 8-bit floating-point numbers: verbs that move data carry them bit for bit,
and verbs that reduce refuse them on every rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire as hvd
from gradwire.collectives import Communicator
from tests.harness import ON_EVERY_TRANSPORT, Worlds
from tests.ranks.exact import Checks, communicator
from tests.ranks.forms import GROUPED, done, forms
from tests.ranks.test_collectives import VERBS, Case, transposed
from tests.ranks.training import on_ranks

DTYPES = (
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
MOVING = ("broadcast", "allgather", "gather", "scatter", "alltoall")


def conjugated(tensor: Tensor) -> Tensor:
    """Return the same numbers in memory that holds their conjugates."""
    return tensor.conj().resolve_conj().conj()


def any_bits(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of a rank, of any bits, NaNs among them."""
    data = np.random.default_rng(rank).integers(0, 256, (numel + 1) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype)[:numel]


def values(rank: int, rows: int, dtype: torch.dtype) -> Tensor:
    return any_bits(rank, 3 * rows, dtype).view(rows, 3)


def zeros(rows: int, dtype: torch.dtype) -> Tensor:
    return values(0, rows, dtype).zero_()


class Moved(Case):
    """A verb's call with numbers of any bits."""

    def of(self, rank: int, numel: int | None = None) -> Tensor:
        return any_bits(rank, self.numel if numel is None else numel, self.dtype)

    def zeros(self, numel: int) -> Tensor:
        tensor = self.of(0, numel)
        tensor.view(torch.uint8).zero_()
        return self.make(tensor)

    def make(self, tensor: Tensor) -> Tensor:
        return conjugated(tensor) if self.kind == "conjugated" else super().make(tensor)


def counts_of(rank: int, size: int) -> list[int]:
    """Return how many rows a rank sends to each rank, and receives from each: one or two."""
    return [1 + (rank + other) % 2 for other in range(size)]


def uneven(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return the rows that a rank receives from all ranks."""
    everyones = [(values(other, sum(counts_of(other, size)), dtype), counts_of(other, size)) for other in range(size)]
    return torch.cat([rows.split(counts)[rank] for rows, counts in everyones])


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


def carried() -> None:
    """Call verbs with lists of unequal parts, and with root 1."""
    moving = {name: verb for name, verb in VERBS.items() if verb[0] in MOVING}
    with Checks() as checks, communicator() as comm:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for dtype in DTYPES:
            for kind in ("ordinary", "transposed", *(["conjugated"] if dtype.is_complex else [])):
                for name, (collective, verb, *_) in moving.items():
                    for algorithm in comm.algorithms(collective):
                        with checks.case(dtype=dtype, verb=name, algorithm=algorithm, kind=kind):
                            call, tensors, wanted = verb(Moved(comm, algorithm, dtype, "sum", 6, kind, 1))
                            call(algorithm=algorithm, async_op=name == "broadcast").wait()
                            for tensor, expected in zip(tensors, wanted, strict=False):
                                checks.equal(bits(tensor), bits(expected))
                with checks.case(dtype=dtype, verb="send", kind=kind):
                    case = Moved(comm, "", dtype, "sum", 15, kind, 1)
                    sending = comm.isend(case.make(case.own()), after)
                    comm.recv(landed := case.zeros(15), before)
                    sending.wait()
                    checks.equal(bits(landed), bits(case.of(before)))
            refuse(comm, zeros(comm.size, dtype))


def refuse(comm: Communicator, tensor: Tensor) -> None:
    """Call every verb that reduces."""
    calls: list[Callable[[], object]] = [
        lambda: comm.allreduce(tensor),
        lambda: comm.allreduce(tensor, "max", async_op=True),
        lambda: comm.allreduce(tensor, compression="int8"),
        lambda: comm.prepare_allreduce(tensor),
        lambda: comm.grouped_allreduce([torch.ones(2), tensor]),
        lambda: comm.reduce(tensor),
        lambda: comm.reduce_scatter(tensor[0], tensor),
        lambda: comm.reduce_shares(tensor),
        lambda: comm.gather_shares(tensor),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"rank {comm.rank}: .*{tensor.dtype}"):
            call()
    comm.barrier()


@ON_EVERY_TRANSPORT
def test_verbs_that_move_data_carry_them(ranks: Worlds) -> None:
    ranks(3).run(carried)


@on_ranks(2)
def test_so_do_those_of_horovod() -> None:
    rank, size = hvd.rank(), hvd.size()
    root = 1
    for dtype in DTYPES:
        given = [values(each, 2 * size, dtype) for each in range(size)]
        wanted = {
            "broadcast": given[root],
            "allgather": torch.cat(given),
            "alltoall": torch.cat([each[2 * rank : 2 * rank + 2] for each in given]),
        }
        for verb, result in wanted.items():
            for name, form in forms(verb, *([f"grouped_{verb}"] if f"grouped_{verb}" in GROUPED else [])).items():
                options = {"root_rank": root} if verb == "broadcast" else {}
                found = done(form(given[rank].clone(), **options))
                found = found if isinstance(found, Tensor) else found[0]
                assert torch.equal(bits(found), bits(result)), (name, dtype)
        counts = counts_of(rank, size)
        found, _ = hvd.alltoall(values(rank, sum(counts), dtype), counts)
        assert torch.equal(bits(found), bits(uneven(rank, size, dtype)))
        for form in forms("allreduce", "reducescatter", "grouped_allreduce", "grouped_reducescatter").values():
            with pytest.raises(TypeError, match=f"rank {rank}: .*{dtype}"):
                done(form(given[rank].clone()))
    named = {str(dtype): values(rank, 3, dtype) for dtype in DTYPES}
    hvd.broadcast_parameters(named, 0)
    for dtype in DTYPES:
        assert torch.equal(bits(named[str(dtype)]), bits(values(0, 3, dtype)))


@on_ranks(3, initialized=False)
def test_so_does_the_backend_of_torch() -> None:
    """all_to_all_single counts rows, whatever the width of a number. torch takes no unresolved conjugates."""
    group, rank, size = dist.new_group(backend="gradwire"), dist.get_rank(), dist.get_world_size()
    counts = counts_of(rank, size)
    for dtype in DTYPES:
        for make in (torch.clone, transposed):
            landed = make(zeros(sum(counts), dtype))
            dist.all_to_all_single(landed, make(values(rank, sum(counts), dtype)), counts, counts, group=group)
            assert torch.equal(bits(landed), bits(uneven(rank, size, dtype))), (dtype, make)
            parts = [make(zeros(count, dtype)) for count in counts]
            dist.all_to_all(parts, [*map(make, values(rank, sum(counts), dtype).split(counts))], group=group)
            assert torch.equal(bits(torch.cat(parts)), bits(uneven(rank, size, dtype))), (dtype, make)
            dist.broadcast(tensor := make(values(rank, 3, dtype)), 1, group=group)
            assert torch.equal(bits(tensor), bits(values(1, 3, dtype))), (dtype, make)
            every = [make(zeros(3, dtype)) for _ in range(size)]
            dist.all_gather(every, make(values(rank, 3, dtype)), group=group)
            assert all(torch.equal(bits(each), bits(values(r, 3, dtype))) for r, each in enumerate(every))
            dist.all_to_all_single(even := make(zeros(size, dtype)), make(values(rank, size, dtype)), group=group)
            wanted = torch.cat([values(other, size, dtype)[rank : rank + 1] for other in range(size)])
            assert torch.equal(bits(even), bits(wanted)), (dtype, make)
    dist.destroy_process_group(group)
