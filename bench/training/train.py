"""`torchrun --nproc-per-node 2 -m gradwire.bench train`: train a model, with checkpoints, validation and a picture of the loss.

The model is a byte-level GPT on the source text of Python's standard library or on your own text, or a small convolutional
network on handwritten digits. --compare ddp trains a second model under torch's DDP, in turns with ours.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

import gradwire as hvd
from gradwire.bench.options import count_from, number_from
from gradwire.bench.training.train_report import DDP, OURS, Record, count, progress, publish
from gradwire.bench.workloads import bytes_gpt, digits_cnn, strategies
from gradwire.bench.workloads.loop import Trainee, Training, Workload, choose_device, join_ranks, share_cores

INTERRUPTED = 130
_FILE = re.compile(r"checkpoint\.step(\d+)\.rank\d+of(\d+)\.(?:pt|partial)")
MODELS = ("bytes_gpt", "digits_cnn")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, positive = parser.add_argument, partial(count_from, 1)
    add("text", nargs="?", type=Path, help="a text, or a folder of *.py, *.txt and *.md, for bytes_gpt to read")
    add("--model", choices=MODELS, default=MODELS[0], help="what to train (bytes_gpt)")
    bytes_gpt.add_flags(parser, batch=8)
    add("--steps", type=positive, help="train for this many steps in all")
    add(
        "--seconds",
        type=partial(number_from, 0.001),
        help="train for about this long in all (60, or 400 steps of digits_cnn)",
    )
    add("--compression", default="none", help="how gradients are compressed: a codec, such as int8 (none)")
    add("--compare", choices=["ddp"], help="train a second model under torch's DDP, in turns with ours")
    add("--seed", type=partial(count_from, 0), default=0, help="of the weights, the order of the data and dropout (0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (auto)")
    add("--out", type=Path, help="folder for checkpoints, loss.png and summary.json (runs/MODEL)")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --out, if there is one")
    add("--checkpoint-every", type=positive, default=100, help="steps between validations and checkpoints (100)")
    chosen = parser.parse_args(arguments)
    if chosen.steps is None and chosen.seconds is None:
        chosen.steps, chosen.seconds = (None, 60.0) if chosen.model == "bytes_gpt" else (400, None)
    chosen.out = chosen.out or Path("runs") / chosen.model
    return chosen


def workload_of(chosen: argparse.Namespace) -> Workload:
    samples = chosen.batch * hvd.size()
    if chosen.model == "digits_cnn":
        return digits_cnn.workload(samples, chosen.seed)
    return bytes_gpt.workload(bytes_gpt.size_of(chosen), samples, chosen.seed, chosen.text)


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Catch SIGINT; yield a function that returns whether it has arrived."""
    arrived: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield lambda: bool(arrived)
    finally:
        signal.signal(signal.SIGINT, previous)


class Run:
    """Trains one model, or two in turns, with validations and checkpoints. Each rank has its own checkpoint files, whose names
    have the step, the rank and the number of ranks."""

    def __init__(self, workload: Workload, trainees: dict[str, Trainee], training: Training, folder: Path) -> None:
        self.workload, self.trainees, self.training, self.folder = workload, trainees, training, folder
        self.validations: dict[str, list[tuple[int, float, float]]] = {name: [] for name in trainees}
        self._resumed_at = 0

    def validate_and_save(self) -> None:
        """Collective. Once all ranks have saved, earlier checkpoints are removed."""
        step = self.training.steps
        for name, trainee in self.trainees.items():
            self.validations[name].append((step, *trainee.validate(self.workload)))
        state = {
            "elapsed_s": self.training.elapsed_s,
            "modules": {name: trainee.module.state_dict() for name, trainee in self.trainees.items()},
            "optimizers": {name: trainee.optimizer.state_dict() for name, trainee in self.trainees.items()},
            "records": {name: asdict(self.record(name)) for name in self.trainees},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._file(step, hvd.rank(), hvd.size())
        torch.save(state, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)
        hvd.barrier()
        newest = {self._file(step, other, hvd.size()) for other in range(hvd.size())}
        for file, *_ in self._files():
            if file not in newest:
                file.unlink(missing_ok=True)
        hvd.barrier()

    def resume(self) -> None:
        """Continue from the newest step of which every rank finds its files. Collective.

        A rank loads what it saved itself, and what ranks saved that no longer exist, divided among all. A new rank loads a copy
        of another rank's.
        """
        rank, size = hvd.rank(), hvd.size()
        mine: dict[tuple[int, int], list[Path]] = {}
        for _, step, saved in self._files():
            files = [self._file(step, other, saved) for other in (rank % saved, *range(size + rank, saved, size))]
            if all(map(Path.exists, files)):
                mine[step, saved] = files
        everywhere = set.intersection(*map(set, hvd.allgather_object(list(mine))))
        if not everywhere:
            return
        newest = max(everywhere)  # the step, and the number of ranks that saved it
        self.training.steps = self._resumed_at = newest[0]
        state, *others = (torch.load(path, weights_only=True) for path in mine[newest])
        if state["modules"].keys() != self.trainees.keys():
            raise ValueError(f"the checkpoint in {self.folder} has {list(state['modules'])}, not {list(self.trainees)}")
        self.training.elapsed_s = state["elapsed_s"]
        for name, trainee in self.trainees.items():
            trainee.module.load_state_dict(state["modules"][name])
            also = {"also": [other["optimizers"][name] for other in others]} if name == OURS else {}
            trainee.optimizer.load_state_dict(state["optimizers"][name], **also)
            record = state["records"][name]
            trainee.losses, trainee.step_s, self.validations[name] = (
                record[key] for key in ("losses", "step_s", "validations")
            )

    def record(self, name: str) -> Record:
        """Return the history of a model so far. wait_share: of the steps that this process has taken, on this rank."""
        trainee = self.trainees[name]
        own_s = sum(trainee.step_s[self._resumed_at :])
        waited_s = trainee.wait_s() or 0.0
        return Record(trainee.losses, trainee.step_s, self.validations[name], waited_s / own_s if own_s else 0.0)

    def records(self) -> dict[str, Record]:
        """Return all histories at the end, with what is averaged over the ranks or compared between them. Collective."""
        found = {name: self.record(name) for name in self.trainees}
        for name, record in found.items():
            record.wait_share = hvd.allreduce(
                torch.tensor(record.wait_share, dtype=torch.float64), op=hvd.Average
            ).item()
            record.replicas_identical = self.trainees[name].is_identical()
        return found

    def _file(self, step: int, rank: int, size: int) -> Path:
        return self.folder / f"checkpoint.step{step}.rank{rank}of{size}.pt"

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        """Yield each file of a checkpoint, complete or not, with its step and the number of ranks. Other files in the folder are
        the user's, or of an earlier version."""
        for path in self.folder.glob("checkpoint.step*"):
            if found := _FILE.fullmatch(path.name):
                yield path, int(found[1]), int(found[2])


def main(arguments: Sequence[str]) -> int:
    """Train to the end; return the exit status: 1 if replicas differ, INTERRUPTED after SIGINT, 2 if what is given does not fit
    together, or 0."""
    chosen = parse_arguments(arguments)
    join_ranks(chosen.device)
    try:
        return train(chosen)
    finally:
        hvd.shutdown()


def train(chosen: argparse.Namespace) -> int:
    share_cores()
    device = choose_device(chosen.device)
    try:
        workload = workload_of(chosen)
        trainees = {OURS: strategies.ours(workload.build().to(device), compression=chosen.compression)}
    except ValueError as error:
        print(f"bench train: {error}", file=sys.stderr)
        return 2
    if chosen.compare:
        trainees[DDP] = strategies.ddp(workload.build().to(device))
    training = Training(workload, list(trainees.values()), chosen.steps, chosen.seconds)
    run = Run(workload, trainees, training, chosen.out)
    if chosen.resume:
        run.resume()
    if hvd.rank() == 0:
        millions = sum(parameter.numel() for parameter in trainees[OURS].module.parameters()) / 1e6
        start = f"resumed at step {training.steps}" if training.steps else "from scratch"
        ranks = count(hvd.size(), "rank")
        print(f"{workload.title}: {millions:.2f} M parameters, {ranks}, {device}, {start}", flush=True)
    stop = False
    with interruption() as arrived, progress(hvd.rank(), workload) as show:
        for _ in training.blocks(chosen.checkpoint_every):
            interrupted = torch.tensor(float(arrived()), dtype=torch.float64, device=device)
            stop = float(hvd.allreduce(interrupted, op=hvd.Sum)) > 0
            if stop or training.fraction() >= 1 or training.steps % chosen.checkpoint_every == 0:
                run.validate_and_save()
            show(training.fraction(), run.record(OURS))
            if stop:
                break
    records = run.records()
    if hvd.rank() == 0:
        publish(chosen.out, workload, hvd.size(), records)
    if not all(record.replicas_identical for record in records.values()):
        return 1
    return INTERRUPTED if stop else 0
