"""Kills ranks. With several simulated hosts, every third kill takes a whole host."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradwire.bench.failures.ways import Hosts, processes_of, ranks_of


@dataclass(frozen=True)
class KillRecord:
    """Describes one kill. at_s: seconds since the run began. of_host: whether a whole host was killed. of_rank_0:
    whether rank 0 was killed."""

    at_s: float
    of_host: bool
    of_rank_0: bool


class Killer:
    """Kills a random rank of those that train for a log, or in every third kill a random host, if hosts are simulated.

    A host is cut off from the network before its processes are killed, so that other hosts see no closed connection.
    """

    def __init__(self, seed: int, log: Path, hosts: Hosts) -> None:
        self.kills: list[KillRecord] = []
        self._random = random.Random(seed)
        self._log, self._hosts = log, hosts
        self._began = time.time()

    def __call__(self) -> int | None:
        """Kill a rank or a host. Return the number of the host; None for a rank. Do nothing if no rank runs."""
        ranks, networks = ranks_of(self._log), self._hosts.networks
        if not ranks:
            return None
        rank_0 = self._rank_0()  # before at_s is taken, since reading a long log takes time
        host = self._random.randrange(len(networks)) if networks and len(self.kills) % 3 == 2 else None
        at_s = time.time() - self._began
        if host is None:
            killed = [self._random.choice(ranks)]
        else:
            self._hosts.set_link(host, "down")
            killed = processes_of(self._log, networks[host])
        for process in killed:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.kills.append(KillRecord(at_s, host is not None, rank_0 in killed))
        return host

    def _rank_0(self) -> int | None:
        """Return the ID of the process that logged the last step, which is rank 0; None if there is none."""
        with suppress(OSError):
            for line in reversed(self._log.read_text().splitlines()):
                with suppress(json.JSONDecodeError):  # the rank was killed while it wrote the line
                    process: int = json.loads(line)["process"]
                    return process
        return None
