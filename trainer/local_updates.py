"""LocalUpdates: a torch optimizer whose ranks step alone, and average their pseudo-gradients every so many steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.trainer import rules
from gradwire.trainer.optimizer import DistributedOptimizer
from gradwire.trainer.reducer.compression import Compression, Compressor
from gradwire.trainer.reducer.traffic import ExchangeStats
from gradwire.trainer.rules.local_steps import LocalSteps
from gradwire.trainer.world.process_sets import ProcessSetLike, global_process_set


@dataclass(frozen=True)
class LocalReport:
    """The costs of local updates on this rank.

    steps: the number of steps of the optimizer, including those before a checkpoint that was loaded.
    warmup_bytes_per_step: bytes of gradients, per step of the warm-up.
    bytes_per_step: bytes of pseudo-gradients, per step after the warm-up.
    inner_bytes_per_step: bytes of gradients to inner ranks, per step after the warm-up.
    bytes_sent: all bytes that this rank has sent since the optimizer was made.
    bytes_saved: a ratio: the bytes of the pseudo-gradients without compression, divided by those that this rank has sent.
    wait_share: the time that this rank has waited for others, divided by the time since the optimizer was made.
    batch_per_rank: the batch size of this rank, as given to report(). global_batch: batch_per_rank times the number of ranks.
    """

    steps: int
    warmup_bytes_per_step: float
    bytes_per_step: float
    inner_bytes_per_step: float
    bytes_sent: int
    bytes_saved: float
    wait_share: float
    batch_per_rank: int | None
    global_batch: int | None

    def __str__(self) -> str:
        warmup, inner, batches = "", "", ""
        saved = "uncompressed" if self.bytes_saved == 1 else f"{self.bytes_saved:.1f} times fewer than uncompressed"
        if self.warmup_bytes_per_step:
            warmup = f"{self.warmup_bytes_per_step / 1e3:.1f} KB a step of the warm-up, then "
        if self.inner_bytes_per_step:
            inner = f", and {self.inner_bytes_per_step / 1e3:.1f} KB to inner ranks"
        if self.batch_per_rank is not None:
            batches = f"; a batch of {self.batch_per_rank} a rank, {self.global_batch} in all"
        return (
            f"{self.steps} steps: {warmup}{self.bytes_per_step / 1e3:.1f} KB a step, {saved}{inner}; "
            f"{self.bytes_sent / 1e6:.3f} MB in all; {self.wait_share:.1%} of the time waiting{batches}"
        )


class LocalUpdates(DistributedOptimizer):
    """Wraps an optimizer so that every rank steps alone, and the ranks exchange the changes of their parameters once in
    `every` steps.

    In the first `warmup_steps` steps, gradients are averaged, as by DistributedOptimizer. After that, only the ranks of the
    same `inner` set exchange gradients. Once in `every` steps, all ranks average their *pseudo-gradients*, that is, the
    parameters at the last exchange minus the parameters now. The outer optimizer applies the average to the *common
    parameters*, a copy that is equal on all ranks. With an outer Nesterov SGD of rate 0.7 and momentum 0.9 this is DiLoCo
    (Douillard et al. 2023); with outer=None the parameters are averaged. docs/guides/local-updates.md is the guide.

    Replicas must start equal (broadcast_parameters before the first step). Right after an exchange, they are equal again,
    or with several fragments or a delay, nearly equal. Validate, and end training, when a multiple of `every` steps
    has followed the warm-up. After each exchange the ranks compare hashes of the common parameters and of the outer optimizer's
    state. If the hashes differ, all ranks raise ReplicasDiffer.

    optimizer, named_parameters, process_set, backward_passes_per_step, bucket_bytes: as in DistributedOptimizer.
    every, outer, warmup_steps, policy, fragments, delay, alpha, inner: as in rules.LocalUpdates. codec: its `compression`.
    warmup_codec: the compression of gradients in the warm-up, and among inner ranks. The codecs are not "auto".

    Every rank saves its own state_dict() and parameters. On the same number of ranks, training resumes bit for bit. On
    another number, every rank loads the state_dict() and parameters of any rank, and the residuals are redistributed as by
    DistributedOptimizer. load_state_dict() is collective, and raises ValueError on all ranks, with nothing loaded, if any
    of them cannot load its state.

    The constructor is collective. Raises ValueError or TypeError for invalid arguments.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        *,
        every: int,
        outer: torch.optim.Optimizer | None = None,
        warmup_steps: int = 0,
        warmup_codec: Compressor = Compression.none,
        codec: Compressor = Compression.none,
        policy: Mapping[str, Compressor] | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.5,
        inner: ProcessSetLike = None,
        backward_passes_per_step: int = 1,
        process_set: ProcessSetLike = global_process_set,
        bucket_bytes: int | None = None,
    ) -> None:
        rule = rules.LocalUpdates(every, outer, warmup_steps, codec, policy, fragments, delay, alpha, inner)
        self._began = time.perf_counter()
        super().__init__(
            optimizer,
            named_parameters,
            warmup_codec,
            backward_passes_per_step,
            process_set=process_set,
            bucket_bytes=bucket_bytes,
            rule=rule,
        )

    def report(self, batch_per_rank: int | None = None) -> LocalReport:
        """Return the costs of local updates so far. batch_per_rank: this rank's batch size, for the report."""
        steps, warmup_steps, steps_alone = self.steps, 0, 0
        warmup = moved = inner = ExchangeStats()
        if isinstance(self._rule, LocalSteps):  # not on a rank outside of the process set
            steps, warmup_steps, steps_alone = self._rule.step, self._rule.warmup_taken, self._rule.alone_taken
            warmup, moved, inner = self._rule.sent
        return LocalReport(
            steps=steps,
            warmup_bytes_per_step=warmup.bytes_sent / max(1, warmup_steps),
            bytes_per_step=moved.bytes_sent / max(1, steps_alone),
            inner_bytes_per_step=inner.bytes_sent / max(1, steps_alone),
            bytes_sent=self.stats.bytes_sent,
            bytes_saved=moved.ratio,
            wait_share=self.communication_wait_s / (time.perf_counter() - self._began),
            batch_per_rank=batch_per_rank,
            global_batch=None if batch_per_rank is None else batch_per_rank * self.communicator.size,
        )
