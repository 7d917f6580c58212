"""Generations of an elastic job: which processes are the ranks. The launcher begins one each time a process is lost or joins.

The launcher, `gradwire run --min-np`, keeps a store. The processes that it starts, the *workers*, have numbers that are never
reused. A worker writes to the store that it is ready, and later that it has left a generation, and why. The launcher writes the
generations. Both poll the store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.collectives.environment import AGENT_STORE
from gradwire.collectives.errors import LinkError
from gradwire.collectives.link.asking import Asking, hang_up
from gradwire.collectives.torch_internals import left_to_parent
from gradwire.trainer.world.launch import MASTER_ADDR, MASTER_PORT

WORKER = "GRADWIRE_WORKER"
"""The environment variable that holds a worker's number. Only the agents of an elastic job set it."""

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""The environment variable in which torchrun counts restarts of all ranks; in an elastic job, the number of the generation."""

_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"

_Answer = TypeVar("_Answer")

_PREFIX = "gradwire.elastic"
#: Seconds between two checks whether the launcher has begun a generation.
_POLL_S = 0.005
#: How long a rank waits once a generation has begun without it. An agent that the launcher can still reach ends the rank
#: sooner.
_LEFT_OUT_S = 30.0


def restarts(environment: Mapping[str, str]) -> int:
    """Return how often torchrun has restarted all ranks; in an elastic job, the number of the generation."""
    return int(environment.get(RESTART_COUNT, "0"))


def can_restart(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun restarts all ranks if one fails."""
    return restarts(environment) < int(environment.get(_MAX_RESTARTS, "0"))


@dataclass(frozen=True)
class Generation:
    """Holds the workers that are the ranks of a world. number: that of the generation, from 0 on. workers: the number of each
    rank's worker. nodes: the number of each rank's host, from 0 on; it is never reused either."""

    number: int
    workers: tuple[int, ...]
    nodes: tuple[int, ...]

    def environment(self, worker: int) -> dict[str, str]:
        """Return torchrun's environment variables for a worker as a rank of this generation."""
        rank = self.workers.index(worker)
        beside = [other for other, node in enumerate(self.nodes) if node == self.nodes[rank]]
        nodes, size = sorted(set(self.nodes)), str(len(self.workers))
        return {
            "RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(beside.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "GROUP_RANK": str(nodes.index(self.nodes[rank])),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": size,
            _MAX_RESTARTS: "0",
            RESTART_COUNT: str(self.number),
            AGENT_STORE: "True",
        }


@dataclass(frozen=True)
class Departure:
    """Holds the reason why a worker has left a generation. is_update: whether it left for an update, between two steps. reason:
    the error otherwise. blamed: the workers that the error names as lost."""

    is_update: bool
    reason: str = ""
    blamed: tuple[int, ...] = ()


class Generations:
    """Writes and reads the records of launcher and workers. store: the launcher's. Methods raise RuntimeError if it is gone, or
    has not answered within its timeout."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore(_PREFIX, store)
        self._timeout_s: float = store.timeout.total_seconds()  # type: ignore[attr-defined]
        self._asking = Asking(self._store)

    # Written by workers, read by the launcher

    def arrive(self, worker: int) -> None:
        """Record that a worker has loaded its modules, and can become a rank."""
        self._set(f"ready/{worker}", "")

    def has_arrived(self, worker: int) -> bool:
        """Return whether a worker has arrived."""
        return self._has(f"ready/{worker}")

    def leave(self, worker: int, generation: int, departure: Departure) -> None:
        """Record that a worker has left a generation, has closed its links, and waits for the next generation."""
        record = {"is_update": departure.is_update, "reason": departure.reason, "blamed": departure.blamed}
        self._set(f"left/{generation}/{worker}", json.dumps(record))

    def departure(self, worker: int, generation: int) -> Departure | None:
        """Return why a worker has left a generation; None if it has not."""
        record = self._read(f"left/{generation}/{worker}")
        return None if record is None else Departure(record["is_update"], record["reason"], tuple(record["blamed"]))

    def resume(self, generation: int, commit: int) -> None:
        """Record the commit from which the ranks of a generation continue; 0: none."""
        self._set(f"commit/{generation}", json.dumps(commit))

    def resumed(self, generation: int) -> int | None:
        """Return the commit that resume() recorded for a generation; None before."""
        commit: int | None = self._read(f"commit/{generation}")
        return commit

    # Written by the launcher, read by workers

    def limit_wait(self, timeout_s: float) -> None:
        """Record how long the launcher waits for the workers of a generation before it ends the job."""
        self._set("timeout", json.dumps(timeout_s))

    def longest_wait_s(self) -> float:
        """Return the time that limit_wait() recorded; 0 before."""
        return float(self._read("timeout") or 0)

    def begin(self, generation: Generation) -> None:
        """Begin a generation."""
        self._set(f"generation/{generation.number}", json.dumps([generation.workers, generation.nodes]))
        self._set("generation", json.dumps(generation.number))

    def current(self) -> Generation | None:
        """Return the newest generation; None before the first."""
        number = self._read("generation")
        if number is None:
            return None
        workers, nodes = self._read(f"generation/{number}")
        return Generation(number, tuple(workers), tuple(nodes))

    def lose(self, generation: int, lost: tuple[int, ...]) -> None:
        """Record all workers that a generation has lost so far."""
        self._set(f"lost/{generation}", json.dumps(lost))

    def lost(self, generation: int) -> tuple[int, ...]:
        """Return the workers that a generation has lost."""
        return tuple(self._read(f"lost/{generation}") or ())

    def want_update(self, generation: int) -> None:
        """Ask the ranks of a generation to leave it after a commit, so that a generation of other workers can begin."""
        self._set(f"update/{generation}", "")

    def is_update_wanted(self, generation: int) -> bool:
        """Return whether want_update() was called for a generation."""
        return self._has(f"update/{generation}")

    def hang_up(self, deadline: float) -> None:
        """Shut down this process's connections to the store: calls that wait for it raise RuntimeError. deadline: see
        asking.shut()."""
        hang_up(self._store, deadline)

    def end(self, reason: str) -> None:
        """Record that no generation follows, and why. Workers that wait for one raise RuntimeError with the reason."""
        self._set("end", json.dumps(reason))

    def await_generation(self, worker: int | None, after: int, deadline: float) -> Generation:
        """Wait until the newest generation is later than generation `after` and a worker is a rank of it, and return it.
        worker: None for any ranks. after: the worker's last generation; -1 for none. deadline: time.monotonic() seconds. Raises
        TimeoutError at the deadline, or earlier if the worker was a rank and a generation begins without it, since the launcher
        has given it up. Raises RuntimeError if the job has ended."""
        is_left_out = False
        while True:
            generation = self.current()
            if (
                generation is not None
                and generation.number > after
                and (worker is None or worker in generation.workers)
            ):
                return generation
            if not is_left_out and generation is not None and generation.number > after >= 0:
                is_left_out, deadline = True, min(deadline, time.monotonic() + _LEFT_OUT_S)
            if (reason := self._read("end")) is not None:
                raise RuntimeError(f"the job has ended: {reason}")
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the launcher has begun no world after {after}{'' if worker is None else f' with worker {worker}'}"
                )
            time.sleep(_POLL_S)

    def _read(self, key: str) -> Any:
        record = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if record is None else json.loads(record)

    def _has(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.check([key])))

    def _set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        """Return the result of a call to the store."""
        try:
            return self._asking.ask(call, time.monotonic() + self._timeout_s)
        except LinkError as error:
            raise RuntimeError(str(error)) from error


def generations_of(environment: Mapping[str, str], timeout_s: float) -> Generations:
    """Return the Generations of this worker's job. Raises the errors of TCPStore if the launcher is gone."""
    host, port = environment[MASTER_ADDR], int(environment[MASTER_PORT])
    return Generations(left_to_parent(TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))))
