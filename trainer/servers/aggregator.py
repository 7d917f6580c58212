"""Aggregator: decides which contributions make a server's next update, when, and which workers may continue. No tensors, no
I/O.

The fields of a Scheme give the classic schemes. If the quorum is the number of workers, every update is synchronous. If it is
smaller, updates do not wait for the slowest workers (backup workers, Chen et al. 2016). If it is 1, every contribution is
applied on arrival (Downpour, Dean et al. 2012). staleness limits how many steps a worker may be ahead of the slowest (stale
synchronous parallel, Ho et al. 2013).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

Late = Literal["weight", "drop", "next"]
LATE = get_args(Late)

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Counts:
    """Counts the contributions to one server. A contribution is the gradients that a worker pushes to this server in one step;
    for a KVStore, it is a push to a key.

    updates: the number of updates made. staleness: the number of contributions by age. The age is the number of updates
    between the worker's pull of the parameters with which it computed the contribution, and the update that uses the
    contribution. If the contribution is dropped, the updates before its arrival count. contributions: the number from each
    worker. late: the number of contributions whose age is above 0. dropped: the number of late ones that were not used.
    pending: the number that wait for their update. lead: the largest number of steps by which a worker that began a step
    was ahead of the slowest. lost: the workers that have failed.
    """

    updates: int
    staleness: dict[int, int]
    contributions: dict[int, int]
    late: int
    dropped: int
    pending: int
    lead: int
    lost: tuple[int, ...]

    def to_record(self) -> dict[str, Any]:
        """Return the counts as a record that JSON can hold."""
        return {
            **vars(self),
            "staleness": list(self.staleness.items()),
            "contributions": list(self.contributions.items()),
        }

    @staticmethod
    def from_record(record: dict[str, Any]) -> Counts:
        """Return the Counts from a record of to_record()."""
        tables = {name: dict(map(tuple, record[name])) for name in ("staleness", "contributions")}
        return Counts(**{**record, **tables, "lost": tuple(record["lost"])})

    @staticmethod
    def total(counts: Sequence[Counts]) -> Counts:
        """Return the sum of several Counts."""
        return Counts(
            updates=sum(each.updates for each in counts),
            staleness=_added(each.staleness for each in counts),
            contributions=_added(each.contributions for each in counts),
            late=sum(each.late for each in counts),
            dropped=sum(each.dropped for each in counts),
            pending=sum(each.pending for each in counts),
            lead=max((each.lead for each in counts), default=0),
            lost=tuple(sorted({worker for each in counts for worker in each.lost})),
        )


@dataclass(frozen=True)
class ServerReport(Counts):
    """Holds the Counts of all servers: their sums, the maximum of `lead`, and all `lost` workers. A step of a rank makes one
    contribution to each server.

    servers: the number of servers.
    """

    servers: int

    def __str__(self) -> str:
        ages = ", ".join(f"{count} of age {age}" for age, count in self.staleness.items())
        ranks = ", ".join(f"{count} from rank {rank}" for rank, count in self.contributions.items())
        left_out = f"; without {', '.join(f'rank {rank}' for rank in self.lost)}" if self.lost else ""
        return (
            f"{self.updates} updates at {self.servers} servers, of contributions {ranks}; {ages}; {self.late} late, "
            f"{self.dropped} dropped{left_out}"
        )

    @staticmethod
    def of(counts: Sequence[Counts]) -> ServerReport:
        """Return the report from each server's Counts."""
        return ServerReport(servers=len(counts), **vars(Counts.total(counts)))


@dataclass(frozen=True)
class Scheme:
    """Holds the conditions of an update.

    quorum: how many workers must have contributed. grace_s: how many seconds the update then waits for others. staleness: how
    many steps a worker may be ahead of the slowest; None for any number. late: how a contribution to an old version is used.
    "weight": in the next update, weighted by 1 / (1 + age). "next": in the next update, like any other. "drop": not at all.
    sums: whether an update is the sum of contributions, not their weighted average. reads_own: whether a worker waits until an
    update has used its contribution, even a late one.
    """

    quorum: int
    grace_s: float
    staleness: int | None
    late: Late
    sums: bool = False
    reads_own: bool = False


@dataclass(frozen=True)
class _Contribution(Generic[_Value]):
    worker: int
    weight: float
    age: int
    value: _Value


class Aggregator(Generic[_Value]):
    """Collects the workers' contributions, and decides which ones make the next update.

    Attributes: version, how many updates have been made; quorum, how many workers must contribute to an update: the scheme's
    quorum, or fewer if workers have left; lost, the workers that have failed. All times are seconds of the same clock.
    """

    def __init__(self, workers: Iterable[int], scheme: Scheme, version: int = 0) -> None:
        self.version = version
        self._scheme = scheme
        self._clocks = dict.fromkeys(workers, 0)  # the number of contributions of each remaining worker
        self._versions: dict[int, int] = {}  # the version of each worker's last contribution
        self.lost: tuple[int, ...] = ()
        self.quorum = scheme.quorum
        self._pending: list[_Contribution[_Value]] = []
        self._complete_at: float | None = None  # when the quorum was reached
        self._ages: Counter[int] = Counter()
        self._contributed: Counter[int] = Counter(self._clocks)
        self._late = self._dropped = self._updates = self._lead = 0

    @property
    def holds_quorum(self) -> bool:
        """Return whether enough workers remain for an update."""
        return len(self._clocks) >= self.quorum

    @property
    def awaited(self) -> tuple[int, ...]:
        """Return the workers that have contributed nothing to the next update yet."""
        return tuple(sorted(self._clocks.keys() - self._contributors()))

    def push(self, worker: int, version: int, weight: float, value: _Value, now: float) -> None:
        """Add a contribution that was computed with the parameters of a version."""
        age = self.version - version
        if age < 0:
            raise ValueError(f"worker {worker} contributes to version {version}, but the newest is {self.version}")
        self._clocks[worker] += 1
        self._versions[worker] = version
        self._contributed[worker] += 1
        self._ages[age] += 1
        self._late += age > 0
        if age > 0 and self._scheme.late == "drop":
            self._dropped += 1
        else:
            self._pending.append(_Contribution(worker, weight, age, value))
        self._note_quorum(now)

    def due_at(self, now: float) -> float | None:
        """Return when the next update is due if nothing more is pushed; None if it needs another contribution first."""
        if self._complete_at is None:
            return None
        return now if not self.awaited else self._complete_at + self._scheme.grace_s

    def take(self, now: float) -> list[tuple[_Value, float]] | None:
        """Return the contributions of the next update with their factors, ordered by worker; None if no update is due.

        A factor is the contribution's weight / the sum of all weights, or 0 if this sum is 0. With late="weight", it is divided
        by 1 + age. For sums, all factors are 1.
        """
        due_at = self.due_at(now)
        if due_at is None or now < due_at:
            return None
        pending, self._pending, self._complete_at = self._pending, [], None
        self.version += 1
        self._updates += 1
        total = sum(each.weight for each in pending) or 1.0

        def factor(each: _Contribution[_Value]) -> float:
            if self._scheme.sums:
                return 1.0
            return each.weight / total * (1 / (1 + each.age) if self._scheme.late == "weight" else 1.0)

        return [(each.value, factor(each)) for each in sorted(pending, key=lambda each: each.worker)]

    def may_go(self, worker: int) -> bool:
        """Return whether a worker may continue with the newest parameters: an update has followed the version to which the
        worker contributed, and the worker is not too many steps ahead."""
        return not self._needs_update(worker) and not self.blocking(worker)

    def blocking(self, worker: int) -> tuple[int, ...]:
        """Return the workers that block a worker that has contributed: before the next update, those that have not contributed
        to it; after it, those that are further behind than the staleness allows."""
        if self._needs_update(worker):
            return self.awaited
        bound = self._scheme.staleness
        if bound is None:
            return ()
        return tuple(sorted(other for other, clock in self._clocks.items() if self._clocks[worker] - clock > bound))

    def went(self, worker: int) -> None:
        """Record that a worker continues."""
        self._lead = max(self._lead, self._clocks[worker] - min(self._clocks.values()))

    def leave(self, worker: int, now: float) -> None:
        """Remove a worker that has finished. If the quorum could be reached, reduce it to at most the number of the others."""
        held = self.holds_quorum
        if self._clocks.pop(worker, None) is not None:
            if held:
                self.quorum = min(self.quorum, len(self._clocks))
            self._note_quorum(now)

    def lose(self, worker: int, now: float) -> None:
        """Remove a worker that has failed. Its earlier contributions are still used."""
        if self._clocks.pop(worker, None) is not None:
            self.lost = tuple(sorted((*self.lost, worker)))
            self._note_quorum(now)

    def counts(self) -> Counts:
        """Return the counts of all contributions."""
        return Counts(
            updates=self._updates,
            staleness=_added([self._ages]),
            contributions=_added([self._contributed]),
            late=self._late,
            dropped=self._dropped,
            pending=len(self._pending),
            lead=self._lead,
            lost=self.lost,
        )

    def _needs_update(self, worker: int) -> bool:
        """Return whether a worker cannot continue before the next update."""
        if self._scheme.reads_own and worker in self._contributors():
            return True
        return self.version <= self._versions.get(worker, -1)

    def _contributors(self) -> set[int]:
        return {each.worker for each in self._pending}

    def _note_quorum(self, now: float) -> None:
        """Record the time if the quorum has just been reached."""
        if self._complete_at is None and self._pending and len(self._contributors()) >= self.quorum:
            self._complete_at = now


def _added(tables: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return the sum of tables of counts, sorted by key."""
    total: Counter[int] = Counter()
    for table in tables:
        total.update(table)
    return dict(sorted(total.items()))
