"""Measure the costs of messages between the ranks of a Communicator, with programs like those of its operations.

The whole measurement is one operation, so that a lost rank, a stall or a different call is detected as in any other operation.
Each rank measures how long its own part of each program took. The ranks then exchange these times. Rank 0 computes the Costs
from them (plan.fitting), and all ranks use the Costs of rank 0, equal to the bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.rehearsal import speed_of
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.operations import Turn
from gradwire.collectives.reduction import COMBINE
from gradwire.collectives.schedules.algorithms import PLANNERS, hierarchical
from gradwire.collectives.schedules.cost import CodecCost, Cores, Costs, LinkCost, SlowLink, slowness
from gradwire.collectives.schedules.fitting import (
    Pair,
    Timed,
    Together,
    Uplinks,
    costs_of,
    slow_pairs,
    uplinks_of,
    without_waiting,
)
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Place, Round, Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import WHOLE, Span, consecutive, segments_of_buffer
from gradwire.collectives.schedules.topology import Machine, Topology

#: How often a small program runs, for about how many seconds at most, and how many messages it sends one after the other.
_TIMES, _ENOUGH_S, _STREAM = 8, 0.02, 16

#: A bulk message grows from the least to the most bytes until it takes this many seconds. By then, a link that allows bursts
#: is at its lasting rate.
_LEAST_BYTES, _MOST_BYTES, _BULK_S = 128 << 10, 4 << 20, 0.004

#: The pause after which a link that allows bursts allows another one.
_PAUSE_S = 0.02

#: The maximum number of other hosts with which each host is measured, and how long the bulk messages of several ranks may take.
_OPPONENTS, _SHARED_S = 7, 0.01

_CLOCK = time.perf_counter_ns

#: Bytes of the small allreduce; the most segments of the large one, and about how long it may take on the links.
_SMALL_BYTES, _SEGMENTS, _LARGE_S = 1 << 10, 8, 0.015

#: Bytes of the additions inside hosts.
_ADDED_BYTES = 1 << 20

#: How many bulk messages follow the first one: more if several ranks of a host take part and share cores, since these wake up
#: late. _TIMES_ALONE: how often the bulk messages of two ranks are measured alone.
_FOLLOWING, _FOLLOWING_OF_MANY, _TIMES_ALONE = 2, 4, 3

#: How long a row of small allreduces, at most eight, may take.
_ROW_S = 0.004


class Probe:
    """The measurement on one rank."""

    def __init__(self, engine: Engine, topology: Topology, machines: Sequence[Machine]) -> None:
        self._engine = engine
        self._machines = machines
        self._hosts = topology.hosts
        self._rank, self._size = engine.rank, engine.size
        self._leaders = [host[0] for host in topology.hosts]
        self._lanes = min(len(host) for host in topology.hosts)
        names = [machine.name for machine in machines]
        self._shares_cores = any(names.count(machine.name) > machine.cores for machine in machines)
        self._following = _FOLLOWING_OF_MANY if self._lanes > 1 and self._shares_cores else _FOLLOWING
        self._costs: Costs | None = None
        self._buffer = torch.empty(_MOST_BYTES, dtype=torch.float32, device="cpu")  # float32
        self._filled = 0

    def run(self, known: Costs | None = None, codecs: Sequence[Codec] = (), device: str = "cpu") -> Costs:
        """Measure the links, unless `known` gives their costs, and codecs on a device of this type. This is a collective call
        and raises the errors of an operation."""
        self._engine.prepare_to_reduce(torch.float32)
        self._engine.prepare_to_reduce(torch.uint8)
        for codec in codecs:
            self._engine.prepare_codec(codec, torch.device(device), with_feedback=codec.needs_feedback)

        def body(turn: Turn) -> None:
            self._turn = turn
            costs = known or self._links()
            speeds = [self._speed(codec, torch.device(device)) for codec in codecs]
            by_identity = {speed.identity: speed for speed in (*costs.codecs, *speeds)}
            self._costs = replace(costs, codecs=tuple(by_identity.values()))

        self._engine.submit(", ".join(["tune", *(codec.identity for codec in codecs)]), body, async_op=False)
        assert self._costs is not None
        return self._costs

    def _speed(self, codec: Codec, device: torch.device) -> CodecCost:
        """Measure a codec on all ranks at once, and return the cost on the median rank, which slowness() refers to."""
        self._engine.meet(self._turn)
        mine = speed_of(codec, device)
        table = self._engine.table(
            self._turn, [round(1e18 * each) for each in (mine.encode_byte_s, mine.decode_byte_s)]
        )
        encode, decode = (statistics.median_low(column) / 1e18 for column in zip(*table, strict=True))
        return CodecCost(codec.identity, encode, decode)

    def _links(self) -> Costs:
        self._timed(self._allreduce("ring", _LEAST_BYTES), 1)  # the first use of a connection is slower
        alone = self._alone()
        inside = next((self._pair(host[:2], inside=True) for host in self._hosts if len(host) > 1), None)
        between = self._pair(self._leaders[:2], inside=False) if len(self._hosts) > 1 else None
        uplinks = self._uplinks(between) if between is not None else None
        pair = between or inside
        together = self._together(pair.bulk_bytes, uplinks) if pair is not None else None
        mine = costs_of(alone, inside, between, uplinks, together).to_json() if self._rank == 0 else None
        return Costs.from_json(self._engine.text_of_rank_0(self._turn, mine), "of rank 0")

    # Exchange of measured times

    def _table(self, seconds: float) -> list[float]:
        """Return the seconds that each rank has measured, by rank."""
        return [row[0] / 1e9 for row in self._engine.table(self._turn, [round(seconds * 1e9)])]

    def _alone(self) -> Costs:
        """Return the costs of all ranks that each rank can measure by itself."""
        self._fill(_LEAST_BYTES // 4)
        block = self._buffer[: _LEAST_BYTES // 4]
        adding_s = min(_seconds(lambda: COMBINE["sum"](block, block, out=block), time.thread_time_ns) for _ in range(9))
        nothing = Program(Schedule(self._rank, self._size, 1, ()), [(Span(0, 0),)])
        calls = self._table(min(_seconds(lambda: self._follow(nothing), _CLOCK) for _ in range(9)))
        adding = self._table(adding_s)
        usual_s = statistics.median_low(adding)
        copying = LinkCost(0.0, 0.0, 0.0, usual_s / _LEAST_BYTES)
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
            reduce_byte_s=usual_s / _LEAST_BYTES,
        )

    # Programs and their times

    def _fill(self, numel: int) -> None:
        """Set the first numbers of the buffer to zeros, so that memory backs them, and additions meet no denormal numbers. They
        stay zeros, since all ranks send zeros."""
        if numel > self._filled:
            self._buffer[self._filled : numel] = 0.0
            self._filled = numel

    def _follow(self, program: Program, calls: int = 1) -> None:
        for _ in range(calls):
            self._engine.over_program(self._turn, program, self._buffer, self._buffer)

    def _timed(self, programs: Sequence[Program], times: int = _TIMES, calls: int = 1) -> float:
        """Return the seconds that one call of the programs takes on the slowest rank: the lower quartile of `times`
        measurements, or of at least three if they take long. times=1 measures once. calls: how many calls in a row each
        measurement makes."""
        mine = programs[self._rank]

        def once() -> float:
            self._engine.meet(self._turn)
            return _seconds(lambda: self._follow(mine, calls), _CLOCK)

        taken = [once()]
        first = max(self._table(taken[0]))
        if times == 1:
            return first / calls
        taken += [once() for _ in range(min(times - 1, max(2, int(_ENOUGH_S / first))))]
        return max(self._table(sorted(taken)[len(taken) // 4])) / calls

    def _programs(self, lengths: Sequence[int], rounds: Callable[[int], Sequence[Round]]) -> Sequence[Program]:
        """Return the programs of all ranks for rounds over blocks, and fill the part of the buffer that they use. lengths: bytes
        of each block."""
        layout = consecutive([length // 4 for length in lengths])
        self._fill(sum(lengths) // 4)
        return _LazyPrograms(
            self._size, lambda rank: Program(Schedule(rank, self._size, len(layout), tuple(rounds(rank))), [layout])
        )

    def _exchange(self, partners: dict[int, int], nbytes: int) -> Sequence[Program]:
        """Return programs in which pairs of ranks exchange a block."""

        def rounds(rank: int) -> Sequence[Round]:
            if rank not in partners:
                return ((),)
            partner = partners[rank]
            return (send(partner, (Span(0, 1),)) + receive(partner, (Span(1, 2),)),)

        return self._programs([nbytes, nbytes], rounds)

    def _pair(self, pair: Sequence[int], *, inside: bool) -> Pair:
        """Measure the cost of a message between two ranks while all others are idle."""
        one, other = pair

        def swaps(rank: int) -> Sequence[Round]:
            peer = {one: other, other: one}.get(rank)
            return (() if peer is None else send(peer, WHOLE) + reduce(peer, WHOLE),) * _STREAM

        def stream(rank: int) -> Sequence[Round]:
            if rank == one:
                return [sum((send(other, (Span(i, i + 1),)) for i in range(_STREAM)), ()), reduce(other, WHOLE)]
            if rank == other:
                return [sum((reduce(one, (Span(i, i + 1),)) for i in range(_STREAM)), ()), send(one, WHOLE)]
            return [(), ()]

        swapping, streaming = self._programs([4], swaps), self._programs([8] * 2 * _STREAM, stream)
        swapped, streamed = Timed(swapping, self._timed(swapping)), Timed(streaming, self._timed(streaming))
        nbytes, bulk, saved_s = self._bulk({one: other, other: one}, 0.0 if inside else _PAUSE_S)
        moving_byte_s = None if inside else self._moving_byte_s(bulk.programs, pair, nbytes)
        return Pair(swapped, streamed, _STREAM, bulk, nbytes, saved_s, moving_byte_s)

    def _moving_byte_s(self, bulk: Sequence[Program], pair: Sequence[int], nbytes: int) -> float:
        """Return the processor's seconds to send or to receive a byte, by the thread's CPU clock while waits sleep instead of
        polling. The time of a message does not show these seconds if the link is slower than the processor, but predictions
        need them for ranks that share cores or encode."""
        wait_beside_work = self._engine.operations.wait_beside_work
        self._engine.meet(self._turn)
        wait_beside_work(True)
        taken = _seconds(lambda: self._follow(bulk[self._rank], 2), time.thread_time_ns)
        wait_beside_work(False)  # the next turn does the same
        table = self._table(taken)
        return min(table[rank] for rank in pair) / (4 * nbytes)

    def _bulk(self, partners: dict[int, int], pause_s: float) -> tuple[int, Timed, float]:
        """Return the bytes of a bulk message, its timed programs, and how many fewer seconds they take after a pause of pause_s,
        0 without a pause."""
        nbytes = _LEAST_BYTES
        while (taken := self._timed(self._exchange(partners, nbytes), 1)) < _BULK_S and nbytes < _MOST_BYTES:
            # Not more at once: a burst makes the first message look faster than the link is.
            nbytes = min(nbytes * (4 if taken < _BULK_S / 4 else 2), _MOST_BYTES)
        programs = self._exchange(partners, nbytes)
        first_s, seconds = self._steady(programs, _FOLLOWING, _TIMES_ALONE, pause_s)(range(self._size))
        return nbytes, Timed(programs, seconds), max(0.0, seconds - first_s) if pause_s else 0.0

    def _steady(
        self, programs: Sequence[Program], following: int, times: int, pause_s: float = 0.0
    ) -> Callable[[Iterable[int]], tuple[float, float]]:
        """Return a function that takes ranks and returns the seconds of a first call of their programs, after a pause of
        pause_s, and the mean seconds of `following` calls right after it. Both come from each rank's minimum of `times`
        measurements. The time of the first call is subtracted from that of all calls: timed alone, a second call would seem
        too fast on a rank that wakes up late after the first, since the other ranks have already begun it."""
        mine = programs[self._rank]
        first, all_of_them = [], []
        for _ in range(times):
            time.sleep(pause_s)
            self._engine.meet(self._turn)
            began = _CLOCK()
            self._follow(mine)
            first.append(_CLOCK() - began)
            self._follow(mine, following)
            all_of_them.append(_CLOCK() - began)
        table = self._engine.table(self._turn, [min(first), min(all_of_them)])

        def seconds(ranks: Iterable[int]) -> tuple[float, float]:
            first_ns, all_ns = (max(column) for column in zip(*(table[rank] for rank in ranks), strict=True))
            return first_ns / 1e9, (all_ns - first_ns) / 1e9 / following

        return seconds

    def _uplinks(self, alone: Pair) -> Uplinks:
        """Measure the uplink of every host: pairs of hosts exchange bulk messages, all pairs at once, over all ranks that have
        a partner. alone: the measurement of the first pair of hosts."""
        count = len(self._hosts)
        alone_s = alone.bulk.seconds / alone.bulk_bytes
        lanes, most = self._lanes, int(_SHARED_S / alone_s)  # many ranks wake up late: more bytes make that matter less
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
        once_s = self._timed(many, 1)
        calls = max(1, min(8, int(_ROW_S / once_s)))
        few_s, many_s = self._timed(few, calls=calls), self._timed(many, calls=calls)
        nested = self._lanes > 1 and len(self._hosts) > 1
        most = _SEGMENTS * self._size * self._engine.plans.segment_bytes
        nbytes = min(4 * _MOST_BYTES, self._size * bulk_bytes, most)
        if uplinks is not None:
            nbytes = max(_LEAST_BYTES, min(nbytes, int(_LARGE_S / (2 * max(uplinks.byte_s)))))
        inside = self._at_once(self._additions()) if nested else None
        large = self._at_once(self._allreduce("hierarchical" if nested else "ring", nbytes))
        return Together(Timed(few, few_s), Timed(many, many_s), inside, large)

    def _at_once(self, programs: Sequence[Program]) -> Timed:
        _, seconds = self._steady(programs, self._following, 2)(range(self._size))
        return Timed(programs, seconds)

    def _additions(self) -> Sequence[Program]:
        """Return programs that add buffers inside hosts, on all hosts."""

        def additions(place: Place) -> Schedule:
            return Schedule(place.rank, self._size, self._lanes, hierarchical.inside(place))

        return self._of_buffer(additions, _ADDED_BYTES)

    def _allreduce(self, algorithm: str, nbytes: int) -> Sequence[Program]:
        return self._of_buffer(PLANNERS["allreduce"][algorithm], nbytes)

    def _of_buffer(self, planner: Callable[[Place], Schedule], nbytes: int) -> Sequence[Program]:
        """Return the programs of all ranks for a plan over a buffer, in segments, and fill the buffer."""
        self._fill(nbytes // 4)

        def program(rank: int) -> Program:
            schedule = planner(Place(rank, self._size, 0, self._hosts))
            segments = segments_of_buffer(nbytes // 4, schedule.blocks, self._engine.plans.segment_bytes // 4)
            return Program(schedule, segments)

        return _LazyPrograms(self._size, program)


class _LazyPrograms(Sequence[Program]):
    """The programs of all ranks, each built at its first use: only rank 0 uses those of other ranks."""

    def __init__(self, size: int, program: Callable[[int], Program]) -> None:
        self._size, self._program = size, cache(program)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: int) -> Program:  # type: ignore[override]  # no slices
        if not 0 <= rank < self._size:
            raise IndexError(rank)
        return self._program(rank)


def _seconds(call: Callable[[], object], clock: Callable[[], int]) -> float:
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
