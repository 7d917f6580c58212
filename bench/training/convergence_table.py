"""Rows of `bench convergence`, and their text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOTES = """\
training: mean loss of the last steps; validation: loss on data not trained on, and that over no compression's.
wire: bytes that a rank sends in a step, all in one buffer, by the plans; ratio: of float32's to them."""


@dataclass(frozen=True)
class ConvergenceRow:
    """The result of one model trained with one codec. Field names are the keys of the JSON.

    wire_bytes: the bytes that a rank sends in a step. ratio: float32's bytes over wire_bytes. losses: those of all
    steps, averaged over the ranks. replicas_identical: whether the ranks' final weights are bitwise equal.
    """

    model: str
    codec: str
    settings: str
    world_size: int
    parameters: int
    steps: int
    seed: int
    training_loss: float
    validation_loss: float
    validation_over_none: float
    accuracy: float | None
    wire_bytes: float
    ratio: float
    replicas_identical: bool
    losses: list[float]


def format_header(meta: Mapping[str, Any]) -> list[str]:
    return [
        f"# convergence: world size {meta['world_size']} backend {meta['backend']}, {meta['steps']} steps, seed {meta['seed']}",
        f"# {meta['device']}, torch {meta['torch']}",
        *(f"# {line}" for line in NOTES.splitlines()),
    ]


def format_heading(row: ConvergenceRow) -> list[str]:
    return [
        "#",
        f"# {row.model}: {row.parameters / 1e6:.2f} M parameters",
        "# codec      training validation  over none  accuracy   wire (B/step)    ratio  replicas",
    ]


def format_row(row: ConvergenceRow) -> str:
    accuracy = "" if row.accuracy is None else f"{row.accuracy:.1%}"
    return (
        f"  {row.codec:10} {row.training_loss:8.4f} {row.validation_loss:10.4f} {row.validation_over_none:10.4f}"
        f" {accuracy:>9} {row.wire_bytes:15.0f} {row.ratio:8.2f}  {'identical' if row.replicas_identical else 'differ'}"
    )
