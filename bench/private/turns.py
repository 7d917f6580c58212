"""The ranks of a turn of `bench private`, whose environment has a key, or asks for checksums, or neither.

`python -m gradwire.bench.private.turns FILE`, on each rank: rank 0 writes the median time of every case to the file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import gradwire as hvd
from gradwire.bench.micro.cases import CASES, IN_PLACE, BenchJob
from gradwire.bench.micro.run import measure
from gradwire.bench.timing import Protocol, step_seconds
from gradwire.bench.workloads import bytes_gpt, strategies
from gradwire.bench.workloads.loop import join_ranks
from gradwire.collectives import Communicator
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.parsing import format_size

STEP = "a training step"
CODEC = "int8"
#: The sizes of the allreduces and how each is timed. The largest one also runs with the codec.
SIZES = {
    1 << 10: Protocol(200, warmup_iters=20),
    64 << 10: Protocol(100, warmup_iters=10),
    1 << 20: Protocol(20, warmup_iters=3),
    64 << 20: Protocol(4, warmup_iters=1),
}
STEPS = 8
CPU = torch.device("cpu")


def exchange(comm: Communicator) -> tuple[dict[str, float], int]:
    """Return the milliseconds of each allreduce on its slowest rank, by case, and the wrong elements of all. Collective."""
    found, wrong = {}, 0
    for nbytes, protocol in SIZES.items():
        job = BenchJob(comm.rank, comm.size, nbytes // 4, torch.float32, "sum", -1, CPU, IN_PLACE)
        codecs = {CODEC: (make_codec(CODEC), False)} if nbytes == max(SIZES) else {}
        for _, row, _ in measure(CASES["allreduce"], [job], comm, ["auto"], protocol, codecs=codecs):
            name = f"{format_size(nbytes)} {row.codec}" if row.codec in codecs else format_size(nbytes)
            found[name] = row.time_us / 1e3
            wrong += row.wrong or 0
    return found, wrong


def train() -> tuple[float, bool]:
    """Return the milliseconds of a training step, and whether replicas are identical. Every turn has the same, fixed plan of the
    exchange, so that turns do not differ in it. Collective."""
    workload = bytes_gpt.workload(replace(bytes_gpt.PRESETS["13m"], context=64), hvd.size())
    trainee = strategies.ours(workload.build(), exchange_plan=hvd.ExchangePlan(4 << 20))
    step = partial(trainee.train, workload, 0, workload.lr)
    seconds = step_seconds({STEP: step}, CPU, STEPS, 1)[STEP]
    return float(np.median(seconds)) * 1e3, trainee.is_identical()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("into", type=Path)
    flags = parser.parse_args()
    join_ranks("cpu")
    with Communicator() as comm:
        found, wrong = exchange(comm)
        step_ms, is_identical = train()
        if comm.rank == 0:
            turn = {"routes": comm.routes, "wrong": wrong + (not is_identical), "ms": {**found, STEP: step_ms}}
            flags.into.write_text(json.dumps(turn))
    hvd.shutdown()


if __name__ == "__main__":
    main()
