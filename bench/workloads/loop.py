"""The training loop of all benchmarks: a Training trains models, each by its own strategy, on the batches of one Workload.

Step s trains on workload.batch(s), of which every rank takes an equal share. Before each step, torch's random numbers are
seeded from (seed, step, rank). So runs by steps can be repeated and resumed bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives.cores import available

BLOCK_S = 0.5
"""The approximate duration of one model's turn. After a turn of each, ranks agree on losses and time."""
CLIP_NORM = 1.0
WARM_UP_STEPS = 20
FINAL_LR = 0.1
"""The learning rate at the end of the cosine schedule, relative to the peak."""


@dataclass(frozen=True)
class Workload:
    """The model and the data of a classifier of items (images, or the next byte at every position of a text).

    build: returns a new model, with the same weights in each call, that maps inputs to logits (..., classes). batch: returns the
    global batch of a step as (inputs, targets), on the CPU; the same on every rank. samples: those of a global batch.
    validation: batches that are not trained on. lr: the peak learning rate.
    """

    title: str
    item: str
    items_per_step: int
    samples: int
    seed: int
    lr: float
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    validation: Sequence[tuple[Tensor, Tensor]]
    has_accuracy: bool = False


@dataclass
class Trainee:
    """A model in training, and the strategy by which the ranks train it.

    forward: the module to call, which is `module` or its wrapper; None for `module`. wait_s: returns the seconds that this rank
    has waited for others; None if they are not known. sent_bytes: returns the bytes that this rank has sent after a number of
    steps. report: the strategy's own report at the end. plan: returns the plan of the exchange; None while it is tried, and if
    there is none. state: what is committed after each step. in_step: whether all ranks
    take the same number of steps. warm_up, period: all ranks hold the same parameters after warm_up steps, and then after every
    period steps. clip_norm: the maximum norm of all gradients; None: they are not clipped. losses, step_s: of every step,
    averaged over the ranks if they are in step.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    forward: nn.Module | None = None
    wait_s: Callable[[], float | None] = lambda: None
    sent_bytes: Callable[[int], float] = lambda steps: 0.0
    report: Callable[[], str] = lambda: ""
    plan: Callable[[], object] = lambda: None
    close: Callable[[], None] = lambda: None
    state: hvd.elastic.TorchState | None = None
    in_step: bool = True
    warm_up: int = 0
    period: int = 1
    clip_norm: float | None = CLIP_NORM
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def train(self, workload: Workload, step: int, lr: float) -> float:
        """Take a step on this rank's share of a batch. Return its loss."""
        torch.manual_seed(int(np.random.SeedSequence((workload.seed, step, hvd.rank())).generate_state(1)[0]))
        return self.step([share.to(self.device) for share in shares(workload.batch(step))], lr).item()

    def step(self, batch: Sequence[Tensor], lr: float) -> Tensor:
        """Take a step on a batch of this rank. Return its loss, for which the host has not waited."""
        inputs, targets = batch
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        loss = cross_entropy((self.forward or self.module)(inputs), targets)
        loss.backward()
        if self.clip_norm is not None:
            if isinstance(self.optimizer, hvd.DistributedOptimizer):
                self.optimizer.clip_grad_norm_(self.clip_norm)
            else:
                nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        self.optimizer.step()
        if self.state is not None:
            self.state.commit()
        return loss.detach()

    @torch.no_grad()
    def validate(self, workload: Workload) -> tuple[float, float]:
        """Return the loss and the accuracy on the validation data, of which each rank takes a share. Collective."""
        totals = torch.zeros(3, dtype=torch.float64)
        self.module.eval()
        for inputs, targets in workload.validation[hvd.rank() :: hvd.size()]:
            logits, right = self.module(inputs.to(self.device)), targets.to(self.device)
            hits = (logits.argmax(-1) == right).sum().item()
            totals += torch.tensor([cross_entropy(logits, right).item() * right.numel(), hits, right.numel()])
        self.module.train()
        loss, hits, items = hvd.allreduce(totals.to(self.device), op=hvd.Sum).tolist()
        return loss / items, hits / items

    def is_identical(self) -> bool:
        """Return whether all parameters have the same bits on all ranks. Collective."""
        digest = hashlib.sha256()
        for parameter in self.module.parameters():
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return len(set(hvd.allgather_object(digest.hexdigest()))) == 1


class Training:
    """Trains models in turns, until a number of steps or for some seconds; of a run by seconds, the steps are not known before.

    slow_s: the time that this rank sleeps in every step, to simulate a longer computation. Raises ValueError if the run has no
    end, or if the ranks cannot split a batch.
    """

    def __init__(
        self,
        workload: Workload,
        trainees: Sequence[Trainee],
        steps: int | None = None,
        seconds: float | None = None,
        slow_s: float = 0.0,
    ) -> None:
        if steps is None and seconds is None:
            raise ValueError("a run needs an end: steps or seconds")
        if workload.samples % hvd.size():
            raise ValueError(f"a batch of {workload.samples} cannot be split evenly over {hvd.size()} ranks")
        self.workload = workload
        self.steps = 0
        self.elapsed_s = 0.0
        """The seconds so far; if the ranks are in step, their mean, so that they take the same decisions."""
        self._trainees = list(trainees)
        self._in_step = all(trainee.in_step for trainee in trainees)
        self._end, self._end_s, self._slow_s = steps, seconds, slow_s

    def fraction(self, ahead: int = 0) -> float:
        """Return the finished fraction of the run after `ahead` more steps, from 0 to 1."""
        by_steps = (self.steps + ahead) / self._end if self._end else 0.0
        expected_s = self.elapsed_s * (1 + ahead / self.steps) if self.steps else 0.0
        return min(1.0, max(by_steps, expected_s / self._end_s if self._end_s else 0.0))

    def blocks(self, every: int | None = None) -> Iterator[None]:
        """Train in blocks of steps, and yield after each. every: end a block at every multiple of so many steps.

        The clock starts after two small exchanges, in which kernels are compiled.
        """
        for dtype in (torch.float32, torch.float64):  # of the gradients, and of losses and times
            hvd.allreduce(torch.zeros(1, dtype=dtype, device=self._trainees[0].device))
        began = time.monotonic() - self.elapsed_s
        while self.fraction() < 1:
            length = self._block_length(every)
            self._trainees.reverse()  # ABBA, so that no model profits from going first
            for trainee in self._trainees:
                for ahead in range(length):
                    self._step(trainee, ahead)
            self.steps += length
            self._agree(time.monotonic() - began, length)
            yield

    def _step(self, trainee: Trainee, ahead: int) -> None:
        began = time.perf_counter()
        time.sleep(self._slow_s)
        step = self.steps + ahead
        cosine = (1 + math.cos(math.pi * self.fraction(ahead))) / 2
        lr = self.workload.lr * min(1.0, (step + 1) / WARM_UP_STEPS) * (FINAL_LR + (1 - FINAL_LR) * cosine)
        trainee.losses.append(trainee.train(self.workload, step, lr))
        trainee.step_s.append(time.perf_counter() - began)

    def _block_length(self, every: int | None) -> int:
        """Return how many steps take about BLOCK_S, and end where ranks that are in step hold the same parameters."""
        if not self._in_step:
            return 1
        until = [trainee.warm_up - self.steps for trainee in self._trainees]
        bounds = [left for left in until if left > 0]
        period = 1 if bounds else max(trainee.period for trainee in self._trainees)
        bounds += [every - self.steps % every] if every else []
        bounds += [self._end - self.steps] if self._end else []
        wished = int(BLOCK_S * len(self._trainees) * self.steps / self.elapsed_s) if self.steps else 1
        return -(-min([max(1, wished), *bounds]) // period) * period

    def _agree(self, elapsed_s: float, length: int) -> None:
        """Average the time, and the losses and times of a block's steps, over the ranks that are in step."""
        self.elapsed_s = elapsed_s
        if self._in_step:
            lists = [values for trainee in self._trainees for values in (trainee.losses, trainee.step_s)]
            seen = torch.tensor(
                [elapsed_s, *(value for values in lists for value in values[-length:])], dtype=torch.float64
            )
            self.elapsed_s, *agreed = hvd.allreduce(seen.to(self._trainees[0].device), op=hvd.Average).tolist()
            for number, values in enumerate(lists):
                values[-length:] = agreed[number * length : (number + 1) * length]


def shares(batch: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's share of the tensors of a global batch."""
    return [tensor.tensor_split(hvd.size())[hvd.rank()] for tensor in batch]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def join_ranks(device: str, backend: str | None = None, **settings: Any) -> None:
    """Call hvd.init() with these settings. If a launcher has started the ranks, torch.distributed gets this backend before.

    backend None: gloo for tensors on the CPU, and for ranks that share GPUs, which NCCL refuses; otherwise that of hvd.init().
    device: as in choose_device().
    """
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if backend is None and torch.cuda.is_available() and (device == "cpu" or torch.cuda.device_count() < local_size):
        backend = "gloo"
    if backend is not None and "RANK" in os.environ:
        dist.init_process_group(backend)
    hvd.init(**settings)


def choose_device(name: str) -> torch.device:
    """Return this rank's device; "auto" selects a GPU if there is one. If there are too few, ranks share GPUs."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def share_cores() -> None:
    """Divide the cores among the ranks of this host, unless OMP_NUM_THREADS sets the number of threads."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(min(torch.get_num_threads(), available())) // hvd.local_size()))
