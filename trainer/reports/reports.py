"""All that one DistributedOptimizer tells of itself after a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.collectives import Communicator, PeerJoined
from gradwire.collectives.diagnostics.timeline import now_ns
from gradwire.trainer.gradients.bucket import Bucket
from gradwire.trainer.gradients.combination import Combination
from gradwire.trainer.gradients.replicas import ReplicaCheck
from gradwire.trainer.reports.metrics import ERROR_EVERY, BucketChoice, StepMetrics, choices, compression_error
from gradwire.trainer.reports.stragglers import Stragglers, StragglerWatch
from gradwire.trainer.rules.rule import Rule
from gradwire.trainer.world.world import here


@dataclass(frozen=True)
class Wanted:
    """Holds what a DistributedOptimizer was asked to tell. Raises TypeError and ValueError for what cannot be meant.

    on_step: called with a StepMetrics after each step. check_replicas_every: steps, 0 for never. straggler_report_every:
    exchanges.
    """

    on_step: Callable[[StepMetrics], object] | None = None
    check_replicas_every: int = 0
    straggler_report_every: int = 100

    def __post_init__(self) -> None:
        if self.on_step is not None and not callable(self.on_step):
            raise TypeError(f"{here()}on_step must be a function of a StepMetrics, or None, not {self.on_step!r}")
        for name, least in (("check_replicas_every", 0), ("straggler_report_every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{here()}{name} must be a whole number >= {least}, not {value!r}")


class Reports:
    """Tells what is wanted. all_names: returns the optimizer's parameters with their names. compared_on: connects the ranks
    for the check of replicas; not the combination's Communicator, where a rank that has joined takes it for an exchange."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        combination: Combination,
        rule: Rule,
        all_names: Callable[[], dict[Tensor, str]],
        wanted: Wanted,
        compared_on: Communicator,
    ) -> None:
        self._combination = combination
        self._communicator = combination.communicator
        self._rule = rule
        self._on_step = wanted.on_step
        self.step = 0
        """How many steps there have been."""
        self._began_ns = 0
        self._ended = time.perf_counter()
        self._wait_s, self._stats, self._exchanged = rule.wait_s, combination.traffic.stats, -1
        self._chosen: tuple[list[Bucket], tuple[BucketChoice, ...]] = ([], ())
        self._stragglers: StragglerWatch | None = None
        if rule.moments is not None and self._communicator.size > 1:
            self._stragglers = StragglerWatch(self._communicator, rule.moments, wanted.straggler_report_every)
        self._check: ReplicaCheck | None = None
        if wanted.check_replicas_every:
            every = wanted.check_replicas_every
            self._check = ReplicaCheck(compared_on, optimizer, all_names, every, with_state=rule.shares_state)

    def before_step(self) -> None:
        """Take note that the wrapped optimizer steps."""
        if self._communicator.timeline is not None:
            self._began_ns = now_ns()

    def after_step(self) -> None:
        """Tell what is to be told of the step. With a check of replicas that is due, collective. Raises ReplicasDiffer on all
        ranks alike, and what on_step raises."""
        self.step += 1
        lane = self._communicator.lane("training")
        if lane is not None and self._began_ns:
            lane.span("step", self._began_ns, step=self.step)
        self._began_ns = 0
        if self._stragglers is not None:
            self._stragglers.after_step()
        metrics = self._metrics() if self._on_step is not None else None
        if self._check is not None:
            with suppress(PeerJoined):  # who has joined holds an older model, until join() brings it up to date
                self._check.after_step(self.step)
        if self._on_step is not None and metrics is not None:
            self._on_step(metrics)

    def stragglers(self) -> Stragglers | None:
        """Return who made whom wait, as far as is known."""
        return None if self._stragglers is None else self._stragglers.report()

    def _metrics(self) -> StepMetrics:
        """Return what there is to say since the last step."""
        now, wait_s, stats = time.perf_counter(), self._rule.wait_s, self._combination.traffic.stats
        buckets = list(self._rule.buckets)
        if buckets != self._chosen[0]:
            self._chosen = buckets, choices(self._communicator, buckets)
        moments = self._rule.moments.last if self._rule.moments is not None else ()
        exchanges = [moment for moment in moments if moment.number > self._exchanged]
        exchange_s = sum(moment.exchange_ns for moment in exchanges) / 1e9 if exchanges else None
        size = self._communicator.size
        on_bus = 2 * (size - 1) / size * sum(bucket.buffer.values.nbytes for bucket in buckets) * len(exchanges)
        metrics = StepMetrics(
            step=self.step,
            seconds=now - self._ended,
            wait_s=wait_s - self._wait_s,
            exchange_s=exchange_s,
            bytes_sent=stats.bytes_sent - self._stats.bytes_sent,
            bytes_uncompressed=stats.bytes_uncompressed - self._stats.bytes_uncompressed,
            busbw_gb_s=on_bus / exchange_s / 1e9 if exchange_s else None,
            buckets=self._chosen[1],
            compression_error=compression_error(buckets) if self.step % ERROR_EVERY == 0 else None,
            slowest_rank=None if self._stragglers is None else self._stragglers.slowest(),
        )
        self._ended, self._wait_s, self._stats = now, wait_s, stats
        self._exchanged = max((moment.number for moment in exchanges), default=self._exchanged)
        return metrics
