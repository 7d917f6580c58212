"""The training loop that the examples share: ranks, validation, checkpoint and resume, comparison with torch's DDP.

Step s trains on task.batch(s), of which every rank takes an equal share. Before each step, torch's random numbers are
seeded from (seed, step, rank). So a resumed run continues bit for bit, unless the learning rate depends on the time
(`seconds` without `decay_steps`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from gradwire.trainer.examples.checkpoint import Checkpoint
from gradwire.trainer.examples.config import LoopConfig
from gradwire.trainer.examples.report import BASELINE, OURS, Record, RunReport, count, progress
from gradwire.trainer.reducer.checkpoint_format import KEY

BLOCK_S = 0.5
"""The approximate duration of one model's turn. After a turn of each, ranks agree on losses, time and interruption."""
CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1
FINAL_LR = 0.1
"""The learning rate at the end of the cosine schedule, relative to the peak."""


@dataclass(frozen=True)
class Task:
    """Holds the model and the data of a classifier of items (images, or the next byte at every position of a text)."""

    title: str
    item: str
    items_per_step: int
    build: Callable[[], nn.Module]
    """Returns a new model that maps inputs to logits (..., classes)."""
    batch: Callable[[int], tuple[Tensor, Tensor]]
    """Returns the global batch of a step as (inputs, targets), on the CPU; the same on every rank."""
    validation: Sequence[tuple[Tensor, Tensor]]
    """Batches of data that is not trained on."""
    report_accuracy: bool = False


@dataclass
class Trainee:
    """Holds one model in training: gradwire's, or the one under DDP."""

    module: nn.Module
    forward: nn.Module
    """The module to call: `module` itself, or its wrapper."""
    optimizer: torch.optim.Optimizer
    wait_s: Callable[[], float]
    """Returns the seconds spent waiting for communication so far."""
    record: Record
    clip_norm: float | None = CLIP_NORM
    """The maximum norm of all gradients, to which they are scaled down; None: they are not clipped."""

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> float:
        """Train on this rank's share of a batch; return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        loss = cross_entropy(self.forward(inputs), targets)
        loss.backward()
        if self.clip_norm is not None:
            if isinstance(self.optimizer, hvd.DistributedOptimizer):
                self.optimizer.clip_grad_norm_(self.clip_norm)
            else:
                nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        self.optimizer.step()
        return loss.item()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def adamw(module: nn.Module) -> torch.optim.AdamW:
    """Return an AdamW that applies weight decay to matrices only."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95))


def our_trainee(module: nn.Module, **options: Any) -> Trainee:
    """Return a Trainee whose gradients gradwire averages. options: of DistributedOptimizer."""
    optimizer = hvd.DistributedOptimizer(adamw(module), named_parameters=module.named_parameters(), **options)
    return Trainee(module, module, optimizer, lambda: optimizer.communication_wait_s, Record())


def wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer without gradwire's wrapper. Its state is the same on all ranks."""
    return optimizer.optimizer if isinstance(optimizer, hvd.DistributedOptimizer) else optimizer


def ddp_trainee(module: nn.Module) -> Trainee:
    """Return a Trainee whose gradients torch's DDP averages, uncompressed."""
    return Trainee(module, DistributedDataParallel(module), adamw(module), lambda: 0.0, Record())


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
        torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Catch SIGINT; yield a function that returns whether it has arrived."""
    voiced = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal voiced
        voiced = True

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: voiced
    finally:
        signal.signal(signal.SIGINT, previous)


class Run:
    """Trains gradwire's model, or gradwire's and DDP's in turns. Call hvd.init() first. Raises ValueError if the run
    has no end, or the ranks cannot split the batch."""

    def __init__(self, task: Task, config: LoopConfig) -> None:
        if config.steps is None and config.seconds is None:
            raise ValueError("a run needs an end: steps or seconds")
        if config.batch % hvd.size():
            raise ValueError(f"a batch of {config.batch} cannot be split evenly over {hvd.size()} ranks")
        share_cores()
        self.task = task
        self.config = config
        self.device = choose_device(config.device)
        self.trainees = {OURS: our_trainee(self._module(), compression=config.compression)}
        if config.compare:
            self.trainees[BASELINE] = ddp_trainee(self._module())
        self.checkpoint = Checkpoint(config.out, self.device)
        self.order = list(self.trainees)
        """The order of turns: reversed in every block (ABBA), so that neither model profits from going first."""
        self.steps = 0
        self.elapsed_s = 0.0
        """The seconds so far. Like all measurements here, they are averaged, so that all ranks take the same
        decisions."""

    def __call__(self) -> int:
        """Train to the end; return the exit status: 1 if replicas differ, 130 after SIGINT, or 0.

        The clock starts after two small exchanges, in which kernels are compiled.
        """
        self._restore()
        self._introduce()
        for dtype in (torch.float32, torch.float64):  # of the gradients, and of the values in _block()
            hvd.allreduce(torch.zeros(1, dtype=dtype, device=self.device))
        started = time.monotonic() - self.elapsed_s
        stop = False
        with interruption() as voiced:
            with progress(hvd.rank(), self.task.item, self.task.items_per_step) as show:
                while not stop and self._fraction(self.steps) < 1:
                    stop = self._block(started, voiced)
                    over = stop or self._fraction(self.steps) >= 1
                    if over or self.steps % self.config.validate_every == 0:
                        self._validate()
                    if self.steps % self.config.checkpoint_every == 0:
                        self._save()
                    show(self._fraction(self.steps), self.trainees[OURS].record)
            self._validate()
            self._save()
            self._report()
        if not all(trainee.record.replicas_identical for trainee in self.trainees.values()):
            return 1
        return 130 if stop else 0

    def _module(self) -> nn.Module:
        torch.manual_seed(self.config.seed)
        return self.task.build().to(self.device)

    def _fraction(self, step: int) -> float:
        """Return the finished fraction of the run, from 0 to 1."""
        by_steps = step / self.config.steps if self.config.steps else 0.0
        by_time = self.elapsed_s / self.config.seconds if self.config.seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def _lr(self, step: int) -> float:
        """Return the learning rate: a linear warm-up times a cosine over the run."""
        through = step / self.config.decay_steps if self.config.decay_steps else self._fraction(step)
        cosine = (1 + math.cos(math.pi * min(1.0, through))) / 2
        warm = min(1.0, (step + 1) / max(1, self.config.warm_up))
        return self.config.lr * warm * (FINAL_LR + (1 - FINAL_LR) * cosine)

    def _block(self, started: float, voiced: Callable[[], bool]) -> bool:
        """Train every model for some steps, then average the measurements. Return whether SIGINT has arrived at any
        rank."""
        length = self._block_length()
        self.order.reverse()
        turns = {name: self._turn(self.trainees[name], length) for name in self.order}
        self.steps += length
        seen = [time.monotonic() - started, float(voiced())]
        for name in self.trainees:
            seen += turns[name]
        agreed = hvd.allreduce(torch.tensor(seen, dtype=torch.float64, device=self.device), op=hvd.Average).tolist()
        for trainee, at in zip(self.trainees.values(), range(2, len(agreed), 2 * length + 1), strict=True):
            trainee.record.losses += agreed[at : at + length]
            trainee.record.step_s += agreed[at + length : at + 2 * length]
            trainee.record.wait_s += agreed[at + 2 * length]
        self.elapsed_s = agreed[0]
        return bool(agreed[1] > 0)

    def _block_length(self) -> int:
        """Return how many steps take about BLOCK_S, up to the next validation, checkpoint or last step."""
        recent = [statistics.mean(t.record.step_s[-20:]) for t in self.trainees.values() if t.record.step_s]
        wished = max(1, int(BLOCK_S / max(recent))) if recent else 1
        periods = [self.config.validate_every, self.config.checkpoint_every]
        bounds = [period - self.steps % period for period in periods]
        if self.config.steps:
            bounds.append(self.config.steps - self.steps)
        return min(wished, *bounds)

    def _turn(self, trainee: Trainee, length: int) -> list[float]:
        """Train one model; return this rank's losses, then the seconds of each step, then the seconds of waiting."""
        share = self.config.batch // hvd.size()
        mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)
        losses, seconds, waited = [], [], trainee.wait_s()
        for step in range(self.steps, self.steps + length):
            begun = time.perf_counter()
            torch.manual_seed(mixed(self.config.seed, step, hvd.rank()))
            inputs, targets = self.task.batch(step)
            loss = trainee.step(inputs[mine].to(self.device), targets[mine].to(self.device), self._lr(step))
            losses.append(loss)
            seconds.append(time.perf_counter() - begun)
        return [*losses, *seconds, trainee.wait_s() - waited]

    @torch.no_grad()
    def _validate(self) -> None:
        for trainee in self.trainees.values():
            record = trainee.record
            if record.validation and record.validation[-1][0] == self.steps:
                continue
            trainee.module.eval()
            totals = torch.zeros(3, dtype=torch.float64, device=self.device)
            for inputs, targets in self.task.validation[hvd.rank() :: hvd.size()]:
                logits, right = trainee.module(inputs.to(self.device)), targets.to(self.device)
                totals[0] += cross_entropy(logits, right) * right.numel()
                totals[1] += (logits.argmax(-1) == right).sum()
                totals[2] += right.numel()
            trainee.module.train()
            losses, hits, items = hvd.allreduce(totals, op=hvd.Sum).tolist()
            record.validation.append((self.steps, losses / items, hits / items))

    def _save(self) -> None:
        common = {
            "elapsed_s": self.elapsed_s,
            "modules": {name: trainee.module.state_dict() for name, trainee in self.trainees.items()},
            "optimizers": {name: wrapped(trainee.optimizer).state_dict() for name, trainee in self.trainees.items()},
            "records": {name: dataclasses.asdict(trainee.record) for name, trainee in self.trainees.items()},
        }
        self.checkpoint.save(common, self.trainees[OURS].optimizer.state_dict().get(KEY), self.steps)

    def _restore(self) -> None:
        """Give all ranks the state of rank 0, loaded or new, and load each rank's own state."""
        state = self.checkpoint.load() if self.config.resume and hvd.rank() == 0 else None
        history = state and {key: state.get(key) for key in ("elapsed_s", "records", "parts", "step")}
        history = hvd.broadcast_object(history, root_rank=0)
        if history and history["records"].keys() != self.trainees.keys():
            raise ValueError(f"{self.checkpoint.path} holds {list(history['records'])}, not {list(self.trainees)}")
        for name, trainee in self.trainees.items():
            if state:
                trainee.module.load_state_dict(state["modules"][name])
                wrapped(trainee.optimizer).load_state_dict(state["optimizers"][name])
            hvd.broadcast_parameters(trainee.module.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(trainee.optimizer, root_rank=0)
            if history:
                trainee.record = Record(**history["records"][name])
        if history:
            self.elapsed_s = history["elapsed_s"]
            self.steps = len(self.trainees[OURS].record.losses)
            if history["parts"]:
                self._restore_part(*self.checkpoint.load_parts(history["parts"], history["step"]))

    def _restore_part(self, mine: dict[str, Any], *also: dict[str, Any]) -> None:
        optimizer = self.trainees[OURS].optimizer
        assert isinstance(optimizer, hvd.DistributedOptimizer)
        optimizer.load_state_dict({**wrapped(optimizer).state_dict(), KEY: mine}, also=[{KEY: other} for other in also])

    def _introduce(self) -> None:
        if hvd.rank() == 0:
            module = self.trainees[OURS].module
            millions = sum(parameter.numel() for parameter in module.parameters()) / 1e6
            start = f"resumed at step {self.steps}" if self.steps else "from scratch"
            ranks = count(hvd.size(), "rank")
            print(f"{self.task.title}: {millions:.2f} M parameters, {ranks}, {self.device}, {start}", flush=True)

    def _report(self) -> None:
        for trainee in self.trainees.values():
            digests = hvd.allgather_object(digest(trainee.module))
            trainee.record.replicas_identical = len(set(digests)) == 1
        if hvd.rank() == 0:
            RunReport(
                title=self.task.title,
                item=self.task.item,
                items_per_step=self.task.items_per_step,
                world_size=hvd.size(),
                accuracy=self.task.report_accuracy,
                records={name: trainee.record for name, trainee in self.trainees.items()},
            ).publish(self.config.out)


def mixed(*numbers: int) -> int:
    """Return one seed that depends on several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def digest(module: nn.Module) -> str:
    """Return the SHA-256 hash of all parameters."""
    result = hashlib.sha256()
    for parameter in module.parameters():
        result.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
