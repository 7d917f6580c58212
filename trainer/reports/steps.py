"""The record of a step, which the reports are made of, and its line in the files of `gradwire report`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from gradwire.collectives.diagnostics.journal import STEPS, Journal
from gradwire.trainer.reducer.times import ExchangeTime
from gradwire.trainer.rules.rule import Rule
from gradwire.trainer.world.generations import restarts


@dataclass(frozen=True)
class StepRecord:
    """What this rank did from the end of the previous step to the end of this one. It is made once, when a step ends.

    seconds: the time of the step. wait_s: how many of these seconds the rank waited for the exchange. bytes_sent,
    bytes_uncompressed: as in ExchangeStats. exchanges: the times of the exchanges of gradients, the last one first; empty
    without exchanges, and with a rule that has no `times`.
    """

    seconds: float
    wait_s: float
    bytes_sent: int
    bytes_uncompressed: int
    exchanges: tuple[ExchangeTime, ...]


class StepRecorder:
    """Makes the record of each step from the counters of a rule."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._ended_s, self._wait_s, self._stats, self._exchanged = time.perf_counter(), rule.wait_s, rule.stats, -1

    def record(self) -> StepRecord:
        """Return the record of the step that ends."""
        now_s, wait_s, stats = time.perf_counter(), self._rule.wait_s, self._rule.stats
        latest = reversed(self._rule.times.last) if self._rule.times is not None else ()
        made = StepRecord(
            now_s - self._ended_s,
            wait_s - self._wait_s,
            stats.bytes_sent - self._stats.bytes_sent,
            stats.bytes_uncompressed - self._stats.bytes_uncompressed,
            tuple(takewhile(lambda each: each.number > self._exchanged, latest)),
        )
        self._ended_s, self._wait_s, self._stats = now_s, wait_s, stats
        if made.exchanges:
            self._exchanged = made.exchanges[0].number
        return made


def open_journal(folder: Path, rule: Rule) -> Journal:
    """Return a new file of an optimizer's steps on this rank. Its header has this rank, the ranks of the exchange, the number of
    the generation (see restarts()) as "world", and the time at which the optimizer was made, in seconds since 1970."""
    communicator = rule.communicator
    ranks = communicator.global_ranks or range(communicator.size)
    number, made = restarts(os.environ), time.time()
    return Journal(folder, STEPS, {"rank": communicator.global_rank, "ranks": [*ranks], "world": number, "made": made})


def journal_line(step: StepRecord) -> list[float]:
    """Return six numbers: the seconds since the previous step; how many of them this rank waited for the exchange; the bytes
    sent; the bytes without compression; the number of the last exchange, or -1 without one; and the seconds from this rank's
    last gradient to the end of that exchange."""
    number, waited_ns = (step.exchanges[0].number, step.exchanges[0].waited_ns) if step.exchanges else (-1, 0)
    return [step.seconds, step.wait_s, step.bytes_sent, step.bytes_uncompressed, number, waited_ns / 1e9]
