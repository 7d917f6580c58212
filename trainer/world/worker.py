"""This process as a worker of an elastic job: how it gets its rank in each generation, and reports why it leaves a
generation."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterable, MutableMapping

from gradwire.collectives.errors import LinkError
from gradwire.trainer.world.generations import WORKER, Departure, Generation, Generations, generations_of

_LOCAL_RANK = "LOCAL_RANK"
_LONGEST_REASON = 2000
#: The interval between two reads of the lost workers from the store, and how long close() waits for the last read.
_POLL_S, _ANSWER_S = 0.1, 1.0


class Worker:
    """Holds the place of this process in one generation after another.

    number: that of the worker. generation: the present or last generation of this process. losses: the lost ranks of that
    generation. Both are None before the first generation. is_late: whether the job had begun without this process. The process
    is then alone in a world of one while it builds its model, so that no other rank waits for that. When it is ready, it calls
    take_place() again."""

    def __init__(self, environment: MutableMapping[str, str], timeout_s: float) -> None:
        """environment: that of the process, which take_place() changes. Raises as generations_of."""
        self.number = int(environment[WORKER])
        self.generation: Generation | None = None
        self.is_late = False
        self._environment = environment
        self._generations: Generations = generations_of(environment, timeout_s)
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
                local_rank = self._environment.get(_LOCAL_RANK, "0")  # the script may choose a GPU by it
                self._environment.update(alone | {_LOCAL_RANK: local_rank})
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
        while not self._is_over.wait(_POLL_S):
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


def worker_of(environment: MutableMapping[str, str], timeout_s: float) -> Worker | None:
    """Return the Worker that the environment describes; None if it describes none. Raises as generations_of."""
    return Worker(environment, timeout_s) if WORKER in environment else None
