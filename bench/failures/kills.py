"""Who is killed, and when: ranks, and every third time a whole host."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.failures.ways import processes_of, ranks_of


@dataclass(frozen=True)
class Kill:
    """at_s: seconds since the run began. of_host: whether a whole host was killed. of_rank_0: whether rank 0 was among those."""

    at_s: float
    of_host: bool
    of_rank_0: bool


class Killer:
    """Kills a rank of those that train for a log, drawn at random, or every third time a host, where there are several.

    networks: the namespace of each host, by number.
    """

    def __init__(self, seed: int, log: Path, networks: Sequence[str]) -> None:
        self.kills: list[Kill] = []
        self._random = random.Random(seed)
        self._log, self._networks = log, networks
        self._began = time.time()

    def __call__(self) -> int | None:
        """Kill; return the number of the host that was lost, if one was. Nothing happens while no rank runs."""
        host = None
        if self._networks and len(self.kills) % 3 == 2:
            host = self._random.randrange(len(self._networks))
            killed = processes_of(self._log, self._networks[host])
        elif ranks := ranks_of(self._log):
            killed = [self._random.choice(ranks)]
        else:
            return None
        self.kills.append(Kill(time.time() - self._began, host is not None, self._rank_0() in killed))
        for process in killed:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return host

    def _rank_0(self) -> int | None:
        """Return the process that has logged the last step, which rank 0 does."""
        with suppress(OSError):
            for line in reversed(self._log.read_text().splitlines()):
                with suppress(json.JSONDecodeError):  # of a rank that was killed while it wrote
                    process: int = json.loads(line)["process"]
                    return process
        return None
