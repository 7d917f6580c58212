"""The rows of `bench replicas`, and their text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReplicasRow:
    """The validation losses at one exchange. Field names are the keys of the JSON.

    previous: with the common parameters of the last exchange. replicas: right before this exchange, with those of each rank.
    average: with the average of these. common: with the common parameters after this exchange. replicas_identical: whether all
    ranks have these then.
    """

    rule: str
    step: int
    previous: float
    replicas: list[float]
    average: float
    common: float
    replicas_identical: bool


def format_header(meta: Mapping[str, Any]) -> list[str]:
    return [
        f"# replicas: bytes_gpt {meta['preset']}, {meta['batch']} sequences of {meta['context']} bytes a rank, world size"
        f" {meta['world_size']}, {meta['steps']} steps, warm-up {meta['warmup_steps']}, every {meta['every']}",
        f"# {meta['device']}, torch {meta['torch']}",
        "# the validation loss of: the last common parameters, a rank's (lowest to highest), their average, the next common",
        "# rule             step    last   ranks             average    next  replicas",
    ]


def format_row(row: ReplicasRow) -> str:
    return (
        f"  {row.rule:16} {row.step:4}  {row.previous:6.4f}  {min(row.replicas):6.4f} to {max(row.replicas):6.4f}"
        f"  {row.average:7.4f}  {row.common:6.4f}  {'identical' if row.replicas_identical else 'differ'}"
    )
