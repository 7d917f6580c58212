"""What a rank does in a world that trains until one of its ranks fails, and what it reports."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import sys
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

import gradwire as hvd
from tests.harness import meet
from tests.ranks.training import batch_of, loss_of, network
from tests.soak.faults import EXIT_CODES, EXITS, KILLED, RAISES
from tests.soak.ranks import (
    Diary,
    Report,
    Witness,
    diary_file,
    failed_at_file,
    leave,
    report_file,
    wait_for_reports,
    write,
)
from tests.soak.rules import (
    BACKWARD,
    BEFORE,
    BETWEEN,
    BY_A_TIMER,
    FRAGMENT,
    HOGWILD,
    KEYS,
    LOCAL,
    SAVING,
    SYNCHRONOUS,
    TrainingFault,
)

LR = 0.002  # at which four ranks that add up their steps, as those of Hogwild do, do not diverge
ON_S = 60.0  # for which ranks train on at most
STEPS_WITHOUT = 5  # that survivors take once the victim is known to be lost


class PlantedError(Exception):
    """Stands for what a victim raises."""


def train(fault: TrainingFault, directory: Path) -> NoReturn:
    """Train until the fault, and on until an error tells of it, or the report that the others go on; then report, wait for
    the others, and leave."""
    rank, report = dist.get_rank(), Report()
    diary = Diary(diary_file(directory, rank))
    diary.note("joining")
    hvd.init(timeout_s=fault.timeout_s)
    model = network(700)
    optimizer = _optimizer(fault, model)
    meet("trains")  # all have theirs, so that none is lost in the making
    victim = _Victim(fault, model, directory) if rank == fault.victim else None
    waited_since = [time.monotonic()]
    try:
        _train(fault, model, optimizer, victim, report, diary, waited_since, failed_at_file(directory))
    except (PlantedError, SystemExit) as error:
        _end(error)
    except Exception as error:
        report.witness = Witness.of(error, tuple(range(fault.size)), waited_since[0])
        report.during = diary_file(directory, rank).read_text().strip()
    if fault.survivors_close or fault.is_outlived:
        diary.note("closing")
        optimizer.close()
        hvd.shutdown()
    write(report_file(directory, rank), report)
    diary.note("waiting for the others to report")
    wait_for_reports(directory, fault.reporting)
    diary.note("leaving")
    leave()


class _Victim:
    """Fails, when its moment has come."""

    def __init__(self, fault: TrainingFault, model: nn.Module, directory: Path) -> None:
        self._fault, self._model, self._directory = fault, model, directory

    def prepare(self, step: int) -> None:
        """Do what is due before a step: fail, or see to it that this happens in its course."""
        fault = self._fault
        if step != fault.step:
            return
        if fault.moment == BEFORE:
            self.fail()
        elif fault.moment == BACKWARD:
            hidden = self._model.get_submodule("1")
            hidden.register_full_backward_hook(lambda *_: self.fail())
        elif fault.moment in BY_A_TIMER and fault.moment != FRAGMENT:
            threading.Timer(fault.after_s, self.fail).start()

    def finish(self, step: int) -> None:
        """Do what is due after a step."""
        if step == self._fault.step and self._fault.moment == BETWEEN:
            time.sleep(self._fault.after_s)
            self.fail()
        elif step == self._fault.step and self._fault.moment == FRAGMENT:
            threading.Timer(self._fault.after_s, self.fail).start()

    def fail(self) -> None:
        kind = self._fault.kind
        failed_at_file(self._directory).write_text(str(time.monotonic()))
        if kind == RAISES:
            raise PlantedError("planted")
        if kind == EXITS:
            sys.exit(EXIT_CODES[EXITS])
        os.kill(os.getpid(), signal.SIGKILL if kind == KILLED else signal.SIGSTOP)


def _train(
    fault: TrainingFault,
    model: nn.Module,
    optimizer: Any,
    victim: _Victim | None,
    report: Report,
    diary: Diary,
    waited_since: list[float],
    failed_at: Path,
) -> None:
    """Train step by step. waited_since: holds when the present step began. failed_at: a file, as soon as the victim fails."""
    rank = dist.get_rank()
    last: int | None = None
    until = time.monotonic() + ON_S
    for step in count():
        waited_since[0] = time.monotonic()
        if step == last:
            if not all(parameter.isfinite().all() for parameter in model.parameters()):
                report.wrong.append("parameters are not finite")
            return
        if waited_since[0] > until:
            report.wrong.append(f"nothing was told of the fault in {ON_S:g} s of training")
            return
        diary.note(f"step {step}")
        if fault.moment == SAVING and step == fault.step:
            _save_and_load(optimizer, victim, diary)
        if victim is not None:
            victim.prepare(step)
        optimizer.zero_grad()
        for part in range(fault.rule.options.get("backward_passes_per_step", 1)):
            loss_of(model, batch_of(2 * step + part, rank)).backward()
        diary.note(f"step {step}: stepping")
        optimizer.step()
        report.done += 1
        if fault.rule.exchanges_after(step, fault.size):
            report.digests[step] = _digest(model)
        if victim is not None:
            victim.finish(step)
        elif fault.is_outlived and last is None and step >= fault.step:
            diary.note(f"step {step}: asking who is lost")
            if (lost := _lost(fault, optimizer, failed_at)) == (fault.victim,):
                last = step + 1 + STEPS_WITHOUT
            elif lost:
                report.wrong.append(f"lost {lost}, not rank {fault.victim} alone")


def _lost(fault: TrainingFault, optimizer: Any, failed_at: Path) -> tuple[int, ...]:
    """Return who is lost, as far as the optimizer knows. Hogwild knows of nobody: there, whether the victim has failed."""
    if fault.rule.name == HOGWILD:
        return (fault.victim,) if failed_at.exists() else ()
    lost: tuple[int, ...] = optimizer.report().lost
    return lost


def _save_and_load(optimizer: Any, victim: _Victim | None, diary: Diary) -> None:
    diary.note("saving")
    state = optimizer.state_dict()
    if victim is not None:
        victim.fail()
    diary.note("loading")
    optimizer.load_state_dict(state)


def _end(error: BaseException) -> NoReturn:
    """End as a script does that this error ends."""
    if isinstance(error, SystemExit):
        leave(EXIT_CODES[EXITS])
    sys.excepthook(type(error), error, error.__traceback__)
    leave(EXIT_CODES[RAISES])


def _optimizer(fault: TrainingFault, model: nn.Module) -> Any:
    rule, inner = fault.rule, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    options = dict(rule.options)
    if rule.name == SYNCHRONOUS:
        if rule.feedback:
            options["compression"] = hvd.ErrorFeedback(options["compression"])
        return hvd.DistributedOptimizer(inner, **options)
    if rule.name == LOCAL:
        if rule.momentum is not None:
            options["outer"] = torch.optim.SGD(model.parameters(), lr=0.7, momentum=rule.momentum)
        if rule.pairs:
            pairs = [hvd.add_process_set(pair) for pair in ([0, 1], [2, 3])]
            options["inner"] = pairs[dist.get_rank() // 2]
        return hvd.LocalUpdates(inner, **options)
    if rule.name == KEYS:
        return _Keys(model, **options)
    return (hvd.Hogwild if rule.name == HOGWILD else hvd.ParameterServer)(inner, **options)


class _Keys:
    """Trains a model whose parameters are the values of a KVStore, with the methods of an optimizer."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._values = dict(model.named_parameters())
        self._store = hvd.KVStore(**options)
        self._store.init(list(self._values), [value.detach() for value in self._values.values()])
        self._store.set_optimizer(functools.partial(torch.optim.SGD, lr=LR, momentum=0.5))
        self.report = self._store.report
        self.close = self._store.close

    def zero_grad(self) -> None:
        for value in self._values.values():
            value.grad = None

    def step(self) -> None:
        values = list(self._values.values())
        self._store.pushpull(
            list(self._values), [value.grad for value in values], out=[value.detach() for value in values]
        )


def _digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
