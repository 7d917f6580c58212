"""Rows of `bench rules`, and their text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.bench.rules.competitors import RULES

NOTES = f"""\
RULE is one of {", ".join(RULES)}.
Local updates: average (with chunktopk the sum of what is sent), diloco, and streaming.
A server makes an update of what all ranks have pushed (server), all but one (quorum, and stale, which bounds how far a rank is
ahead), or any (asynchronous).
loss: on text not trained on, with the parameters that ranks have, each a share of it; over first: over the first
competitor's. reaches: the share of the first competitor's time, steps and bytes after which a loss as low as its last is seen.
sent: by a rank, of gradients, movements or parameters, uncompressed ones as 2(p-1)/p of them."""


@dataclass(frozen=True)
class RuleRow:
    """The result of one model trained by one rule. Field names are the keys of the JSON.

    tokens_per_s: the rate of all ranks together. over_first: the loss over that of the first competitor with this seed.
    reach_time, reach_tokens, reach_bytes: the time, tokens and bytes until the loss was as low as the final loss of the first
    competitor, over the first competitor's own; None if the loss never was as low. wait_share: the part of the time that ranks
    waited, or None if it is not known. replicas_identical: None for rules whose ranks have different parameters.
    """

    competitor: str
    seed: int
    world_size: int
    parameters: int
    steps: float
    seconds: float
    tokens_per_s: float
    sent_bytes: float
    wait_share: float | None
    loss: float
    over_first: float
    reach_time: float | None
    reach_tokens: float | None
    reach_bytes: float | None
    replicas_identical: bool | None
    report: str
    curve: list[dict[str, float]]


def format_header(meta: Mapping[str, Any], row: RuleRow) -> list[str]:
    length = f"{meta['steps']} steps" if meta["steps"] else f"{meta['seconds']:g} s"
    return [
        f"# rules: bytes_gpt {meta['preset']}, {row.parameters / 1e6:.2f} M parameters, {meta['batch']} sequences of"
        f" {meta['context']} bytes a rank, world size {row.world_size}, {length}",
        f"# every {meta['every']}, outer Nesterov {meta['outer_lr']:g}/{meta['outer_momentum']:g}, warm-up"
        f" {meta['warmup_steps']} steps ({meta['warmup_codec']}), staleness {meta['staleness']},"
        f" late {meta['late']}, delay {meta['delay']}, k {meta['k']}",
        *([f"# Network: {meta['network']}"] if meta["network"] else []),
        *([f"# Slow: {meta['slow']}"] if meta["slow"] else []),
        f"# {meta['device']}, torch {meta['torch']}",
        "#",
        f"# {'':26}                                                over  reaches, of the first one's",
        f"# {'rule':26} seed    steps   seconds  tokens/s  sent (MB)  wait    loss   first   time tokens  bytes  replicas",
    ]


def format_row(row: RuleRow) -> str:
    waited = "-" if row.wait_share is None else f"{row.wait_share:.1%}"
    same = {None: "-", True: "identical", False: "differ"}[row.replicas_identical]
    return (
        f"  {row.competitor:26} {row.seed:4} {row.steps:8.0f} {row.seconds:9.1f} {row.tokens_per_s:9.0f}"
        f" {row.sent_bytes / 1e6:10.2f} {waited:>5} {row.loss:7.4f} {row.over_first:7.4f}"
        f" {_share(row.reach_time)} {_share(row.reach_tokens)} {_share(row.reach_bytes)}  {same}"
    )


def _share(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.3f}':>6}"
