"""Whether every verb gives the right bits on the tensors of a device, when it is called and asynchronously."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire.bench.gpu.calls import backend_of
from gradwire.bench.gpu.outcome import Outcome
from gradwire.collectives import Communicator
from gradwire.collectives.engine.work import Work

TIMEOUT_S = 60.0
NUMBERS = 1200
"""The numbers that a rank gives to a verb for each rank."""
CODECS = ("bf16", "int8", "onebit", "topk")

Case = Callable[[bool], tuple[Tensor, Tensor]]
"""Runs a verb, asynchronously or not, and returns its result and the right one."""


@dataclass(frozen=True)
class VerbRow:
    """What a verb did. same_bits: whether both calls gave the right bits. error: what it raised, if anything."""

    backend: str
    world_size: int
    verb: str
    same_bits: bool
    error: str = ""
    part: str = "verb"


def measure_verbs(device: torch.device) -> Outcome:
    """Run every verb on the tensors of a device, and compare its results. Collective."""
    backend = backend_of(device)
    comm = Communicator(timeout_s=TIMEOUT_S)
    outcome = Outcome([f"# verbs on {device.type}, over {backend}, {comm.size} ranks"])
    for name in cases(comm, device):
        error, same = "", []
        try:
            for later in (False, True):
                result, right = cases(comm, device)[name](later)
                same.append(torch.equal(result.cpu(), right.cpu()))
        except Exception as raised:  # the table shows it, and the verbs after it run too
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
            comm.close()
            comm = Communicator(timeout_s=TIMEOUT_S)
        row = VerbRow(backend, comm.size, name, same == [True, True], error)
        outcome.rows.append(row)
        said = error or ("right bits" if row.same_bits else "WRONG BITS")
        outcome.lines.append(f"  {name:28} {said}")
        if not row.same_bits:
            outcome.wrong.append(f"{name} over {backend}: {said}")
    comm.close()
    return outcome


def cases(comm: Communicator, device: torch.device) -> dict[str, Case]:
    """Return the verbs by name. Sums are whole numbers, which float32 holds exactly, whatever the order of additions."""
    rank, size = comm.rank, comm.size
    base = torch.arange(1.0, size * NUMBERS + 1, device=device)
    each = [base * (of + 1) for of in range(size)]
    mine, total = each[rank], base * (size * (size + 1) // 2)
    part = slice(rank * NUMBERS, (rank + 1) * NUMBERS)
    ones = torch.ones(NUMBERS, dtype=torch.bfloat16, device=device)
    at_root, splits = rank == 0, [NUMBERS] * size
    verbs: dict[
        str, tuple[Callable[..., Work], Tensor, Tensor]
    ] = {  # the call, what it is given to change, what is right
        "allreduce": (comm.allreduce, mine, total),
        "allreduce, average": (partial(comm.allreduce, op="average"), mine, total / size),
        "allreduce, max": (partial(comm.allreduce, op="max"), mine, each[-1]),
        "allreduce, bfloat16": (comm.allreduce, ones, size * ones),
        "grouped_allreduce": (lambda out, **o: comm.grouped_allreduce(list(out.split(700)), **o), mine, total),
        "reduce_scatter": (
            lambda out, **o: comm.reduce_scatter(out, mine, **o),
            torch.zeros_like(base[part]),
            total[part],
        ),
        "reduce": (partial(comm.reduce, dst=0), mine, total if at_root else mine),
        "allgather": (lambda out, **o: comm.allgather(out, mine, **o), mine.repeat(size), torch.cat(each)),
        "allgather, a list": (
            lambda out, **o: comm.allgather(list(out.split(len(base))), mine, **o),
            mine.repeat(size),
            torch.cat(each),
        ),
        "broadcast": (partial(comm.broadcast, src=size - 1), mine, each[-1]),
        "gather": (
            lambda out, **o: comm.gather(mine, list(out.split(len(base))) if at_root else None, **o),
            mine.repeat(size),
            torch.cat(each) if at_root else mine.repeat(size),
        ),
        "scatter": (
            lambda out, **o: comm.scatter(out, list(base.split(NUMBERS)) if at_root else None, **o),
            torch.zeros_like(base[part]),
            base[part],
        ),
        "alltoall": (lambda out, **o: comm.alltoall(out, mine, **o), mine, torch.cat([of[part] for of in each])),
        "alltoall, splits": (
            lambda out, **o: comm.alltoall(out, mine, splits, splits, **o),
            mine,
            torch.cat([of[part] for of in each]),
        ),
        "barrier": (lambda out, **o: comm.barrier(**o), mine, mine),
    }

    def run(call: Callable[..., Work], given: Tensor, right: Tensor, later: bool) -> tuple[Tensor, Tensor]:
        out = given.clone()
        call(out, async_op=later).wait()
        return out, right

    def prepared(later: bool) -> tuple[Tensor, Tensor]:
        out = mine.clone()
        operation = comm.prepare_allreduce(out)
        if later:
            operation.start().wait()
        else:
            operation()
        return out, total

    def halves(later: bool) -> tuple[Tensor, Tensor]:
        out = mine.clone()
        comm.reduce_shares(out, async_op=later).wait()
        comm.gather_shares(out, async_op=later).wait()
        return out, total

    def around(later: bool) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(mine)
        begin = [partial(comm.isend, mine, (rank + 1) % size), partial(comm.irecv, out, (rank - 1) % size)]
        for work in [each() for each in begin[:: -1 if rank % 2 else 1]]:  # over NCCL, messages wait for each other
            work.wait()
        return out, each[(rank - 1) % size]

    def coded(codec: str, later: bool) -> tuple[Tensor, Tensor]:
        """Return the sum by a codec on the device and, as the right one, on the CPU."""
        results = [mine.clone(), mine.cpu().clone()]
        for tensor in results:
            comm.allreduce(tensor, compression=codec, step=0, async_op=later).wait()
        return results[0], results[1]

    found: dict[str, Case] = {name: partial(run, *verb) for name, verb in verbs.items()}
    found |= {"prepare_allreduce": prepared, "reduce_shares, gather_shares": halves}
    found |= {f"allreduce, {codec}": partial(coded, codec) for codec in CODECS}
    return found | ({"isend, irecv": around} if size > 1 else {})
