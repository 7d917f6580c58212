"""Measure the costs of messages between the ranks of a Communicator, with programs like those of its operations.

The whole measurement is one operation, so that a lost rank, a stall or a different call is detected as in any other operation.
Each rank measures how long its own part of each program took. The ranks then exchange these times, and compute the same Costs
from them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.reduction import COMBINE
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Round, Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import WHOLE, Span, consecutive
from gradwire.collectives.schedules.topology import Machine, Topology
from gradwire.collectives.tuning.calibration import EQUAL, Pair, link_of, slow_pairs, uplinks_of, without_waiting
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

#: How many bulk messages follow the first one: more if several ranks of a host take part and share cores, since these wake up
#: late. _TIMES_ALONE: how often the bulk messages of two ranks are measured alone.
_FOLLOWING, _FOLLOWING_OF_MANY, _TIMES_ALONE = 2, 4, 3

#: A link has bursts if a pause shortens a bulk message by more than this share.
_BURST = 0.05

_CLOCK = time.perf_counter_ns


def measure_links(engine: Engine, topology: Topology, machines: Sequence[Machine]) -> Costs:
    """Measure the links, and return their costs, the same on all ranks. A collective call; raises the errors of an operation."""
    like = torch.empty(1, dtype=torch.float32, device="cpu")
    engine.prepare("allreduce", "ring", like, 1)  # which compiles what adds
    costs: list[Costs] = []

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
        self._turn = tag, deadline
        self._machines = machines
        self._hosts = topology.hosts
        self._rank, self._size = engine.rank, engine.size
        # Zeros, since additions of denormal numbers take longer; written, so that memory backs them. All ranks send zeros.
        self._buffer = torch.empty(2 * _MOST_BYTES // 4, dtype=torch.float32, device="cpu").zero_()

    def costs(self) -> Costs:
        """Measure, and return the costs."""
        if self._size > 1:  # the first use of a connection is slower
            after, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size
            ring = send(after, (Span(0, 1),)) + receive(before, (Span(1, 2),))
            self._timed(self._program([_LEAST_BYTES] * 2, [ring]), 1)
        costs = self._alone()
        inside = next((host[:2] for host in self._hosts if len(host) > 1), None)
        if inside is not None:
            costs = replace(costs, inside=link_of(self._pair(inside, None)[0], costs.call_s))
        if len(self._hosts) > 1:
            pair, burst_bytes = self._pair((self._hosts[0][0], self._hosts[1][0]), costs.reduce_byte_s)
            costs = replace(costs, between=link_of(pair, costs.call_s), burst_bytes=burst_bytes)
            costs = self._with_uplinks(costs, pair)
        return costs

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
        return [row[0] / 1e9 for row in self._engine.table([round(seconds * 1e9)], *self._turn)]

    def _prepared(self, program: Program) -> Callable[[], None]:
        """Return what runs a program once."""
        run = self._engine.follow("tune", "of a pair", program, self._buffer, self._buffer.numel())
        return lambda: run(self._buffer, self._buffer, *self._turn)

    def _timed(self, program: Program, times: int = _TIMES) -> float:
        """Return the seconds that the program takes on the slowest rank: the lower quartile of `times` measurements, or of at
        least three if they take long. times=1 measures once."""

        call = self._prepared(program)

        def once() -> float:
            self._engine.meet(*self._turn)
            return _seconds(call)

        taken = [once()]
        first = max(self._everyones(taken[0]))
        if times == 1:
            return first
        taken += [once() for _ in range(min(times - 1, max(2, int(_ENOUGH_S / first))))]
        return max(self._everyones(sorted(taken)[len(taken) // 4]))

    def _steady(
        self, program: Program, following: int, times: int, pause_s: float = 0.0
    ) -> Callable[[Iterable[int]], tuple[float, float]]:
        """Return a function that takes ranks and returns the seconds of a first call of the program, after a pause of
        pause_s, and the mean seconds of `following` calls right after it. Both come from each rank's minimum of `times`
        measurements. The time of the first call is subtracted from that of all calls: timed alone, a second call would seem
        too fast on a rank that wakes up late after the first, since the other ranks have already begun it."""
        call = self._prepared(program)
        first, all_of_them = [], []
        for _ in range(times):
            time.sleep(pause_s)
            self._engine.meet(*self._turn)
            began = _CLOCK()
            call()
            first.append(_CLOCK() - began)
            _repeat(call, following)
            all_of_them.append(_CLOCK() - began)
        table = self._engine.table([min(first), min(all_of_them)], *self._turn)

        def seconds(ranks: Iterable[int]) -> tuple[float, float]:
            first_ns, all_ns = (max(column) for column in zip(*(table[rank] for rank in ranks), strict=True))
            return first_ns / 1e9, (all_ns - first_ns) / 1e9 / following

        return seconds

    def _program(self, lengths: Sequence[int], rounds: Sequence[Round]) -> Program:
        """Return a program of this rank's rounds over blocks. lengths: bytes of each block."""
        layout = consecutive([length // 4 for length in lengths])
        return Program(Schedule(self._rank, self._size, len(layout), tuple(rounds)), [layout])

    def _exchange(self, partners: Mapping[int, int], nbytes: int) -> Program:
        """Return a program in which pairs of ranks exchange a block."""
        peer = partners.get(self._rank)
        steps = () if peer is None else send(peer, (Span(0, 1),)) + receive(peer, (Span(1, 2),))
        return self._program([nbytes, nbytes], [steps])

    # Two ranks, while all others are idle

    def _pair(self, pair: Sequence[int], copying_byte_s: float | None) -> tuple[Pair, int]:
        """Measure two ranks, and return also the bytes of a burst of their link. copying_byte_s: None for two ranks of a host;
        else the least time that a processor needs for a byte."""
        one, other = pair
        partners = {one: other, other: one}
        peer = partners.get(self._rank)
        swap: Round = ()
        streamed: Round = ()
        back: Round = ()
        if peer is not None:
            move, other_way = (send, reduce) if self._rank == one else (reduce, send)
            swap = send(peer, WHOLE) + reduce(peer, WHOLE)
            streamed = sum((move(peer, (Span(i, i + 1),)) for i in range(_STREAM)), ())
            back = other_way(peer, WHOLE)
        swaps_s = self._timed(self._program([4], [swap] * _STREAM))
        stream_s = self._timed(self._program([8] * 2 * _STREAM, [streamed, back]))
        nbytes = _LEAST_BYTES
        while (taken := self._timed(self._exchange(partners, nbytes), 1)) < _BULK_S and nbytes < _MOST_BYTES:
            # Not more at once: a burst makes the first message look faster than the link is.
            nbytes = min(nbytes * (4 if taken < _BULK_S / 4 else 2), _MOST_BYTES)
        bulk = self._exchange(partners, nbytes)
        pause_s = 0.0 if copying_byte_s is None else _PAUSE_S
        first_s, bulk_s = self._steady(bulk, _FOLLOWING, _TIMES_ALONE, pause_s)(range(self._size))
        if copying_byte_s is None:
            return Pair(_STREAM, swaps_s, stream_s, bulk_s, nbytes, None), 0
        moving_byte_s = max(copying_byte_s, self._moving_byte_s(bulk, pair, nbytes))
        saved = max(0.0, 1 - first_s / bulk_s)
        return Pair(_STREAM, swaps_s, stream_s, bulk_s, nbytes, moving_byte_s), round(
            saved * nbytes
        ) if saved > _BURST else 0

    def _moving_byte_s(self, bulk: Program, pair: Sequence[int], nbytes: int) -> float:
        """Return the processor's seconds to send or to receive a byte, by the thread's CPU clock while waits sleep instead of
        polling. The time of a message does not show these seconds if the link is slower than the processor, but predictions
        need them for ranks that share cores or encode."""
        call = self._prepared(bulk)
        self._engine.meet(*self._turn)
        with ThreadPoolExecutor(1) as beside:  # only the main thread polls while it waits
            mine = beside.submit(lambda: _seconds(lambda: _repeat(call, 2), time.thread_time_ns)).result()
        taken = self._everyones(mine)
        return min(taken[rank] for rank in pair) / (4 * nbytes)

    # All ranks

    def _with_uplinks(self, costs: Costs, alone: Pair) -> Costs:
        """Measure the uplink of every host, and return the costs with them: pairs of hosts exchange bulk messages, all pairs at
        once, over all ranks that have a partner. alone: the measurement of the first pair of hosts."""
        count, lanes = len(self._hosts), min(map(len, self._hosts))
        shares_cores = any(len(cores.ranks) > cores.number for cores in costs.cores)
        following = _FOLLOWING_OF_MANY if lanes > 1 and shares_cores else _FOLLOWING
        alone_s = alone.bulk_s / alone.bulk_bytes
        most = int(_SHARED_S / alone_s)  # many ranks wake up late: more bytes make that matter less
        nbytes = max(alone.bulk_bytes, min(lanes * alone.bulk_bytes, most)) // lanes // 4 * 4
        pairs: list[dict[int, float]] = [{} for _ in self._hosts]  # by host and partner

        def measure(against: dict[int, int], times: int) -> None:
            partners = {self._hosts[a][lane]: self._hosts[b][lane] for a, b in against.items() for lane in range(lanes)}
            seconds = self._steady(self._exchange(partners, nbytes), following, times)
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
        if shares_cores and lanes == 1:
            pairs = without_waiting(pairs, alone_s)
        links = (SlowLink((self._hosts[a][0], self._hosts[b][0]), taken) for (a, b), taken in slow_pairs(pairs).items())
        uplinks, link = uplinks_of(pairs), costs.between
        if lanes == 1 or link.byte_s < EQUAL * min(uplinks):  # a connection is as fast as its uplink
            link = replace(link, byte_s=min(link.byte_s, *uplinks))
        return replace(costs, uplinks=tuple(uplinks), slow_links=tuple(links), between=link)


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
