"""Generations of an elastic job: which processes are the ranks. The launcher begins one each time a process is lost or joins.

The launcher, `gradwire run --min-np`, keeps a store. The processes that it starts, the *workers*, have numbers that are never
reused. A worker writes to the store that it is ready, and later that it has left a generation, and why. The launcher writes the
generations. Both poll the store.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.collectives.control.asking import Asking, hang_up
from gradwire.collectives.control.key import Key, key_of_process
from gradwire.collectives.control.texts import Texts
from gradwire.collectives.environment import AGENT_STORE, RUN_ID
from gradwire.collectives.errors import LinkError
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
#: The interval between two reads of the lost workers from the store, and how long Losses.close() waits for the last read.
_LOSSES_POLL_S, _ANSWER_S = 0.1, 1.0
_LONGEST_REASON = 2000
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
    """Writes and reads the records of launcher and workers. store: the launcher's. key: of the job. run: the launcher's RUN_ID.
    Methods raise RuntimeError if the store is gone, has not answered within its timeout, or holds what was written without the
    key, or in another run."""

    def __init__(self, store: Store, key: Key | None = None, run: str = "") -> None:
        self._store = PrefixStore(_PREFIX, store)
        self._texts = Texts(self._store, key, f"{run}/{_PREFIX}")
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
                    f"the launcher has begun no generation after {after}{'' if worker is None else f' with worker {worker}'}"
                )
            time.sleep(_POLL_S)

    def _read(self, key: str) -> Any:
        record = self._ask(lambda: self._texts.read(key))
        return None if record is None else json.loads(record)

    def _has(self, key: str) -> bool:
        return self._ask(lambda: self._texts.read(key) is not None)

    def _set(self, key: str, value: str) -> None:
        self._ask(lambda: self._texts.write(key, value))

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        """Return the result of a call to the store."""
        try:
            return self._asking.ask(call, time.monotonic() + self._timeout_s)
        except LinkError as error:
            raise RuntimeError(str(error)) from error


def generations_of(environment: Mapping[str, str], timeout_s: float, key: Key | None = None) -> Generations:
    """Return the Generations of this worker's job. Raises the errors of TCPStore if the launcher is gone."""
    host, port = environment[MASTER_ADDR], int(environment[MASTER_PORT])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    return Generations(left_to_parent(store), key, environment.get(RUN_ID, ""))


class Worker:
    """Holds the place of this process in one generation after another.

    number: that of the worker. generation: the present or last generation of this process. losses: the lost ranks of that
    generation. Both are None before the first generation. is_late: whether the job had begun without this process. The process
    is then alone in a world of one while it builds its model, so that no other rank waits for that. When it is ready, it calls
    take_place() again.
    """

    def __init__(self, environment: MutableMapping[str, str], timeout_s: float) -> None:
        """environment: that of the process, which take_place() changes. Raises as generations_of, and as key_of_process."""
        self.number = int(environment[WORKER])
        self.generation: Generation | None = None
        self.is_late = False
        self._environment = environment
        self._generations: Generations = generations_of(environment, timeout_s, key_of_process())
        self.losses: Losses | None = None
        self._comes_first = True

    def take_place(self, timeout_s: float) -> None:
        """Wait for the next generation, and set the environment variables of this process's rank in it. If the job has begun
        without this process, the first call sets those of a world of one instead. Raises as Generations.await_generation.

        timeout_s: how long to wait beyond the time after which the launcher ends a job that lacks workers. A surviving process
        must not end earlier, since its commit could be lost.
        """
        if self.losses is not None:
            self.losses.close()
        deadline = time.monotonic() + self._generations.longest_wait_s() + timeout_s
        if self._comes_first:
            self._comes_first = False
            if self._generations.current() is None:
                self._generations.arrive(self.number)
                self._generations.await_generation(None, -1, deadline)
            begun = self._generations.current()
            self.is_late = begun is not None and self.number not in begun.workers
            if self.is_late:
                alone = Generation(-1, (self.number,), (0,)).environment(self.number)
                local_rank = self._environment.get("LOCAL_RANK", "0")  # the script may choose a GPU by it
                self._environment.update(alone | {"LOCAL_RANK": local_rank})
                return
        self._generations.arrive(self.number)
        after = -1 if self.generation is None else self.generation.number
        self.generation = self._generations.await_generation(self.number, after, deadline)
        self.is_late = False
        self._environment.update(self.generation.environment(self.number))
        self.losses = Losses(self._generations, self.generation)

    def leave(self, error: BaseException | None = None, lost: Iterable[int] = ()) -> None:
        """Report to the launcher that this process has left its generation. error: the reason; None for an update. lost: the
        ranks that no longer answer. Raises RuntimeError if the launcher is gone."""
        if self.generation is None:
            return
        reason = "" if error is None else reason_of(error)
        blamed = tuple(self.generation.workers[rank] for rank in lost)
        self._generations.leave(self.number, self.generation.number, Departure(error is None, reason, blamed))

    def resume(self, commit: int) -> None:
        """Report to the launcher from which commit this generation continues. Raises as leave."""
        assert self.generation is not None
        self._generations.resume(self.generation.number, commit)

    def is_update_wanted(self) -> bool:
        """Return whether the launcher wants the ranks to leave this generation. Raises as leave."""
        return self.generation is not None and self._generations.is_update_wanted(self.generation.number)

    def end_job(self, reason: str) -> None:
        """Record that no generation follows, and why."""
        self._generations.end(reason)


class Losses:
    """Holds the ranks that one generation has lost, as the launcher records them. A thread reads them, as the store may be
    slow."""

    def __init__(self, generations: Generations, generation: Generation) -> None:
        self._generations, self._generation = generations, generation
        self._ranks: tuple[int, ...] = ()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="gradwire-losses", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def ranks(self) -> tuple[int, ...]:
        """Return the ranks whose processes have ended or were given up, according to the last read. Does not wait."""
        return self._ranks

    def close(self) -> None:
        """End the thread, and wait for its end for at most _ANSWER_S seconds."""
        atexit.unregister(self._end)
        self._is_over.set()
        self._thread.join(_ANSWER_S)

    def _end(self) -> None:
        """End the thread: if its read returned while the interpreter exits, the thread would abort the process."""
        self.close()
        if self._thread.is_alive():
            self._generations.hang_up(time.monotonic() + _ANSWER_S)
            self._thread.join(_ANSWER_S)

    def _ask(self) -> None:
        while not self._is_over.wait(_LOSSES_POLL_S):
            try:
                lost = self._generations.lost(self._generation.number)
            except RuntimeError as error:
                if isinstance(error.__cause__, LinkError) and error.__cause__.timed_out:
                    continue  # the launcher is stopped, perhaps for a while
                return  # it is gone: this process gets the same error from its own next call
            self._ranks = tuple(self._generation.workers.index(worker) for worker in lost)


def reason_of(error: BaseException) -> str:
    """Return the type and the text of an error, shortened, for the reports to other processes."""
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
