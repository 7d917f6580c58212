"""Trains a byte-level GPT for `bench failures`. Its steps do not depend on the number of ranks.

Every step has one global batch, of which each rank takes an equal part, so runs with different numbers of ranks can be
compared step by step. In each step, rank 0 appends a line of JSON to a log: time, step, loss and process ID.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc

gc.disable()  # until the optimizer exists: docs/guides/elastic.md, "Restarting faster"

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradwire as hvd
from gradwire.bench.workloads import bytes_gpt, strategies

#: The samples of a step, which 1, 2, 3 and 4 ranks divide evenly.
_GLOBAL_BATCH = 24
_SAMPLE_S = 0.02
"""The time that a rank sleeps per sample, like an accelerator's. Without it, ranks that share the cores of a machine
would be as fast after the loss of a rank."""


class Steps:
    """Takes training steps until a time. until: the end, as time.time(). log: the file that rank 0 appends to."""

    def __init__(self, until: float, log: Path) -> None:
        self._workload = bytes_gpt.workload(bytes_gpt.GPTSize(layers=2, width=64, context=32, lr=1e-3), _GLOBAL_BATCH)
        self._trainee = strategies.ours(self._workload.build())
        self.model, self.optimizer = self._trainee.module, self._trainee.optimizer
        self._until, self._log = until, log

    def take(self, step: int) -> bool:
        """Take a step. Return whether there is time for another one; the result is the same on all ranks."""
        time.sleep(_SAMPLE_S * _GLOBAL_BATCH / hvd.size())
        loss = self._trainee.train(self._workload, step, self._workload.lr)
        said: Tensor = hvd.allreduce(torch.tensor([loss, float(time.time() >= self._until)]))
        if hvd.rank() == 0:
            record = {"time": time.time(), "step": step, "loss": float(said[0]), "process": os.getpid()}
            with self._log.open("a") as log:
                log.write("\n" + json.dumps(record))  # a rank that was killed may have left half a line
        return float(said[1]) == 0.0


def elastic(steps: Steps) -> None:
    """Train by hvd.elastic, with a commit after every step."""
    state = hvd.elastic.TorchState(steps.model, steps.optimizer, step=0)

    @hvd.elastic.run(max_failures=1000)
    def train(state: Any) -> None:
        goes_on = True
        while goes_on:
            state.step += 1
            goes_on = steps.take(state.step)
            state.commit()

    train(state)


def from_disk(steps: Steps, checkpoint: Path, every_s: float) -> None:
    """Train from the checkpoint, if there is one. Rank 0 saves a checkpoint every every_s seconds."""
    step, saved = 0, time.monotonic()
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=True)
        step = kept["step"]
        steps.model.load_state_dict(kept["model"])
        steps.optimizer.load_state_dict(kept["optimizer"])
    goes_on = True
    while goes_on:
        step += 1
        goes_on = steps.take(step)
        if hvd.rank() == 0 and time.monotonic() - saved >= every_s:
            kept = {"step": step, "model": steps.model.state_dict(), "optimizer": steps.optimizer.state_dict()}
            torch.save(kept, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
            saved = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="time.time() seconds")
    parser.add_argument("--checkpoint-s", type=float, help="save to disk every so many seconds, and commit nothing")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init(timeout_s=30.0)
    steps = Steps(flags.until, flags.into)
    gc.freeze()
    gc.enable()
    if flags.checkpoint_s is None:
        elastic(steps)
    else:
        from_disk(steps, flags.into.with_suffix(".pt"), flags.checkpoint_s)
    hvd.shutdown()


if __name__ == "__main__":
    main()
