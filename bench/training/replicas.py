"""`torchrun --nproc-per-node 4 -m gradwire.bench replicas`: which parameters to validate under local updates.

Ranks train bytes_gpt by LocalUpdates. At each exchange, the loss on all validation data is computed with the common parameters
of the last exchange, with the parameters of each rank and their average right before this exchange, and with the common
parameters after it. The runs start from the same weights, train on the same text, and differ in the outer optimizer and codec.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import gradwire as hvd
from gradwire.bench.options import add_results, count_from
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.training.replicas_report import ReplicasRow, format_header, format_row
from gradwire.bench.workloads import bytes_gpt, strategies
from gradwire.bench.workloads.loop import Training, join_ranks, share_cores

OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""The settings of the outer SGD, those of DiLoCo."""
RULES: dict[str, tuple[dict[str, Any] | None, str]] = {
    "average": (None, "none"),
    "average+onebit": (None, "onebit"),
    "diloco": (OUTER, "none"),
}
"""The settings of the outer SGD, None for outer=None, and the codec of pseudo-gradients."""


def exchanges(name: str, chosen: argparse.Namespace) -> Iterator[ReplicasRow]:
    """Train by one rule, and yield a row for each exchange. A collective call."""
    workload = bytes_gpt.workload(bytes_gpt.size_of(chosen), chosen.batch * hvd.size(), chosen.seed)
    module = workload.build()
    outer, codec = RULES[name]
    sgd = torch.optim.SGD(module.parameters(), **outer) if outer else None
    rule = hvd.rules.LocalUpdates(chosen.every, sgd, chosen.warmup_steps, codec)
    trainee = strategies.local_updates(module, rule)
    evaluated = strategies.alone(workload.build())  # another model, so that the one in training stays as it is

    def parameters() -> Tensor:
        return parameters_to_vector(module.parameters()).detach()

    def loss(of: Tensor) -> float:
        vector_to_parameters(of, evaluated.module.parameters())
        return evaluated.validate(workload)[0]

    def keep(*_: Any) -> None:
        local.copy_(parameters())

    local, common = parameters(), parameters()
    trainee.optimizer.register_step_post_hook(keep)  # which torch calls before the exchange
    training = Training(workload, [trainee], chosen.steps)
    for _ in training.blocks(every=chosen.every):
        if training.steps > chosen.warmup_steps:
            replicas = hvd.allgather(local[None])
            yield ReplicasRow(
                rule=name,
                step=training.steps,
                previous=loss(common),
                replicas=[loss(replica) for replica in replicas],
                average=loss(replicas.mean(0)),
                common=loss(parameters()),
                replicas_identical=trainee.is_identical(),
            )
        common = parameters()
    trainee.close()


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench replicas",
        description="Compare the parameters that can be validated under local updates. Run under torchrun.",
    )
    add, positive, not_negative = parser.add_argument, partial(count_from, 1), partial(count_from, 0)
    bytes_gpt.add_flags(parser)
    add("--steps", type=positive, default=450, help="steps of each run (default 450)")
    add("--every", type=positive, default=30, help="steps between two exchanges (default 30)")
    add("--warmup-steps", type=not_negative, default=150, help="synchronous steps before local updates (default 150)")
    add("--seed", type=not_negative, default=0, help="seed of the weights and the data (default 0)")
    add_results(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return, on every rank, 1 if replicas differ after an exchange."""
    chosen = parse_arguments(arguments)
    join_ranks("cpu")
    share_cores()
    settings = {name: value for name, value in vars(chosen).items() if name != "json"}
    meta = {
        **software_and_machine(torch.device("cpu")),
        "backend": dist.get_backend(),
        "world_size": hvd.size(),
        **settings,
        "context": bytes_gpt.size_of(chosen).context,
    }
    is_first = hvd.rank() == 0
    if is_first:
        print("\n".join(format_header(meta)), flush=True)
    rows = []
    for name in RULES:
        for row in exchanges(name, chosen):
            rows.append(row)
            if is_first:
                print(format_row(row), flush=True)
    if is_first:
        write_json(chosen.json, meta, rows)
    hvd.shutdown()
    return 0 if all(row.replicas_identical for row in rows) else 1
