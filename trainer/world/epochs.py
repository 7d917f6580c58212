"""Epochs of an elastic world: which processes are its ranks, as the launcher decides each time a process is lost or joins.

`gradwire run --min-np` keeps a store. Its processes, the *workers*, have numbers that are never used twice. Each worker writes
there that it is ready, and that it has left an epoch and why; the launcher writes the epochs. Both poll: the store calls nobody.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.collectives.environment import AGENT_STORE
from gradwire.collectives.link.asking import hang_up
from gradwire.collectives.torch_internals import left_to_parent
from gradwire.trainer.world.launch import MASTER_ADDR, MASTER_PORT

WORKER = "GRADWIRE_WORKER"
"""The environment variable that holds a worker's number. Only the agents of an elastic job set it."""

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""The environment variable of torchrun for how often all ranks were started again; here the number of the epoch."""

_PREFIX = "gradwire.elastic"
_LOOK_AGAIN_S = 0.005
#: How long a rank waits once an epoch has begun without it. If the launcher can still reach its agent, the agent ends it sooner.
_LEFT_OUT_S = 30.0


@dataclass(frozen=True)
class Epoch:
    """Says which workers are the ranks of a world. number: counts from 0. workers: their numbers, by rank. nodes: on which
    host each of them is, by rank; hosts count from 0, and their numbers are not used twice either."""

    number: int
    workers: tuple[int, ...]
    nodes: tuple[int, ...]

    def environment(self, worker: int) -> dict[str, str]:
        """Return the variables of torchrun that place a worker in this epoch."""
        rank = self.workers.index(worker)
        beside = [other for other, node in enumerate(self.nodes) if node == self.nodes[rank]]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.workers)),
            "LOCAL_RANK": str(beside.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "GROUP_RANK": str(sorted(set(self.nodes)).index(self.nodes[rank])),
            RESTART_COUNT: str(self.number),
            AGENT_STORE: "True",
        }


@dataclass(frozen=True)
class Departure:
    """Says why a worker has left an epoch. is_update: because the launcher wanted it, between two steps. reason: the error
    otherwise. blamed: the workers that it names as lost."""

    is_update: bool
    reason: str = ""
    blamed: tuple[int, ...] = ()


class Epochs:
    """What launcher and workers write and read. store: the launcher's. Methods raise RuntimeError where the store is gone."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore(_PREFIX, store)

    # What a worker writes, and the launcher reads

    def arrive(self, worker: int) -> None:
        """Note that a worker has loaded its modules, and can become a rank."""
        self._store.set(f"ready/{worker}", "")

    def has_arrived(self, worker: int) -> bool:
        """Return whether a worker has arrived."""
        return bool(self._store.check([f"ready/{worker}"]))

    def leave(self, worker: int, epoch: int, departure: Departure) -> None:
        """Note that a worker has left an epoch, closed its links, and waits for the next."""
        record = {"is_update": departure.is_update, "reason": departure.reason, "blamed": departure.blamed}
        self._store.set(f"left/{epoch}/{worker}", json.dumps(record))

    def departure(self, worker: int, epoch: int) -> Departure | None:
        """Return why a worker has left an epoch; None where it has not."""
        record = self._read(f"left/{epoch}/{worker}")
        return None if record is None else Departure(record["is_update"], record["reason"], tuple(record["blamed"]))

    def resume(self, epoch: int, commit: int) -> None:
        """Note from which commit the ranks of an epoch go on; 0: from none."""
        self._store.set(f"commit/{epoch}", json.dumps(commit))

    def resumed(self, epoch: int) -> int | None:
        """Return what resume() was given for an epoch; None before."""
        commit: int | None = self._read(f"commit/{epoch}")
        return commit

    # What the launcher writes, and workers read

    def limit_wait(self, timeout_s: float) -> None:
        """Note how long the launcher waits for the workers of an epoch, before it ends the job."""
        self._store.set("timeout", json.dumps(timeout_s))

    def longest_wait_s(self) -> float:
        """Return what limit_wait() was given; 0 before."""
        return float(self._read("timeout") or 0)

    def begin(self, epoch: Epoch) -> None:
        """Begin an epoch."""
        self._store.set(f"epoch/{epoch.number}", json.dumps([epoch.workers, epoch.nodes]))
        self._store.set("epoch", json.dumps(epoch.number))

    def current(self) -> Epoch | None:
        """Return the newest epoch; None before the first."""
        number = self._read("epoch")
        if number is None:
            return None
        workers, nodes = self._read(f"epoch/{number}")
        return Epoch(number, tuple(workers), tuple(nodes))

    def lose(self, epoch: int, lost: tuple[int, ...]) -> None:
        """Note all workers that an epoch has lost by now."""
        self._store.set(f"lost/{epoch}", json.dumps(lost))

    def lost(self, epoch: int) -> tuple[int, ...]:
        """Return the workers that an epoch has lost."""
        return tuple(self._read(f"lost/{epoch}") or ())

    def want_update(self, epoch: int) -> None:
        """Ask the ranks of an epoch to leave it after their next commit: other workers are to take part."""
        self._store.set(f"update/{epoch}", "")

    def is_update_wanted(self, epoch: int) -> bool:
        """Return whether want_update() was called for an epoch."""
        return bool(self._store.check([f"update/{epoch}"]))

    def hang_up(self) -> None:
        """End this process's connections to the store: calls that wait there raise RuntimeError."""
        hang_up(self._store)

    def end(self, reason: str) -> None:
        """Note that no epoch follows, and why: workers that wait for one raise it."""
        self._store.set("end", json.dumps(reason))

    def await_epoch(self, worker: int | None, after: int, deadline: float) -> Epoch:
        """Return the first epoch after a number of which a worker is a rank, None for whoever its ranks are; after: the epoch of
        which it was one, -1 for none. deadline: time.monotonic() seconds. Raises TimeoutError, earlier if it was a rank and an
        epoch begins without it, since the launcher has given it up; and RuntimeError if the job has ended."""
        is_left_out = False
        while True:
            epoch = self.current()
            if epoch is not None and epoch.number > after and (worker is None or worker in epoch.workers):
                return epoch
            if not is_left_out and epoch is not None and epoch.number > after >= 0:
                is_left_out, deadline = True, min(deadline, time.monotonic() + _LEFT_OUT_S)
            if (reason := self._read("end")) is not None:
                raise RuntimeError(f"the job has ended: {reason}")
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the launcher has begun no world after {after}{'' if worker is None else f' with worker {worker}'}"
                )
            time.sleep(_LOOK_AGAIN_S)

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def epochs_of(environment: Mapping[str, str], timeout_s: float) -> Epochs:
    """Return the epochs of the job that this worker belongs to. Raises as TCPStore where the launcher is gone."""
    host, port = environment[MASTER_ADDR], int(environment[MASTER_PORT])
    return Epochs(left_to_parent(TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))))
