"""The decisions of an elastic job: when generations begin and end, and which workers start and end.

The launcher reports events to a JobPolicy, and carries out the actions that the policy returns. The policy starts no
process and reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradwire.trainer.launcher.options import Elastic
from gradwire.trainer.launcher.output import ending
from gradwire.trainer.launcher.workers import Action, Begin, End, Kill, Release, Say, Start, Stop, Update, Workers
from gradwire.trainer.world.generations import Departure, Generation

#: The time that a worker has to leave a generation or to end after another worker has reported it as lost.
BLAMED_S = 2.0
#: The time that the other workers have to end after one worker has finished and another one has failed.
GRACE_S = 5.0
#: How long workers that are ready wait for other starting workers before a generation begins.
TOGETHER_S = 5.0
#: How many generations in a row may end without a survivor and without a later commit before the job ends.
NEW_STARTS = 3
#: How many generations in a row may end by errors, although no worker was lost, before training begins.
VAIN_GENERATIONS = 3


@dataclass
class _Happened:
    """Holds the events since the last generation began.

    departed: the workers that have left the generation. blamed_since: when another worker first reported a worker as lost.
    broken_since: when the first worker left the generation or was lost. is_update_wanted: whether the ranks have been asked to
    leave. waits_since: when the workers for the next generation turned out to be too few. arrived_since: since when workers are
    ready that are not ranks. failed: the workers that are lost. is_struck: whether a signal or the loss of a host has ended a
    rank, so that the other ranks may have failed as a consequence. has_trained: whether training has continued in the
    generation. reasons: why workers left. news: the changes, in words for the user.
    """

    departed: set[int] = field(default_factory=set)
    blamed_since: dict[int, float] = field(default_factory=dict)
    broken_since: float | None = None
    is_update_wanted: bool = False
    waits_since: float | None = None
    arrived_since: float | None = None
    failed: list[int] = field(default_factory=list)
    is_struck: bool = False
    has_trained: bool = False
    reasons: list[str] = field(default_factory=list)
    news: list[str] = field(default_factory=list)


class JobPolicy:
    """Decides for one job. All times are seconds of the same clock. start_by: when the first generation may begin with fewer
    workers than wanted."""

    def __init__(self, wanted: Elastic, start_by: float) -> None:
        self.generation: Generation | None = None
        self.workers = Workers(wanted.max_ranks)
        self.is_over = False
        self._wanted = wanted
        self._start_by = start_by
        self._finished_since: float | None = None
        self._new_starts = self._vain_generations = self._commit = 0
        self._new = _Happened()
        self._unsaid: list[Action] = []

    # Events

    def host_lost(self, node: int, why: str, now: float) -> None:
        """Note that the agent of a host has ended, and so have all its workers. The log reports it with the next generation, or
        at once if none of the workers is a rank, as after a failed attempt to use the host again."""
        self.workers.lose_host(node, now)
        host, lost = self.workers.hosts[node], self.workers.running_on(node)
        again = f", and is tried again in {host.pause_s:g} s" if host.slots else ""
        news = f"host {host.name} was lost{again}: {why}"
        if set(lost) & set(self._ranks):
            self._new.news.append(news)
        else:
            self._unsaid.append(Say(news))
        for number in lost:
            self.workers.of[number].is_running = False
            if not self.workers.of[number].is_alive:
                continue
            if number in self._ranks:
                self._lose(number, "was lost with its host", now, is_struck=True)
            else:
                self.workers.fail(number)
                self._new.failed.append(number)

    def arrived(self, worker: int) -> None:
        """Note that a worker is ready to become a rank."""
        self.workers.of[worker].has_arrived = True

    def departed(self, worker: int, departure: Departure, now: float) -> None:
        """Note that a worker has left the current generation."""
        self._new.departed.add(worker)
        self._break(now)
        if departure.reason:
            self._new.reasons.append(f"worker {worker}: {departure.reason}")
        for other in departure.blamed:
            self._new.blamed_since.setdefault(other, now)

    def resumed(self, commit: int) -> None:
        """Note from which commit the current generation continues. A later commit than before shows that the job makes
        progress."""
        self._new.has_trained = True
        if commit > self._commit:
            self._commit, self._new_starts = commit, 0

    def exited(self, worker: int, exit_code: int, now: float) -> None:
        """Note that the process of a worker has ended. exit_code: negative for a signal."""
        each = self.workers.of[worker]
        each.is_running = False
        if each.is_alive and exit_code == 0 and (self.generation is None or worker in self._ranks):
            each.is_alive = False
            self._finished_since = now if self._finished_since is None else self._finished_since
        elif each.is_alive:
            self._lose(worker, ending(exit_code), now, is_struck=exit_code < 0)

    # Decisions

    @property
    def staying(self) -> list[int]:
        """Return the workers of the current generation that are alive and have not left it."""
        return [
            number for number in self._ranks if self.workers.of[number].is_alive and number not in self._new.departed
        ]

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the workers of the current generation that are lost."""
        return tuple(number for number in self._ranks if not self.workers.of[number].is_alive)

    @property
    def is_changing(self) -> bool:
        """Return whether a generation is about to begin or to end, so that the launcher should check often."""
        is_between = self.generation is None or self._new.broken_since is not None or self._new.is_update_wanted
        return is_between or bool(self.workers.coming())

    def decide(self, now: float, *, is_interrupted: bool = False) -> list[Action]:
        """Return the next actions, in order. After an End, there are none."""
        actions: list[Action] = []
        if is_interrupted:
            self._new.failed = []  # the launcher's signal may have reached them
            return self._end("it was interrupted")
        self.workers.try_again(now)
        for step in (self._kills, self._turn, self._stops, self._starts, self._releases, self._says):
            if not self.is_over:
                actions += step(now)
        return actions

    def _kills(self, now: float) -> list[Action]:
        killed: list[Action] = []
        if self._new.broken_since is not None:
            for number in self.staying:
                late = self._new.broken_since + self._wanted.timeout_s
                if now >= min(late, self._new.blamed_since.get(number, late) + BLAMED_S):
                    self._lose(number, "was killed, since it did not answer", now, is_struck=True)
                    killed.append(Kill(number))
        return killed

    def _turn(self, now: float) -> list[Action]:
        """Begin a generation, ask the ranks to leave the current one, or end the job."""
        if self.generation is None:
            return self._first(now)
        if self._finished_since is not None:
            return self._last(now, self._finished_since)
        if self._new.broken_since is not None:
            return [] if self.staying else self._next(now, self.generation)
        return self._update(now, self.generation)

    def _first(self, now: float) -> list[Action]:
        alive = [number for number, worker in self.workers.of.items() if worker.is_alive]
        have_ended = self._new.failed or self._finished_since is not None
        if have_ended and not alive and not self._starting:
            return self._end()
        if self._finished_since is not None:
            is_stuck = all(self.workers.of[number].has_arrived for number in alive)
            return (
                self._end("a worker has finished before the first generation, which others wait for")
                if is_stuck
                else []
            )
        joining, least = self._joining, self._wanted.min_ranks
        wanted = max(least, self._wanted.ranks or least)
        if self._wanted.discovery_script is None:
            wanted = max(least, min(wanted, len(alive) + len(self.workers.free_slots())))
        are_all = len(joining) == len(alive) and len(joining) >= wanted and not self._starting
        if are_all or (now >= self._start_by and len(joining) >= least):
            return self._begin(next_generation(None, [], joining, self.workers.nodes()))
        return self._wait(now, len(joining))

    def _next(self, now: float, generation: Generation) -> list[Action]:
        survivors = [number for number in generation.workers if self.workers.of[number].is_alive]
        if not survivors and (not self._new.is_struck or self._new_starts == NEW_STARTS):
            return self._end("no rank survived")
        if self._is_last:
            return self._end(f"generation {generation.number} is the last one that --reset-limit allows")
        if self._was_in_vain and self._vain_generations == VAIN_GENERATIONS - 1:
            return self._end(f"the ranks cannot begin to train; {'; '.join(self._new.reasons)}")
        joining, least = self._joining, self._wanted.min_ranks
        if not survivors and len(joining) >= least and not self._are_together(now):
            return []
        welcome = [number for number in survivors if self.workers.of[number].is_welcome]
        # Workers on removed hosts stay for one more generation if no other worker has the state, or if the other workers are
        # too few.
        staying = welcome if welcome and len(welcome) + len(joining) >= least else survivors
        if len(staying) + len(joining) >= least:
            return self._begin(next_generation(generation, staying, joining, self.workers.nodes()))
        return self._wait(now, len(staying) + len(joining))

    def _last(self, now: float, finished_since: float) -> list[Action]:
        """Wait until all ranks have ended, after one has finished."""
        if self._new.broken_since is not None:
            is_late = now >= max(self._new.broken_since, finished_since) + GRACE_S
            reasons = "" if self._new.failed else "".join(f"; {reason}" for reason in self._new.reasons)
            return self._end(f"not all ranks have finished{reasons}") if is_late or not self.staying else []
        if self.staying:
            return []
        self._new.failed = []  # these workers were never ranks
        return self._end()

    def _update(self, now: float, generation: Generation) -> list[Action]:
        joining, are_together = self._joining, self._are_together(now)
        welcome = [number for number in generation.workers if self.workers.of[number].is_welcome]
        can_shrink = (
            0 < len(welcome) < len(generation.workers) and len(welcome) + len(joining) >= self._wanted.min_ranks
        )
        if self._new.is_update_wanted or self._is_last or not (can_shrink or (joining and are_together)):
            return []
        self._new.is_update_wanted = True
        return [Update(generation.number)]

    def _are_together(self, now: float) -> bool:
        """Return whether the ready workers have waited long enough for starting ones, or no others are starting."""
        if not self._joining:
            self._new.arrived_since = None
        elif self._new.arrived_since is None:
            self._new.arrived_since = now
        since = self._new.arrived_since
        return not (self.workers.coming() or self._starting) or (since is not None and now >= since + TOGETHER_S)

    def _wait(self, now: float, found: int) -> list[Action]:
        """Wait until there are enough workers. End the job if that is impossible or takes too long."""
        least, timeout_s = self._wanted.min_ranks, self._wanted.timeout_s
        few = f"{found} of at least {least} rank{'s' * (least > 1)}"
        is_first = self._new.waits_since is None
        self._new.waits_since = now if self._new.waits_since is None else self._new.waits_since
        if now >= self._new.waits_since + timeout_s:
            return self._end(f"no generation could begin within {timeout_s} s: {few} found")
        dying = [worker for worker in self.workers.of.values() if worker.is_running and not worker.is_alive]
        coming = [number for number in self.workers.coming() if self.workers.of[number].is_welcome]
        possible = found + len(coming) + len(self.workers.free_slots(later=self.generation is not None)) + len(dying)
        if self._wanted.discovery_script is None and possible < least:
            return self._end(f"{few} can continue, and no host is left for others")
        if not is_first or self.generation is None:
            return []
        return [Say(f"{few} can continue: training waits for others; {'; '.join(self._new.news)}")]

    def _stops(self, now: float) -> list[Action]:
        """Stop workers that are not ranks and will not become ranks."""
        is_ending = self.generation is not None and self._finished_since is not None
        stopped: list[Action] = []
        for number, worker in self.workers.of.items():
            if worker.is_alive and number not in self._ranks and (is_ending or worker.is_leaving):
                worker.is_alive = False
                stopped.append(Stop(number))
        return stopped

    def _starts(self, now: float) -> list[Action]:
        return [Start(self.workers.start(node, slot), node, slot) for node, slot in self._starting]

    def _releases(self, now: float) -> list[Action]:
        released: list[Action] = []
        for node, host in self.workers.hosts.items():
            if not host.is_released and host.slots == 0 and not self.workers.running_on(node):
                host.is_released = True
                released.append(Release(node))
        return released

    def _says(self, now: float) -> list[Action]:
        said, self._unsaid = self._unsaid, []
        return said

    # Derived state

    @property
    def _ranks(self) -> tuple[int, ...]:
        return () if self.generation is None else self.generation.workers

    @property
    def _joining(self) -> list[int]:
        """Return the workers that are ready to become ranks and are not."""
        workers = self.workers.of.items()
        return [
            number for number, each in workers if each.has_arrived and each.is_welcome and number not in self._ranks
        ]

    @property
    def _starting(self) -> list[tuple[int, int]]:
        """Return in which slots to start workers now. Until the first worker is ready, no failed worker is replaced: the script
        may fail everywhere."""
        is_hopeless = self._new.failed and not any(worker.has_arrived for worker in self.workers.of.values())
        if self._finished_since is not None or self._is_last or (self.generation is None and is_hopeless):
            return []
        return self.workers.free_slots()

    @property
    def _is_last(self) -> bool:
        """Return whether no generation may follow."""
        limit = self._wanted.reset_limit
        return self.generation is not None and limit is not None and self.generation.number >= limit

    @property
    def _was_in_vain(self) -> bool:
        """Return whether errors have ended the generation before training began, although no worker was lost."""
        return bool(self._new.reasons) and not self._new.failed and not self._new.has_trained

    def _break(self, now: float) -> None:
        if self._new.broken_since is None:
            self._new.broken_since = now

    def _lose(self, number: int, how: str, now: float, *, is_struck: bool) -> None:
        self._new.failed.append(number)
        self._new.news.append(f"worker {number} on host {self.workers.host_of(number).name} {how}")
        if news := self.workers.fail(number):
            self._new.news.append(news)
        if number in self._ranks:
            self._new.is_struck |= is_struck
            self._break(now)

    def _begin(self, generation: Generation) -> list[Action]:
        before, is_first = self._ranks, self.generation is None
        for number in before:
            if self.workers.of[number].is_alive and number not in generation.workers:
                self._new.news.append(f"worker {number} left with host {self.workers.host_of(number).name}")
        for rank, number in enumerate(generation.workers):
            self.workers.become_rank(number)
            if not is_first and number not in before:
                self._new.news.append(
                    f"worker {number} on host {self.workers.host_of(number).name} joined as rank {rank}"
                )
        self._vain_generations = self._vain_generations + 1 if self._was_in_vain else 0
        if self._was_in_vain:
            self._new.news.append(f"before, {self._new.reasons[0]}")
        self._new_starts = 0 if is_first or set(before) & set(generation.workers) else self._new_starts + 1
        begin = Begin(generation, tuple(self._new.news))
        self.generation = generation
        self._new = _Happened()
        return [begin]

    def _end(self, reason: str = "") -> list[Action]:
        self.is_over = True
        return [End(tuple(self._new.failed), reason)]


def next_generation(
    before: Generation | None, staying: Sequence[int], joining: Sequence[int], nodes: Mapping[int, int]
) -> Generation:
    """Return the generation of the workers that stay and of those that join. nodes: the host of each worker.

    Workers that stay keep their order. A worker that joins takes the rank of a worker that its host has lost. If no worker of
    its host stays, it takes the rank of any lost worker. So if as many workers join as are lost, no rank changes. The ranks of
    a host are consecutive.
    """
    old = () if before is None else before.workers
    places: list[int | None] = [worker if worker in staying else None for worker in old]
    kept = {nodes[worker] for worker in staying}
    rest = list(joining)
    for is_own_host in (True, False):
        for worker in [*rest]:
            for rank, node in enumerate(() if before is None else before.nodes):
                if places[rank] is None and (node == nodes[worker] if is_own_host else nodes[worker] not in kept):
                    places[rank] = worker
                    rest.remove(worker)
                    break
    workers = [worker for worker in [*places, *rest] if worker is not None]
    hosts = list(dict.fromkeys(nodes[worker] for worker in workers))
    workers.sort(key=lambda worker: hosts.index(nodes[worker]))
    return Generation(
        0 if before is None else before.number + 1, tuple(workers), tuple(nodes[worker] for worker in workers)
    )
