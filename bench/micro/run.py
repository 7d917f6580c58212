"""`torchrun --nproc-per-node 4 -m gradwire.bench allreduce`: one collective, all its algorithms, as in nccl-tests."""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.bench.micro import compressed, mpi
from gradwire.bench.micro.cases import BARRIER, CASES, IN_PLACE, BenchJob, Buffers, Case, torch_takes
from gradwire.bench.micro.options import DTYPES, parse_arguments
from gradwire.bench.micro.point_to_point import POINT_TO_POINT
from gradwire.bench.micro.table import (
    MeasuredRow,
    Row,
    Speedup,
    compare,
    format_comparison,
    format_heading,
    format_row,
    format_trailer,
    measured_row,
)
from gradwire.bench.micro.verification import check_size, count_wrong
from gradwire.bench.results import device_name, software_and_machine, write_csv, write_json
from gradwire.bench.timing import (
    TURNS,
    Protocol,
    every_rank,
    meeting,
    most_bytes,
    take_turns,
)
from gradwire.collectives import Communicator
from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.trainer.world.launch import read_launch
from gradwire.trainer.world.world import start_torch_distributed

TORCH = "torch"
"""The competitor that calls torch.distributed without a Communicator."""
NONE = "none"
PEERS = ("native", TORCH, mpi.MPI)
MEANINGS = {
    "barrier": "A barrier has no data: only the times of its tables have a meaning.",
    "latency": "Times are those of one message from rank 0 to rank 1: half of a round trip.",
    "bandwidth": "Times are those of one of several messages from rank 0 to rank 1 that are in flight together.",
}


def join_world(backend: str | None, timeout_s: float) -> torch.device:
    """Initialize torch.distributed from the launcher's environment, or for one rank. Return this rank's device."""
    launch = read_launch(os.environ)
    a_gpu_each = torch.cuda.device_count() >= (launch.local_size or 1)
    backend = backend or ("nccl" if a_gpu_each and not mpi.under_mpirun() else "gloo")
    device = torch.device("cuda", launch.local_rank or 0) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if mpi.under_mpirun():
        mpi.join_world(timeout_s)
    else:
        start_torch_distributed(launch, timeout_s, backend)
    return device


def choose_algorithms(asked: Sequence[str] | None, legal: Sequence[str], *, peers: bool = False) -> list[str]:
    """Return the requested algorithms, or else all, of which auto, the backend's own, torch.distributed and MPI are the
    first. peers: whether MPI takes part.

    Raises:
        ValueError: a name is not legal.
    """
    native = [name for name in legal if name == "native"]
    known = ["auto", *native, TORCH, *([mpi.MPI] if peers else []), *(name for name in legal if name not in native)]
    unknown = [name for name in asked or () if name not in known]
    if unknown:
        raise ValueError(f"algorithm {unknown[0]!r} is not one of {', '.join(known)}")
    return list(dict.fromkeys([*(asked or known), *([mpi.MPI] if peers else [])]))


def plan_jobs(case: Case, chosen: argparse.Namespace, rank: int, size: int, device: torch.device) -> list[BenchJob]:
    """Return all jobs, each once: sizes that round to the same count are one job."""
    jobs: dict[BenchJob, None] = {}
    for dtype_name in chosen.datatype:
        dtype = DTYPES[dtype_name]
        for op in chosen.op if case.reduces else ["none"]:
            if op == "average" and dtype == torch.bool:
                continue
            root = chosen.root if case.rooted else -1
            for nbytes, place in itertools.product(chosen.sizes, case.places):
                jobs[BenchJob(rank, size, case.count(nbytes, size, dtype), dtype, op, root, device, place)] = None
    return list(jobs)


def competitor(
    case: Case, comm: Communicator, buffers: Buffers, job: BenchJob, algorithm: str, codec: tuple[Codec, bool] | None
) -> Callable[[], object]:
    """Return a call of a competitor. codec: and whether it has error feedback; None for none."""
    if codec is not None:
        return compressed.call_of(comm, job, buffers.output, *codec)
    if algorithm == TORCH:
        return partial(case.run_torch, buffers, job)
    if algorithm == mpi.MPI:
        return mpi.call(case.name, buffers, job)
    return partial(case.run, comm, buffers, job, algorithm)


def has(algorithm: str, job: BenchJob) -> bool:
    """Return whether a competitor supports a job."""
    limits = {TORCH: torch_takes, mpi.MPI: mpi.takes}
    return algorithm not in limits or limits[algorithm](job)


def measure(
    case: Case,
    jobs: Sequence[BenchJob],
    comm: Communicator,
    algorithms: Sequence[str],
    protocol: Protocol,
    *,
    codecs: compressed.Codecs,
    shared: bool = False,
) -> list[MeasuredRow]:
    """Return the rows of all jobs, the same on every rank. codecs: 'auto' also runs with each of them. shared: use
    Communicator.empty() for in-place buffers."""
    device = jobs[0].device
    timer = meeting(device, comm.barrier)
    measured: list[MeasuredRow] = []
    for job in jobs:
        buffers = compressed.prepare(job) if codecs else case.prepare(job)
        if shared and buffers.input is buffers.output and device.type == "cpu":
            output = comm.empty(buffers.output.numel(), dtype=job.dtype)
            buffers = Buffers(buffers.initial, output, buffers.expected, output)
        entrants = [(algorithm, NONE) for algorithm in algorithms if has(algorithm, job)]
        entrants += [("auto", label) for label in codecs]

        def make(algorithm: str, label: str, buffers: Buffers = buffers, job: BenchJob = job) -> Callable[[], object]:
            return competitor(case, comm, buffers, job, algorithm, codecs.get(label))

        known = [_known(case, comm, job, *entrant, codecs) for entrant in entrants]
        if codecs:
            for fields, (algorithm, label) in zip(known, entrants, strict=True):
                fields["relative_error"] = compressed.error_of(make(algorithm, label), buffers)
        expected = () if codecs else (buffers.expected,)
        check = partial(compressed.differing if codecs else count_wrong, buffers.output, *expected)
        competitors = [make(*entrant) for entrant in entrants]
        seconds, wrong = take_turns(competitors, timer, protocol, buffers.reset, check)
        everyones, wrong_anywhere = (every_rank(each, device) for each in (seconds, np.array(wrong, np.float64)))
        for index, (fields, (algorithm, label)) in enumerate(zip(known, entrants, strict=True)):
            fields["wrong"] = int(wrong_anywhere[:, index].sum()) if protocol.check_iters > 0 else None
            if label in codecs:
                fields |= compressed.parts(comm, job, buffers, *codecs[label], protocol, timer)
            measured.append(measured_row(case, job, algorithm, everyones[:, index], **fields))
    return measured


def _known(
    case: Case, comm: Communicator, job: BenchJob, algorithm: str, label: str, codecs: compressed.Codecs
) -> dict[str, Any]:
    """Return the fields of a row that are known before it is measured: what the ranks send. Collective."""
    sent, nbytes = None, case.nbytes(job)
    if label in codecs:
        sent = comm.wire_bytes(case.name, nbytes, compression=codecs[label][0])
    elif case.has_algorithms and case.sized and algorithm not in (TORCH, mpi.MPI):
        runs = comm.chosen(case.name, nbytes, device=job.device.type) if algorithm == "auto" else algorithm
        sent = comm.wire_bytes(case.name, nbytes, runs)
    most = most_bytes(sent, job.device)
    ratio = case.busbw_factor(job.size) * nbytes / most if codecs and most else None
    return {"codec": label, "wire_bytes": most, "ratio": ratio}


def describe_run(chosen: argparse.Namespace, comm: Communicator, device: torch.device) -> dict[str, Any]:
    return {
        **software_and_machine(device),
        "backend": dist.get_backend(),
        "world_size": comm.size,
        "hosts": [list(ranks) for ranks in comm.topology.hosts],
        "iters": chosen.iters,
        "warmup_iters": chosen.warmup_iters,
        "check_iters": chosen.check,
        "time": TURNS,
    }


def describe_rank(comm: Communicator, device: torch.device) -> str:
    who = f"Rank {comm.rank:2} Host {comm.topology.host_of(comm.rank):2} Pid {os.getpid():6}"
    return f"{who} on {socket.gethostname()} device {device} [{device_name(device)}]"


def format_header(name: str, chosen: argparse.Namespace, meta: dict[str, Any], ranks: Sequence[str]) -> list[str]:
    step = f"{chosen.stepbytes}(bytes)" if chosen.stepbytes else f"{chosen.stepfactor}(factor)"
    return [
        f"# {name} world size {meta['world_size']} hosts {len(meta['hosts'])} backend {meta['backend']}"
        f" minBytes {chosen.minbytes} maxBytes {chosen.maxbytes} step: {step}"
        f" warmup iters: {chosen.warmup_iters} iters: {chosen.iters} validation: {chosen.check}",
        *([f"# Network: {meta['network']}"] if meta["network"] else []),
        *([f"# {MEANINGS[name]}"] if name in MEANINGS else []),
        "#",
        "# Using devices",
        *(f"#  {rank}" for rank in ranks),
        "#",
    ]


def format_block(case: Case, name: str, measured: Sequence[MeasuredRow], codecs: compressed.Codecs) -> list[str]:
    """Return the table of an algorithm or, with codecs, of a codec, in place only and with the algorithm of each row."""
    lines: dict[tuple[BenchJob, str], list[Row]] = {}
    for job, row, _ in measured:
        lines.setdefault((replace(job, place=""), row.algorithm), []).append(row)
    described = f": {codecs[name][0]!r}" if name in codecs else ""
    return [
        f"# {'Codec' if codecs else 'Algorithm'} {name}{described}",
        *format_heading([IN_PLACE] if codecs else case.places, codecs=bool(codecs)),
        *(
            format_row(rows, job.count, job.root) + (f"  {algorithm}" if codecs else "")
            for (job, algorithm), rows in lines.items()
        ),
        *format_trailer([row for _, row, _ in measured]),
    ]


def plan(
    case: Case, chosen: argparse.Namespace, comm: Communicator, device: torch.device
) -> tuple[list[BenchJob], list[str]]:
    """Return the jobs to measure, and their algorithms.

    Raises:
        ValueError: an algorithm is not legal, the root is not a rank, no job is left, or a sum over the ranks cannot be exact.
    """
    if chosen.root >= comm.size:
        raise ValueError(f"root {chosen.root} is not one of {comm.size} ranks")
    if not case.has_algorithms and comm.size < 2:
        raise ValueError("a message needs two ranks")
    legal = comm.algorithms(case.name) if case.has_algorithms else ()
    algorithms = choose_algorithms([TORCH, "auto"] if chosen.codec else chosen.algorithm, legal, peers=chosen.peers)
    jobs = plan_jobs(case, chosen, comm.rank, comm.size, device)
    if chosen.codec:
        jobs = [job for job in jobs if job.place == IN_PLACE]
    jobs = [job for job in jobs if any(has(algorithm, job) for algorithm in algorithms)]
    if not jobs:
        raise ValueError("these dtypes and ops leave nothing to measure")
    if case.reduces:
        for job in jobs:
            check_size(job.size, job.op, job.dtype)
    return jobs, algorithms


def report(
    case: Case, comm: Communicator, measured: Sequence[MeasuredRow], codecs: compressed.Codecs
) -> tuple[list[Row], list[Speedup]]:
    """Print a block for each algorithm or codec, then the comparisons. Return the rows and speedups in this order."""
    device = measured[0][0].device.type
    blocks: dict[str, list[MeasuredRow]] = {}
    for one in measured:
        blocks.setdefault(one[1].codec if codecs else one[1].algorithm, []).append(one)
    for name, block in blocks.items():
        print("\n".join(format_block(case, name, block, codecs)))

    def runs(label: str, nbytes: int) -> str:
        if not case.has_algorithms:
            return ""
        if label not in codecs:
            return comm.chosen(case.name, nbytes, device=device)
        codec = codecs[label][0]
        summed = comm.chosen(case.name, codec.wire_bytes(nbytes // 4), device=device)
        return f"{label}, {summed if codec.summable else shot_of(codec)}"

    speedups = []
    for label, peer in itertools.product((NONE, *codecs), PEERS):
        pair = [one for one in measured if one[1].algorithm == peer or one[1].codec == label]
        compared = compare(pair, "auto", peer, partial(runs, label))
        print("".join(f"{line}\n" for line in format_comparison(compared)), end="")
        speedups += compared
    return [row for block in blocks.values() for _, row, _ in block], speedups


def save(chosen: argparse.Namespace, rows: Sequence[Row], speedups: Sequence[Speedup], meta: dict[str, Any]) -> None:
    write_json(chosen.json, {**meta, "speedups": list(map(asdict, speedups))}, rows)
    write_csv(chosen.csv, rows)
    if chosen.plot:
        from gradwire.bench.micro.plot import draw

        draw(rows, meta, chosen.plot)


def main(name: str, arguments: Sequence[str]) -> int:
    """Run the benchmark. Return, on every rank, 1 if any element was wrong on any rank, and 2 for wrong arguments."""
    chosen = parse_arguments(name, arguments)
    case = {**CASES, BARRIER.name: BARRIER, **POINT_TO_POINT}[name]
    if chosen.peers and not mpi.under_mpirun():
        print(f"bench {name}: --peers needs mpirun -n N python -m gradwire.bench {name} ...", file=sys.stderr)
        return 2
    device = join_world(chosen.backend, chosen.timeout)
    try:
        with Communicator(timeout_s=chosen.timeout) as comm:
            try:
                jobs, algorithms = plan(case, chosen, comm, device)
            except ValueError as error:
                if comm.rank == 0:
                    print(f"bench {name}: {error}", file=sys.stderr)
                return 2
            ranks = comm.allgather_object(describe_rank(comm, device))
            meta = describe_run(chosen, comm, device)
            if comm.rank == 0:
                print("\n".join(format_header(name, chosen, meta, ranks)), flush=True)
            protocol = Protocol(chosen.iters, chosen.warmup_iters, chosen.check)
            codecs = chosen.codec or {}
            measured = measure(case, jobs, comm, algorithms, protocol, codecs=codecs, shared=chosen.shared)
            if comm.rank == 0:
                save(chosen, *report(case, comm, measured, codecs), meta)
            return 1 if any(row.wrong for _, row, _ in measured) else 0
    finally:
        dist.destroy_process_group()
