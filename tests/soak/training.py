"""What a rank does in a world that trains until one of its ranks fails, and what it reports."""

from __future__ import annotations

import functools
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
from tests.soak.exchange import digest
from tests.soak.faults import EXIT_CODES, EXITS, KILLED, RAISES
from tests.soak.habits import HABITS
from tests.soak.ranks import Life, failed_at_file, leave
from tests.soak.rules import (
    BACKWARD,
    BEFORE,
    BETWEEN,
    EXCHANGE,
    FRAGMENT,
    HOGWILD,
    KEYS,
    LOCAL,
    SAVING,
    SYNCHRONOUS,
    WARMUP,
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
    life = Life(directory, fault.everyone)
    life.note("joining")
    hvd.init(timeout_s=fault.timeout_s)
    model = network(700)
    optimizer = _optimizer(fault, model)
    meet("trains")  # all have theirs, so that none is lost in the making
    victim = _Victim(fault, model, life) if life.rank == fault.victim else None
    with life.witnessing():
        try:
            _train(fault, model, optimizer, victim, life)
        except (PlantedError, SystemExit) as error:
            _end(error)
    if fault.survivors_close or fault.is_outlived:
        life.note("closing")
        optimizer.close()
        hvd.shutdown()
    life.end(fault.reporting)


class _Victim:
    """Fails, when its moment has come."""

    def __init__(self, fault: TrainingFault, model: nn.Module, life: Life) -> None:
        self._fault, self._model, self._life = fault, model, life

    def prepare(self) -> None:
        """Do what is due before the step of the fault: fail, or see to it that this happens in its course."""
        moment = self._fault.moment
        if moment == BEFORE:
            self.fail()
        elif moment == BACKWARD:
            hidden = self._model.get_submodule("1")
            hidden.register_full_backward_hook(lambda *_: self.fail())
        elif moment in (EXCHANGE, WARMUP):
            threading.Timer(self._fault.after_s, self.fail).start()

    def finish(self) -> None:
        """Do what is due after that step."""
        if self._fault.moment == BETWEEN:
            time.sleep(self._fault.after_s)
            self.fail()
        elif self._fault.moment == FRAGMENT:
            threading.Timer(self._fault.after_s, self.fail).start()

    def fail(self) -> None:
        kind = self._fault.kind
        self._life.fail()
        if kind == RAISES:
            raise PlantedError("planted")
        if kind == EXITS:
            sys.exit(EXIT_CODES[EXITS])
        os.kill(os.getpid(), signal.SIGKILL if kind == KILLED else signal.SIGSTOP)


def _train(fault: TrainingFault, model: nn.Module, optimizer: Any, victim: _Victim | None, life: Life) -> None:
    """Train step by step."""
    last: int | None = None
    habit = HABITS[fault.rule.habit](model, optimizer)
    until = time.monotonic() + ON_S
    for step in count():
        life.wait()
        if step == last:
            if not all(parameter.isfinite().all() for parameter in model.parameters()):
                life.report.wrong.append("parameters are not finite")
            return
        if life.waited_since > until:
            life.report.wrong.append(f"nothing was told of the fault in {ON_S:g} s of training")
            return
        life.note(f"step {step}")
        if fault.moment == SAVING and step == fault.step:
            state = optimizer.state_dict()
            if victim is not None:
                victim.fail()
            optimizer.load_state_dict(state)
        if victim is not None and step == fault.step:
            victim.prepare()
        habit.before()
        for part in range(fault.rule.options.get("backward_passes_per_step", 1)):
            loss_of(model, batch_of(2 * step + part, life.rank)).backward()
        habit.between()
        life.note(f"step {step}: stepping")
        optimizer.step()
        life.report.done += 1
        if fault.rule.exchanges_after(step, fault.size):
            life.report.digests[step] = digest([parameter.detach() for parameter in model.parameters()])
        if victim is not None and step == fault.step:
            victim.finish()
        elif victim is None and fault.is_outlived and last is None and step >= fault.step:
            life.note(f"step {step}: asking who is lost")
            if (lost := _lost(fault, optimizer, failed_at_file(life.directory))) == (fault.victim,):
                last = step + 1 + STEPS_WITHOUT
            elif lost:
                life.report.wrong.append(f"lost {lost}, not rank {fault.victim} alone")


def _lost(fault: TrainingFault, optimizer: Any, failed_at: Path) -> tuple[int, ...]:
    """Return who is lost, as far as the optimizer knows. Hogwild knows of nobody: there, whether the victim has failed."""
    if fault.rule.name == HOGWILD:
        return (fault.victim,) if failed_at.exists() else ()
    lost: tuple[int, ...] = optimizer.report().lost
    return lost


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
        bucket_bytes = options.pop("bucket_bytes")
        return hvd.DistributedOptimizer(inner, bucket_bytes=bucket_bytes, rule=hvd.rules.LocalUpdates(**options))
    if rule.name == KEYS:
        return _Keys(model, **options)
    return (hvd.servers.Hogwild if rule.name == HOGWILD else hvd.servers.ParameterServer)(inner, **options)


class _Keys:
    """Trains a model whose parameters are the values of a KVStore, with the methods of an optimizer."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._values = dict(model.named_parameters())
        self._store = hvd.servers.KVStore(**options)
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
