"""The steps of one optimizer on one rank, as `gradwire report` reads them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gradwire.collectives.diagnostics.journal import STEPS, Journal
from gradwire.trainer.rules.rule import Rule
from gradwire.trainer.world.epochs import restarts


class StepJournal:
    """Writes a line of six numbers for each step: the seconds since the previous step; how many of them it waited for
    the exchange; the bytes sent; the bytes without compression; the number of the exchange, or -1 without one; and the
    seconds from this rank's last gradient to the end of the exchange.

    The header has this rank, the ranks of the exchange, the number of the world (see restarts()), and the time at which
    the optimizer was made, in seconds since 1970.
    """

    def __init__(self, folder: Path, rule: Rule) -> None:
        communicator = rule.communicator
        ranks = communicator.global_ranks or range(communicator.size)
        header = {
            "rank": communicator.global_rank,
            "ranks": [*ranks],
            "world": restarts(os.environ),
            "made": time.time(),
        }
        self._journal = Journal(folder, STEPS, header)
        self._rule = rule
        self._ended_s, self._wait_s, self._stats, self._exchanged = time.perf_counter(), rule.wait_s, rule.stats, -1

    def after_step(self) -> None:
        """Write the line of the step that ends."""
        now_s, wait_s, stats = time.perf_counter(), self._rule.wait_s, self._rule.stats
        moments = self._rule.moments.last if self._rule.moments is not None else ()
        number, waited_s = (moments[-1].number, moments[-1].waited_ns / 1e9) if moments else (-1, 0.0)
        if number == self._exchanged:
            number, waited_s = -1, 0.0
        sent = stats.bytes_sent - self._stats.bytes_sent
        uncompressed = stats.bytes_uncompressed - self._stats.bytes_uncompressed
        self._journal.append([now_s - self._ended_s, wait_s - self._wait_s, sent, uncompressed, number, waited_s])
        self._ended_s, self._wait_s, self._stats = now_s, wait_s, stats
        self._exchanged = max(self._exchanged, number)
