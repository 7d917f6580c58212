"""The description of each collective, as in nccl-tests: size, data, bandwidth factor and call.

A size in bytes is that of the whole array, as in nccl-tests: one rank's bytes after an allgather, or before a
reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradwire.bench.micro.verification import contribution_tile, expand, own_tile, reduced_tile
from gradwire.collectives import Communicator

#: The functions' names since torch 2.13, or else their earlier names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


OUT_OF_PLACE, IN_PLACE = PLACES = ("out-of-place", "in-place")
"""Whether a call's result replaces its input."""


@dataclass(frozen=True)
class BenchJob:
    """One measurement of one collective, on one rank.

    size: the number of ranks. count: the number of elements, of one rank's share if they are shared out. op: "none" if
    nothing is reduced. root: -1 if there is none. place: one of PLACES.
    """

    rank: int
    size: int
    count: int
    dtype: torch.dtype
    op: str
    root: int
    device: torch.device
    place: str

    def expand(self, tile: torch.Tensor, start: int, count: int) -> torch.Tensor:
        return expand(tile, start, count, self.dtype, self.device)

    def unwritten(self, count: int) -> torch.Tensor:
        """Return a view of one zero, (count,). Only correct results of bool contain zeros."""
        return torch.zeros(1, dtype=self.dtype, device=self.device).expand(count)


@dataclass(frozen=True)
class Buffers:
    """The tensors of a call. `output` is filled from `initial` before it; in place, `input` is `output`, or a part of it."""

    initial: torch.Tensor
    output: torch.Tensor
    expected: torch.Tensor
    input: torch.Tensor

    def reset(self) -> None:
        self.output.copy_(self.initial)

    def filled(self) -> torch.Tensor:
        """Return the output with the input copied into it, for calls that have an in-place form only. The copy is timed, as
        users would have to make it."""
        if self.output is not self.input:
            self.output.copy_(self.input)
        return self.output


def made(job: BenchJob, tensor: torch.Tensor, expected: torch.Tensor) -> Buffers:
    """Return the buffers of a call whose input is as large as its output."""
    output = torch.empty_like(expected)
    if job.place == IN_PLACE:
        return Buffers(tensor, output, expected, output)
    return out_of_place(job, tensor, expected)


def out_of_place(job: BenchJob, tensor: torch.Tensor, expected: torch.Tensor) -> Buffers:
    return Buffers(job.unwritten(expected.numel()), torch.empty_like(expected), expected, tensor)


@dataclass(frozen=True)
class Case:
    """A collective. shared_out: whether elements are divided over the ranks. places: those of PLACES that the calls have.
    busbw_factor: world size -> busbw / algbw. messages: the messages that a call sends one after the other; the time is that
    of one. ranks: how many ranks, the first ones, take part; None: all. has_algorithms: whether the Communicator knows
    algorithms of this name. sized: whether a call has data.

    run: our call. run_torch: the call that users of torch.distributed alone would write.
    """

    name: str
    prepare: Callable[[BenchJob], Buffers]
    run: Callable[[Communicator, Buffers, BenchJob, str], object]
    run_torch: Callable[[Buffers, BenchJob], object]
    reduces: bool = False
    rooted: bool = False
    shared_out: bool = True
    places: Sequence[str] = PLACES
    busbw_factor: Callable[[int], float] = lambda size: (size - 1) / size
    messages: int = 1
    ranks: int | None = None
    has_algorithms: bool = True
    sized: bool = True

    def count(self, nbytes: int, size: int, dtype: torch.dtype) -> int:
        """Return BenchJob.count for at most `nbytes`; at least 1, unless a call has no data."""
        return 0 if not self.sized else max(1, nbytes // dtype.itemsize // (size if self.shared_out else 1))

    def nbytes(self, job: BenchJob) -> int:
        return job.count * job.dtype.itemsize * (job.size if self.shared_out else 1)


TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.SUM,  # gloo's AVG is wrong on some paths
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def torch_takes(job: BenchJob) -> bool:
    """Return whether torch.distributed supports the job's dtype: gloo lacks int16, and backends differ in the sum of bools."""
    return job.dtype not in (torch.int16, torch.bool)


def divide(total: torch.Tensor, job: BenchJob) -> None:
    if job.op == "average":
        total.div_(job.size, rounding_mode=None if job.dtype.is_floating_point else "trunc")


def _prepare_allreduce(job: BenchJob) -> Buffers:
    mine = job.expand(contribution_tile(job.rank, job.size, job.op, job.dtype), 0, job.count)
    return made(job, mine, job.expand(reduced_tile(job.size, job.op, job.dtype), 0, job.count))


def _torch_allreduce(buffers: Buffers, job: BenchJob) -> None:
    dist.all_reduce(buffers.filled(), TORCH_OPS[job.op])
    divide(buffers.output, job)


def _prepare_reduce_scatter(job: BenchJob) -> Buffers:
    mine = job.expand(contribution_tile(job.rank, job.size, job.op, job.dtype), 0, job.size * job.count)
    reduced = reduced_tile(job.size, job.op, job.dtype)
    return out_of_place(job, mine, job.expand(reduced, job.rank * job.count, job.count))


def _torch_reduce_scatter(buffers: Buffers, job: BenchJob) -> None:
    _reduce_scatter_single(buffers.output, buffers.input, TORCH_OPS[job.op])
    divide(buffers.output, job)


def _prepare_allgather(job: BenchJob) -> Buffers:
    blocks = [job.expand(own_tile(rank, job.dtype), rank * job.count, job.count) for rank in range(job.size)]
    expected = torch.cat(blocks)
    if job.place == OUT_OF_PLACE:
        return out_of_place(job, blocks[job.rank], expected)
    initial, output = torch.zeros_like(expected), torch.empty_like(expected)
    own = slice(job.rank * job.count, (job.rank + 1) * job.count)
    initial[own] = blocks[job.rank]
    return Buffers(initial, output, expected, output[own])


def _prepare_broadcast(job: BenchJob) -> Buffers:
    expected = job.expand(own_tile(job.root, job.dtype), 0, job.count)
    return made(job, expected if job.rank == job.root else job.unwritten(job.count), expected)


def _prepare_alltoall(job: BenchJob) -> Buffers:
    mine = job.expand(own_tile(job.rank, job.dtype), 0, job.size * job.count)
    sources = [job.expand(own_tile(rank, job.dtype), job.rank * job.count, job.count) for rank in range(job.size)]
    return out_of_place(job, mine, torch.cat(sources))


CASES = {
    case.name: case
    for case in (
        Case(
            "allreduce",
            _prepare_allreduce,
            lambda comm, buffers, job, name: comm.allreduce(buffers.filled(), job.op, algorithm=name),
            _torch_allreduce,
            reduces=True,
            shared_out=False,
            busbw_factor=lambda size: 2 * (size - 1) / size,
        ),
        Case(
            "reduce_scatter",
            _prepare_reduce_scatter,
            lambda comm, buffers, job, name: comm.reduce_scatter(buffers.output, buffers.input, job.op, algorithm=name),
            _torch_reduce_scatter,
            reduces=True,
            places=(OUT_OF_PLACE,),
        ),
        Case(
            "allgather",
            _prepare_allgather,
            lambda comm, buffers, job, name: comm.allgather(buffers.output, buffers.input, algorithm=name),
            lambda buffers, job: _all_gather_single(buffers.output, buffers.input),
        ),
        Case(
            "broadcast",
            _prepare_broadcast,
            lambda comm, buffers, job, name: comm.broadcast(buffers.filled(), src=job.root, algorithm=name),
            lambda buffers, job: dist.broadcast(buffers.filled(), job.root),
            rooted=True,
            shared_out=False,
            busbw_factor=lambda size: 1.0,
        ),
        Case(
            "alltoall",
            _prepare_alltoall,
            lambda comm, buffers, job, name: comm.alltoall(buffers.output, buffers.input, algorithm=name),
            lambda buffers, job: dist.all_to_all_single(buffers.output, buffers.input),
            places=(OUT_OF_PLACE,),
        ),
    )
}

BARRIER = Case(
    "barrier",
    lambda job: made(job, job.unwritten(0), job.unwritten(0)),
    lambda comm, buffers, job, name: comm.barrier(algorithm=name),
    lambda buffers, job: dist.barrier(),
    shared_out=False,
    places=(IN_PLACE,),
    busbw_factor=lambda size: 0.0,
    sized=False,
)
