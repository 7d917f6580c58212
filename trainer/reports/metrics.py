"""The metrics of a step, and the other reports of a DistributedOptimizer after it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.collectives import Communicator, PeerJoined
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.diagnostics.timeline import now_ns
from gradwire.collectives.environment import report_folder
from gradwire.trainer.reducer.bucket import Bucket
from gradwire.trainer.reducer.replicas import ReplicaCheck
from gradwire.trainer.reports.steps import StepRecord, StepRecorder, journal_line, open_journal
from gradwire.trainer.reports.stragglers import Stragglers, StragglerWatch
from gradwire.trainer.rules.rule import Rule

#: How many steps are between two computations of compression_error, which read all residuals and gradients.
_ERROR_EVERY = 10


@dataclass(frozen=True)
class BucketChoice:
    """Describes how the next step exchanges a bucket of gradients; during the warm-up of a codec, the first step after it.

    nbytes: the uncompressed bytes. algorithm: "auto" with PowerSGD, which runs several sums.
    codec: "none" without one."""

    nbytes: int
    algorithm: str
    codec: str


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a step on this rank, with which on_step is called.

    step: the number of steps so far, this one included.
    seconds: the time since the end of the previous step, or for the first, since the optimizer was made.
    wait_s: for how many of these seconds the host waited for the exchange, in backward(), step() and synchronize().
    exchange_s: the seconds from the start of the first bucket's exchange to the end of the last one's, including
    backward() in between; None without an exchange, and with a rule other than the default and rules.Sharded. On a GPU, that of
    the step before, whose end is known.
    bytes_sent, bytes_uncompressed: as in ExchangeStats, but of this step only.
    busbw_gb_s: 2(p-1)/p times the bytes of the gradients, divided by exchange_s, with p ranks, in 1e9 bytes per second; (p-1)/p
    times the bytes of gradients that are reduce-scattered, that is, with rules.Sharded and without a codec. None if exchange_s
    is None.
    buckets: how the next step exchanges each bucket.
    compression_error: in every tenth step, the norm of the residuals of this rank's gradients, divided by the norm of the
    exchanged gradients of the same buckets; None in other steps, and without error feedback.
    slowest_rank: the rank that made the others wait longest; None if unknown (see DistributedOptimizer.stragglers).
    """

    step: int
    seconds: float
    wait_s: float
    exchange_s: float | None
    bytes_sent: int
    bytes_uncompressed: int
    busbw_gb_s: float | None
    buckets: tuple[BucketChoice, ...]
    compression_error: float | None
    slowest_rank: int | None


@dataclass(frozen=True)
class WantedReports:
    """The reports that a DistributedOptimizer must make. Raises TypeError and ValueError for invalid arguments.

    on_step: called with a StepMetrics after each step. check_replicas_every: steps, 0 for only before the first one, None for
    never. straggler_report_every: exchanges.
    """

    on_step: Callable[[StepMetrics], object] | None = None
    check_replicas_every: int | None = 0
    straggler_report_every: int = 100

    def __post_init__(self) -> None:
        if self.on_step is not None and not callable(self.on_step):
            raise TypeError(f"on_step must be a function of a StepMetrics, or None, not {self.on_step!r}")
        for name, least in (("check_replicas_every", 0), ("straggler_report_every", 1)):
            value = getattr(self, name)
            if value is None and name == "check_replicas_every":
                continue
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, not {value!r}")


class Reports:
    """Makes the wanted reports. all_names: returns the optimizer's parameters with their names. compared_on: the
    Communicator for the check of replicas. On the rule's Communicator, a joined rank would take the check for an
    exchange. step: the number of steps so far."""

    def __init__(
        self, rule: Rule, wanted: WantedReports, all_names: Callable[[], dict[Tensor, str]], compared_on: Communicator
    ) -> None:
        self.step = 0
        self._rule = rule
        self._communicator = rule.communicator
        self._on_step = wanted.on_step
        self._began_ns = 0
        self._stragglers: StragglerWatch | None = None
        if rule.times is not None and self._communicator.size > 1:
            self._stragglers = StragglerWatch(
                self._communicator, rule.times, wanted.straggler_report_every, lambda: rule.weighs
            )
        folder = report_folder(os.environ)
        self._journal = None if folder is None else open_journal(folder, rule)
        # Nobody else needs the record of a step: stragglers are found by exchanges, of which a step may have several.
        self._recorder = StepRecorder(rule) if self._on_step is not None or self._journal is not None else None
        self._check: ReplicaCheck | None = None
        self._check_every = wanted.check_replicas_every
        if (self._check_every or (self._check_every == 0 and rule.starts_equal)) and compared_on.size > 1:
            optimizer = rule.setup.optimizer
            self._check = ReplicaCheck(compared_on, optimizer, all_names, with_state=rule.shares_state)
        self._compares_start = self._check is not None and rule.starts_equal

    def compare_start(self, synchronize: Callable[[], None] | None) -> None:
        """Compare replicas, once, before the first step. Arguments and errors: see before_step()."""
        if self._compares_start:
            self._compares_start = False
            if self.step == 0:
                if synchronize is not None:
                    synchronize()
                self._compare(0)

    def before_step(self, synchronize: Callable[[], None] | None) -> None:
        """Note that the wrapped optimizer begins its step. Collective before the first step if replicas are compared. Raises
        ReplicasDiffer on all ranks if they differ. synchronize: exchanges gradients before the comparison, since another rank may
        wait in its backward() for those of this one; None with a closure, which calls backward() later."""
        if self._compares_start:
            self.compare_start(synchronize)
        self._began_ns = now_ns()

    def after_step(self) -> None:
        """Make the reports of a step. Collective if replicas are compared. Raises ReplicasDiffer on all ranks if they
        differ, and the exceptions of on_step."""
        self.step += 1
        if self._communicator.timeline is not None and (lane := self._communicator.lane("training")) is not None:
            lane.span("step", self._began_ns, step=self.step)
        if self._stragglers is not None:
            self._stragglers.after_step()
        compares = bool(self._check and self._check_every and self.step % self._check_every == 0)
        reads_residuals = self._on_step is not None and self.step % _ERROR_EVERY == 0
        if reads_residuals or compares:
            self._rule.settle()
        metrics = None if self._recorder is None else self._read(self._recorder.record())
        if compares:
            self._compare(self.step)
        if self._on_step is not None and metrics is not None:
            self._on_step(metrics)

    def _compare(self, step: int) -> None:
        assert self._check is not None
        with suppress(PeerJoined):  # a joined rank holds an older model, until join() updates it
            self._check.compare(step)

    def stragglers(self) -> Stragglers | None:
        """Return the report of stragglers; None before all ranks have posted their waits."""
        return None if self._stragglers is None else self._stragglers.report()

    def _read(self, record: StepRecord) -> StepMetrics | None:
        """Write the record of a step to the journal, if there is one, and return its metrics if they are wanted."""
        if self._journal is not None:
            self._journal.append(journal_line(record))
        if self._on_step is None:
            return None
        buckets, stragglers, size = self._rule.buckets, self.stragglers(), self._communicator.size
        exchange_s = sum(each.exchange_ns for each in record.exchanges) / 1e9 if record.exchanges else None
        on_bus = sum(_halves(bucket) * bucket.buffer.values.nbytes for bucket in buckets) * (size - 1) / size
        return StepMetrics(
            step=self.step,
            seconds=record.seconds,
            wait_s=record.wait_s,
            exchange_s=exchange_s,
            bytes_sent=record.bytes_sent,
            bytes_uncompressed=record.bytes_uncompressed,
            busbw_gb_s=on_bus * len(record.exchanges) / exchange_s / 1e9 if exchange_s else None,
            buckets=tuple(_choice(self._communicator, bucket) for bucket in buckets),
            compression_error=_compression_error(buckets) if self.step % _ERROR_EVERY == 0 else None,
            slowest_rank=None if stragglers is None else stragglers.slowest,
        )


def _halves(bucket: Bucket) -> int:
    """Return how many of the halves of an allreduce exchange a bucket: with shares and without codes, the reduce-scatter."""
    return 1 if bucket.shares and bucket.coded is None else 2


def _choice(communicator: Communicator, bucket: Bucket) -> BucketChoice:
    """Return how a bucket is exchanged after its warm-up."""
    values, codec = bucket.buffer.values, bucket.buffer.codec
    if isinstance(codec, Codec):
        algorithm = communicator.chosen("allreduce", 4 * values.numel(), codec)
    else:  # a matrix codec exchanges several sums of different sizes
        device = values.device.type
        algorithm = "auto" if codec is not None else communicator.chosen("allreduce", values.nbytes, device=device)
    return BucketChoice(values.nbytes, algorithm, "none" if codec is None else codec.name)


@torch.no_grad()
def _compression_error(buckets: Sequence[Bucket]) -> float | None:
    """Return the norm of the residuals over the norm of the gradients, in buckets with error feedback."""
    lost = exchanged = 0.0
    for bucket in buckets:
        if bucket.coded is not None and (residual := bucket.coded.tensors().get("worker")) is not None:
            lost += float(residual.norm()) ** 2
            exchanged += float(bucket.coded.values.norm(dtype=torch.float32)) ** 2
    return math.sqrt(lost / exchanged) if exchanged else None
