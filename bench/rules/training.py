"""Train a competitor of `bench rules` for a number of steps or of seconds, and record its loss."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.bench.rules.competitors import Competitor
from gradwire.trainer.examples import bytes_gpt
from gradwire.trainer.examples.loop import CLIP_NORM, FINAL_LR, Task, cross_entropy, mixed

AGREE_S = 2.0
"""The approximate interval at which ranks that are in step agree on the progress of a run by time."""


@dataclass(frozen=True)
class Length:
    """The length of a run, in steps or in seconds; the other one is None."""

    steps: int | None
    seconds: float | None


@dataclass(frozen=True)
class Slowness:
    """A slow rank, and the time that it sleeps in every step to simulate a longer computation."""

    rank: int
    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """The parameters of a rank at one time of the run, with its steps, seconds and sent bytes until then."""

    steps: int
    seconds: float
    sent_bytes: float
    parameters: list[Tensor]


@dataclass(frozen=True)
class Point:
    """The progress of all ranks together, and the validation loss then. seconds, sent_bytes: means over the ranks."""

    tokens: float
    seconds: float
    sent_bytes: float
    loss: float


class Training:
    """Train one competitor. The constructor and all methods are collective calls.

    Ranks that are in step agree now and then on their progress, so that they have the same learning rate and end together.
    Other ranks use their own progress. The learning rate is that of the examples: a warm-up, times half a cosine.
    """

    def __init__(
        self,
        competitor: Competitor,
        task: Task,
        config: bytes_gpt.GPTConfig,
        length: Length,
        slow: Slowness | None,
        points: int,
    ) -> None:
        self._competitor = competitor
        self._task = task
        self._config = config
        self._length = length
        self._slow_s = slow.seconds if slow is not None and slow.rank == hvd.rank() else 0.0
        self._points = points
        self._device = next(competitor.module.parameters()).device
        self._snapshots: list[Snapshot] = []
        self.steps = 0
        self.seconds = 0.0
        """The seconds since the start of the run at the last block of steps; a mean over ranks if they agree on the time."""

    def run(self) -> None:
        """Train to the end. The time excludes everything that was compiled or set up before the call."""
        hvd.barrier()
        self._began = time.monotonic()
        self._snap()
        fraction = 0.0
        while fraction < 1:
            block = self._block()
            pace = (
                0.0
                if self._length.seconds is None or not self.steps
                else self.seconds / self.steps / self._length.seconds
            )
            for ahead in range(block):
                self._step(self._fraction(fraction + ahead * pace))
            fraction = self._agreed()
            if fraction >= 1 or fraction * self._points >= len(self._snapshots):
                self._snap()

    def _block(self) -> int:
        """Return how many steps to take until ranks compare their progress again."""
        competitor = self._competitor
        if not competitor.in_step:
            return 1
        to_common = max(0, competitor.warmup_steps - self.steps)
        if self._length.steps is not None:
            wished = max(1, self._length.steps // self._points)
            left = self._length.steps - self.steps
        else:
            wished = max(1, int(AGREE_S * self.steps / self.seconds)) if self.steps else 1
            left = wished
        if to_common:
            return min(wished, to_common, left)
        periods = max(1, wished // competitor.period)
        return min(periods * competitor.period, -(-left // competitor.period) * competitor.period)

    def _agreed(self) -> float:
        """Return the fraction of the run that is over."""
        self.seconds = time.monotonic() - self._began
        if self._competitor.in_step and self._length.seconds is not None:
            everyones = torch.tensor([self.seconds], dtype=torch.float64)
            self.seconds = hvd.allreduce(everyones, op=hvd.Average).item()
        return self._fraction(self.seconds / self._length.seconds if self._length.seconds is not None else 0.0)

    def _fraction(self, by_time: float) -> float:
        return by_time if self._length.steps is None else self.steps / self._length.steps

    def _step(self, fraction: float) -> None:
        competitor, config = self._competitor, self._config
        cosine = (1 + math.cos(math.pi * min(1.0, fraction))) / 2
        lr = config.lr * min(1.0, (self.steps + 1) / config.warm_up) * (FINAL_LR + (1 - FINAL_LR) * cosine)
        for group in competitor.optimizer.param_groups:
            group["lr"] = lr
        share = config.batch // hvd.size()
        mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
        torch.manual_seed(mixed(config.seed, self.steps, hvd.rank()))
        inputs, targets = self._task.batch(self.steps)
        competitor.optimizer.zero_grad()
        cross_entropy(competitor.forward(inputs[mine].to(self._device)), targets[mine].to(self._device)).backward()
        if self._slow_s:
            time.sleep(self._slow_s)
        nn.utils.clip_grad_norm_(competitor.module.parameters(), CLIP_NORM)
        competitor.optimizer.step()
        self.steps += 1

    def _snap(self) -> None:
        copied = [parameter.detach().to("cpu", copy=True) for parameter in self._competitor.module.parameters()]
        self._snapshots.append(Snapshot(self.steps, self.seconds, self._competitor.sent_bytes(self.steps), copied))

    def curve(self) -> list[Point]:
        """Return the loss over the run. Every rank validates its share of the data with its recorded parameters."""
        counts = hvd.allgather_object(len(self._snapshots))
        last = self._snapshots[-1]
        kept = [*self._snapshots[: min(counts) - 1], last]  # a slow rank may have fewer snapshots
        return [self._validated(snapshot) for snapshot in kept]

    @torch.no_grad()
    def _validated(self, snapshot: Snapshot) -> Point:
        for parameter, copied in zip(self._competitor.module.parameters(), snapshot.parameters, strict=True):
            parameter.copy_(copied)
        totals = torch.zeros(2, dtype=torch.float64)
        for inputs, targets in self._task.validation[hvd.rank() :: hvd.size()]:
            logits, right = self._competitor.module(inputs.to(self._device)), targets.to(self._device)
            totals += torch.tensor([cross_entropy(logits, right).item() * right.numel(), right.numel()])
        loss, items = hvd.allreduce(totals, op=hvd.Sum).tolist()
        done = torch.tensor([snapshot.steps, snapshot.seconds, snapshot.sent_bytes], dtype=torch.float64)
        steps, seconds, sent_bytes = hvd.allreduce(done, op=hvd.Average).tolist()
        return Point(steps * self._task.items_per_step, seconds, sent_bytes, loss / items)
