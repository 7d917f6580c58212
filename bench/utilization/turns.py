"""The ranks of `bench utilization`: `python -m gradwire.bench.utilization.turns FILE` reads settings, and rank 0 writes results.

Training with and without an exchange takes turns (see `gradwire.bench.timing`). With an exchange in every step, ranks average
gradients, beside backward(); else they train by LocalUpdates without an outer optimizer, and compute nothing meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradwire as hvd
from gradwire.bench import hosts
from gradwire.bench.timing import Protocol, meeting, most_bytes, slowest_rank, take_turns
from gradwire.bench.training import rules
from gradwire.bench.utilization.report import LossRow, UtilizationRow
from gradwire.bench.workloads import bytes_gpt, strategies
from gradwire.bench.workloads.loop import Trainee, Workload, join_ranks

CODECS = ("none", "int8", "chunktopk")
LR = 1e-3
LEAST_STEPS = 8
"""The fewest steps of a turn."""
CPU = torch.device("cpu")


def make_trainee(module: torch.nn.Module, codec: str, every: int) -> Trainee:
    """Return a Trainee whose ranks exchange once in `every` steps."""
    compression = rules.codec_of(codec)
    if every == 1:  # with a fixed plan: else it would try others while it is timed
        return strategies.ours(module, compression=compression, exchange_plan=hvd.ExchangePlan())
    return strategies.local_updates(module, hvd.rules.LocalUpdates(every, None, 0, compression))


def measure(workload: Workload, codec: str, every: int, rate: str, rounds: int) -> UtilizationRow:
    """Return the result of turns with and without an exchange. Collective."""
    trained, alone = make_trainee(workload.build(), codec, every), strategies.alone(workload.build())
    exchanges = -(-LEAST_STEPS // every)
    protocol = Protocol(rounds, check_iters=0)

    def turn(trainee: Trainee) -> None:
        for step in range(exchanges * every):
            trainee.train(workload, step, LR)

    turns, _ = take_turns([partial(turn, trained), partial(turn, alone)], meeting(CPU), protocol)
    with_exchange_s, computing_s = slowest_rank(turns, CPU)
    sent = most_bytes(round(trained.sent_bytes(0) / ((protocol.warmup_iters + rounds) * exchanges)), CPU)
    assert sent is not None
    transfer_s = 8 * sent / hosts.rate_bits_per_s(rate)
    step_s = float(np.median(computing_s)) / (exchanges * every)
    row = UtilizationRow(
        codec=codec,
        every=every,
        rate=rate,
        step_ms=1e3 * step_s,
        exchange_ms=1e3 * float(np.median(with_exchange_s - computing_s)) / exchanges,
        transfer_ms=1e3 * transfer_s,
        bytes_per_exchange=sent,
        computing_over_transfer=every * step_s / transfer_s,
        utilization=float(np.median(computing_s / with_exchange_s)),
        replicas_identical=trained.is_identical(),
    )
    trained.close()
    alone.close()
    return row


def train(codec: str, every: int, settings: Mapping[str, Any]) -> list[LossRow]:
    """Return the results of training to the end, for LocalUpdates without and with DiLoCo's outer optimizer. Collective."""
    found = []
    for rule in ("average", "diloco") if every > 1 else ("synchronous",):
        chosen = rules.parse_arguments([f"{rule}+{codec}"])
        vars(chosen).update({name: settings[name] for name in ("preset", "batch", "context", "warmup_steps")})
        chosen.every, chosen.steps = every, settings["loss_steps"]
        row = rules.train(chosen, chosen.competitors[0], None)
        found.append(LossRow(codec, every, rule, row.loss, row.sent_bytes, row.replicas_identical is not False))
    return found


def main(path: Path) -> None:
    settings = json.loads(path.read_text())
    join_ranks("cpu")
    workload = bytes_gpt.workload(bytes_gpt.size_of(argparse.Namespace(**settings)), settings["batch"] * hvd.size())
    rows, losses = list[UtilizationRow](), list[LossRow]()
    for codec, every in product(settings["codecs"], settings["every"]):
        rows.append(measure(workload, codec, every, settings["rate"], settings["rounds"]))
        losses += train(codec, every, settings) if settings["loss_steps"] else []
    if hvd.rank() == 0:
        parameters = sum(each.numel() for each in workload.build().parameters())
        found = {
            "parameters": parameters,
            "rows": [asdict(row) for row in rows],
            "losses": [asdict(row) for row in losses],
        }
        path.write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
