"""Measure the costs of messages between the ranks of a Communicator, with programs like those of its operations.

The whole measurement is one operation, so that a lost rank, a stall or a different call is detected as in any other operation.
Each rank measures how long its own part of each program took. The ranks then exchange these times, and rank 0 computes the Costs
from them (calibration.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.reduction import COMBINE
from gradwire.collectives.schedules.algorithms import PLANNERS, hierarchical
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Place, Round, Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import WHOLE, Span, consecutive, segments_of_buffer
from gradwire.collectives.schedules.topology import Machine, Topology
from gradwire.collectives.tuning.calibration import (
    Pair,
    Programs,
    Timed,
    Together,
    Uplinks,
    costs_of,
    slow_pairs,
    uplinks_of,
    without_waiting,
)
from gradwire.collectives.tuning.cost_model import Cores, Costs, LinkCost, SlowLink, slowness

#: How often a small program runs, for about how many seconds at most, and how many messages it sends one after the other.
_TIMES, _ENOUGH_S, _STREAM = 8, 0.02, 16

#: A bulk message grows from the least to the most bytes until it takes this many seconds. By then, a link that allows bursts
#: is at its lasting rate.
_LEAST_BYTES, _MOST_BYTES, _BULK_S = 128 << 10, 4 << 20, 0.004

#: The pause after which a link that allows bursts allows another one.
_PAUSE_S = 0.02

#: The maximum number of other hosts with which each host is measured, and how long the bulk messages of several ranks may take.
_OPPONENTS, _SHARED_S = 7, 0.01

#: Bytes of the small allreduce; the most segments of the large one, and about how long it may take on the links.
_SMALL_BYTES, _SEGMENTS, _LARGE_S = 1 << 10, 8, 0.015

#: Bytes of the additions inside hosts.
_ADDED_BYTES = 1 << 20

#: How many bulk messages follow the first one: more if several ranks of a host take part and share cores, since these wake up
#: late. _TIMES_ALONE: how often the bulk messages of two ranks are measured alone.
_FOLLOWING, _FOLLOWING_OF_MANY, _TIMES_ALONE = 2, 4, 3

#: How long a row of small allreduces, at most eight, may take.
_ROW_S = 0.004

_CLOCK = time.perf_counter_ns


def measure_links(engine: Engine, topology: Topology, machines: Sequence[Machine]) -> Costs | None:
    """Measure the links. Return the costs on rank 0, and None on the other ranks. A collective call; raises the errors of an
    operation."""
    engine.prepare(
        "allreduce", "ring", torch.empty(1, dtype=torch.float32, device="cpu"), 1
    )  # which compiles what adds
    costs: list[Costs | None] = []

    def run(_: object, __: object, tag: int, deadline: float) -> None:
        costs.append(_Measurement(engine, topology, machines, tag, deadline).costs())

    engine.run(PreparedCall("tune", "tune", run), None, None)
    return costs[0]


class _Measurement:
    """The measurement on one rank. tag, deadline: of the operation."""

    def __init__(
        self, engine: Engine, topology: Topology, machines: Sequence[Machine], tag: int, deadline: float
    ) -> None:
        self._engine = engine
        self._tag, self._deadline = tag, deadline
        self._machines = machines
        self._hosts = topology.hosts
        self._rank, self._size = engine.rank, engine.size
        self._lanes = min(map(len, self._hosts))
        names = [machine.name for machine in machines]
        self._shares_cores = any(names.count(machine.name) > machine.cores for machine in machines)
        self._following = _FOLLOWING_OF_MANY if self._lanes > 1 and self._shares_cores else _FOLLOWING
        # Zeros, since additions of denormal numbers take longer; written, so that memory backs them. All ranks send zeros.
        self._buffer = torch.empty(_MOST_BYTES, dtype=torch.float32, device="cpu").zero_()

    def costs(self) -> Costs | None:
        """Measure, and return the costs on rank 0."""
        self._timed(self._allreduce("ring", _LEAST_BYTES), 1)  # the first use of a connection is slower
        alone = self._alone()
        inside = next((self._pair(host[:2], inside=True) for host in self._hosts if len(host) > 1), None)
        between = uplinks = together = None
        if len(self._hosts) > 1:
            between = self._pair((self._hosts[0][0], self._hosts[1][0]), inside=False)
            uplinks = self._uplinks(between)
        if (pair := between or inside) is not None:
            together = self._together(pair.bulk_bytes, uplinks)
        return costs_of(alone, inside, between, uplinks, together) if self._rank == 0 else None

    def _alone(self) -> Costs:
        """Return the costs of all ranks that each rank can measure by itself."""
        block = self._buffer[: _LEAST_BYTES // 4]
        adding_s = min(_seconds(lambda: COMBINE["sum"](block, block, out=block), time.thread_time_ns) for _ in range(9))
        nothing = Program(Schedule(self._rank, self._size, 1, ()), [(Span(0, 0),)])
        call = self._prepared(nothing)
        calls = self._everyones(min(_seconds(call) for _ in range(9)))
        adding = self._everyones(adding_s)
        usual_byte_s = statistics.median_low(adding) / _LEAST_BYTES
        copying = LinkCost(0.0, 0.0, 0.0, usual_byte_s)
        by_machine: dict[str, list[int]] = {}
        for rank, machine in enumerate(self._machines):
            by_machine.setdefault(machine.name, []).append(rank)
        return Costs(
            hosts=self._hosts,
            machines=tuple(self._machines[host[0]].description for host in self._hosts),
            inside=copying,
            between=copying,
            uplinks=(0.0,) * len(self._hosts),
            cores=tuple(Cores(tuple(ranks), self._machines[ranks[0]].cores) for ranks in by_machine.values()),
            slowness=slowness(adding),
            call_s=statistics.median(calls),
            reduce_byte_s=usual_byte_s,
        )

    # Programs and their times

    def _everyones(self, seconds: float) -> list[float]:
        """Return the seconds that each rank has measured, by rank."""
        return [row[0] / 1e9 for row in self._engine.table([round(seconds * 1e9)], self._tag, self._deadline)]

    def _prepared(self, program: Program) -> Callable[[], None]:
        """Return what runs a program once."""
        run = self._engine.follow("tune", "of a pair", program, self._buffer, self._buffer.numel())
        return lambda: run(self._buffer, self._buffer, self._tag, self._deadline)

    def _timed(self, programs: Programs, times: int = _TIMES, calls: int = 1) -> float:
        """Return the seconds that one call of the programs takes on the slowest rank: the lower quartile of `times`
        measurements, or of at least three if they take long. times=1 measures once. calls: how many calls in a row each
        measurement makes."""

        call = self._prepared(programs[self._rank])

        def once() -> float:
            self._engine.meet(self._tag, self._deadline)
            return _seconds(lambda: _repeat(call, calls))

        taken = [once()]
        first = max(self._everyones(taken[0]))
        if times == 1:
            return first / calls
        taken += [once() for _ in range(min(times - 1, max(2, int(_ENOUGH_S / first))))]
        return max(self._everyones(sorted(taken)[len(taken) // 4])) / calls

    def _steady(
        self, programs: Programs, following: int, times: int, pause_s: float = 0.0
    ) -> Callable[[Iterable[int]], tuple[float, float]]:
        """Return a function that takes ranks and returns the seconds of a first call of their programs, after a pause of
        pause_s, and the mean seconds of `following` calls right after it. Both come from each rank's minimum of `times`
        measurements. The time of the first call is subtracted from that of all calls: timed alone, a second call would seem
        too fast on a rank that wakes up late after the first, since the other ranks have already begun it."""
        call = self._prepared(programs[self._rank])
        first, all_of_them = [], []
        for _ in range(times):
            time.sleep(pause_s)
            self._engine.meet(self._tag, self._deadline)
            began = _CLOCK()
            call()
            first.append(_CLOCK() - began)
            _repeat(call, following)
            all_of_them.append(_CLOCK() - began)
        table = self._engine.table([min(first), min(all_of_them)], self._tag, self._deadline)

        def seconds(ranks: Iterable[int]) -> tuple[float, float]:
            first_ns, all_ns = (max(column) for column in zip(*(table[rank] for rank in ranks), strict=True))
            return first_ns / 1e9, (all_ns - first_ns) / 1e9 / following

        return seconds

    def _programs(self, program: Callable[[int], Program]) -> Programs:
        """Return the programs of all ranks on rank 0, which computes the costs, and only its own on another rank."""
        return {rank: program(rank) for rank in range(self._size) if self._rank in (0, rank)}

    def _of_rounds(self, lengths: Sequence[int], rounds: Callable[[int], Sequence[Round]]) -> Programs:
        """Return programs of each rank's rounds over blocks. lengths: bytes of each block."""
        layout = consecutive([length // 4 for length in lengths])
        return self._programs(
            lambda rank: Program(Schedule(rank, self._size, len(layout), tuple(rounds(rank))), [layout])
        )

    def _of_buffer(self, planner: Callable[[Place], Schedule], nbytes: int) -> Programs:
        """Return programs of a planner's schedules over a buffer, in segments."""

        def program(rank: int) -> Program:
            schedule = planner(Place(rank, self._size, 0, self._hosts))
            segment = self._engine.plans.segment_bytes // 4
            return Program(schedule, segments_of_buffer(nbytes // 4, schedule.blocks, segment))

        return self._programs(program)

    def _allreduce(self, algorithm: str, nbytes: int) -> Programs:
        return self._of_buffer(PLANNERS["allreduce"][algorithm], nbytes)

    def _exchange(self, partners: dict[int, int], nbytes: int) -> Programs:
        """Return programs in which pairs of ranks exchange a block."""

        def rounds(rank: int) -> Sequence[Round]:
            partner = partners.get(rank)
            return ((),) if partner is None else (send(partner, (Span(0, 1),)) + receive(partner, (Span(1, 2),)),)

        return self._of_rounds([nbytes, nbytes], rounds)

    # Two ranks, while all others are idle

    def _pair(self, pair: Sequence[int], *, inside: bool) -> Pair:
        one, other = pair
        partners = {one: other, other: one}

        def swaps(rank: int) -> Sequence[Round]:
            peer = partners.get(rank)
            return (() if peer is None else send(peer, WHOLE) + reduce(peer, WHOLE),) * _STREAM

        def stream(rank: int) -> Sequence[Round]:
            if rank not in partners:
                return [(), ()]
            peer, move, back = (other, send, reduce) if rank == one else (one, reduce, send)
            return [sum((move(peer, (Span(i, i + 1),)) for i in range(_STREAM)), ()), back(peer, WHOLE)]

        swapping, streaming = self._of_rounds([4], swaps), self._of_rounds([8] * 2 * _STREAM, stream)
        swapped, streamed = Timed(swapping, self._timed(swapping)), Timed(streaming, self._timed(streaming))
        nbytes = _LEAST_BYTES
        while (taken := self._timed(self._exchange(partners, nbytes), 1)) < _BULK_S and nbytes < _MOST_BYTES:
            # Not more at once: a burst makes the first message look faster than the link is.
            nbytes = min(nbytes * (4 if taken < _BULK_S / 4 else 2), _MOST_BYTES)
        bulk = self._exchange(partners, nbytes)
        pause_s = 0.0 if inside else _PAUSE_S
        first_s, seconds = self._steady(bulk, _FOLLOWING, _TIMES_ALONE, pause_s)(range(self._size))
        saved_s = 0.0 if inside else max(0.0, seconds - first_s)
        moving_byte_s = None if inside else self._moving_byte_s(bulk, pair, nbytes)
        return Pair(swapped, streamed, _STREAM, Timed(bulk, seconds), nbytes, saved_s, moving_byte_s)

    def _moving_byte_s(self, bulk: Programs, pair: Sequence[int], nbytes: int) -> float:
        """Return the processor's seconds to send or to receive a byte, by the thread's CPU clock while waits sleep instead of
        polling. The time of a message does not show these seconds if the link is slower than the processor, but predictions
        need them for ranks that share cores or encode."""
        call = self._prepared(bulk[self._rank])
        self._engine.meet(self._tag, self._deadline)
        with ThreadPoolExecutor(1) as beside:  # only the main thread polls while it waits
            mine = beside.submit(lambda: _seconds(lambda: _repeat(call, 2), time.thread_time_ns)).result()
        taken = self._everyones(mine)
        return min(taken[rank] for rank in pair) / (4 * nbytes)

    # All ranks

    def _uplinks(self, alone: Pair) -> Uplinks:
        """Measure the uplink of every host: pairs of hosts exchange bulk messages, all pairs at once, over all ranks that have
        a partner. alone: the measurement of the first pair of hosts."""
        count, lanes = len(self._hosts), self._lanes
        alone_s = alone.bulk.seconds / alone.bulk_bytes
        most = int(_SHARED_S / alone_s)  # many ranks wake up late: more bytes make that matter less
        nbytes = max(alone.bulk_bytes, min(lanes * alone.bulk_bytes, most)) // lanes // 4 * 4
        pairs: list[dict[int, float]] = [{} for _ in self._hosts]  # by host and partner

        def measure(against: dict[int, int], times: int) -> None:
            partners = {self._hosts[a][lane]: self._hosts[b][lane] for a, b in against.items() for lane in range(lanes)}
            seconds = self._steady(self._exchange(partners, nbytes), self._following, times)
            for a, b in against.items():
                _, taken_s = seconds(rank for host in (a, b) for rank in self._hosts[host][:lanes])
                taken = taken_s / (nbytes * lanes)
                pairs[a][b] = min(taken, pairs[a].get(b, taken))

        rounds = _tournament(count)[:_OPPONENTS]
        for against in rounds:
            measure(against, 2 if count < 4 else 1)  # with many pairs, the median evens out how late ranks wake up
        slow = slow_pairs(pairs)
        for against in rounds:
            if not slow.keys().isdisjoint(against.items()):  # or a rank woke up late
                measure(against, 1)
        if self._shares_cores and lanes == 1:
            pairs = without_waiting(pairs, alone_s)
        links = (SlowLink((self._hosts[a][0], self._hosts[b][0]), taken) for (a, b), taken in slow_pairs(pairs).items())
        return Uplinks(tuple(uplinks_of(pairs)), tuple(links), of_one_rank=lanes == 1)

    def _together(self, bulk_bytes: int, uplinks: Uplinks | None) -> Together:
        """Measure all ranks at once. bulk_bytes: bytes of a bulk message."""
        few, many = (self._allreduce(name, _SMALL_BYTES) for name in ("recursive_doubling", "ring"))
        calls = max(1, min(8, int(_ROW_S / self._timed(many, 1))))
        few_s, many_s = self._timed(few, calls=calls), self._timed(many, calls=calls)
        nested = self._lanes > 1 and len(self._hosts) > 1
        nbytes = min(
            4 * _MOST_BYTES, self._size * bulk_bytes, _SEGMENTS * self._size * self._engine.plans.segment_bytes
        )
        if uplinks is not None:
            nbytes = max(_LEAST_BYTES, min(nbytes, int(_LARGE_S / (2 * max(uplinks.byte_s)))))

        def at_once(programs: Programs) -> Timed:
            return Timed(programs, self._steady(programs, self._following, 2)(range(self._size))[1])

        def additions(place: Place) -> Schedule:
            return Schedule(place.rank, self._size, self._lanes, hierarchical.inside(place))

        inside = at_once(self._of_buffer(additions, _ADDED_BYTES)) if nested else None
        large = at_once(self._allreduce("hierarchical" if nested else "ring", nbytes))
        return Together(Timed(few, few_s), Timed(many, many_s), inside, large)


def _seconds(call: Callable[[], object], clock: Callable[[], int] = _CLOCK) -> float:
    began = clock()
    call()
    return (clock() - began) / 1e9


def _tournament(count: int) -> list[dict[int, int]]:
    """Return the rounds of a tournament of `count` players. In each round, every player has another partner; if `count` is odd,
    each player has no partner in one round."""
    places = [*range(count), *([-1] if count % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        pairs = [(places[i], places[-1 - i]) for i in range(len(places) // 2)]
        rounds.append({a: b for pair in pairs if -1 not in pair for a, b in (pair, pair[::-1])})
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def _repeat(call: Callable[[], None], times: int) -> None:
    for _ in range(times):
        call()
