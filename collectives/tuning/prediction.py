"""Predict the time of calls: by the simulator, corrected by the measured times of calls of the nearest sizes.

The simulator ignores wake-ups, caches, and the verb's own work.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy

from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.partition import effective
from gradwire.collectives.engine.schedule_cache import ScheduleCache, legal_algorithms
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Schedule
from gradwire.collectives.schedules.spans import Layout, Span, segments_of_blocks, segments_of_buffer, split
from gradwire.collectives.schedules.topology import Topology
from gradwire.collectives.tuning.cost_model import Costs
from gradwire.collectives.tuning.simulator import Leg, busiest_uplink_s, in_segments, price

#: Verbs whose algorithms may divide a buffer freely; in all other verbs block r belongs to rank r.
_OF_BUFFERS = ("allreduce", "broadcast", "reduce", "barrier")

#: Beyond a measured call of at least this size, the simulator is off by the same share as at that call, apart from the fixed
#: time per call that it misses.
_MANY_BYTES = 1 << 20


def predict(costs: Costs, verb: str, algorithm: str, nbytes: int, segment_bytes: int, *, itemsize: int = 4) -> float:
    """Return the seconds of a call that moves plain numbers.

    nbytes: of the buffer, or of all parts together if each rank has one. segment_bytes: see Communicator. Raises KeyError for
    an algorithm without a planner that was not measured.
    """
    measured = costs.measured(verb, algorithm)
    if algorithm not in PLANNERS[verb]:
        if not measured:
            raise KeyError(f"{verb}'s {algorithm!r} is not a Program, and was not measured")
        return _interpolated(measured, nbytes)
    call = (replace(costs, calls=()), verb, algorithm, itemsize)
    # A call may be quicker than its links if these have saved up for a burst. Calls that follow each other are not.
    least_s = _busiest(*call, max(segment_bytes, nbytes), nbytes) if costs.burst_bytes else 0.0
    return corrected(costs, measured, nbytes, partial(_in_segments, *call, segment_bytes), least_s)


def predict_auto(schedules: ScheduleCache, costs: Costs, nbytes: int, itemsize: int) -> float:
    """Return the seconds of an allreduce of plain numbers by the algorithm that 'auto' selects."""
    name = schedules.choose("allreduce", "auto", nbytes, on_gpu=False)
    return predict(costs, "allreduce", name, nbytes, schedules.segment_bytes, itemsize=itemsize)


def predict_coded(schedules: ScheduleCache, costs: Costs, numel: int, codec: Codec) -> float:
    """Return the seconds of an allreduce of `numel` float32 numbers that travel as codes, the same on all ranks. Raises KeyError
    for a codec, or an algorithm of the link's own, that was not measured."""
    if codec.summable:
        cost = costs.codec(codec.identity)

        def simulated(nbytes: int) -> float:
            coding_s = nbytes * (cost.encode_byte_s + cost.decode_byte_s)
            return coding_s + predict_auto(schedules, costs, codec.wire_bytes(nbytes // 4), codec.wire_dtype.itemsize)

        least_s = 0.0
    else:
        every = [schedules_of(costs.hosts, rank, schedules.segment_bytes) for rank in range(costs.size)]

        def legs(numel: int) -> list[list[Leg]]:
            return [coded_legs(of_rank, codec, numel, shot_of(codec)) for of_rank in every]

        def chunks(numel: int) -> int:  # as rank 0 cuts the buffer: a rank without a part has no chunks
            return len(every[0].partition(codec, numel).chunks)

        def simulated(nbytes: int) -> float:
            count = chunks(nbytes // 4)
            return in_segments(count, lambda number: price(costs, legs(nbytes // 4 * number // count)))

        count = chunks(numel)
        least_s = count * busiest_uplink_s(costs, legs(numel // count)) if costs.burst_bytes else 0.0
    return corrected(costs, costs.measured("allreduce", codec.identity), 4 * numel, simulated, least_s)


def schedules_of(hosts: tuple[tuple[int, ...], ...], rank: int, segment_bytes: int) -> ScheduleCache:
    """Return the schedules of a rank on these hosts, without algorithms of a link's own."""
    return ScheduleCache(Topology(rank, hosts), legal_algorithms({}), {}, segment_bytes)


def coded_legs(schedules: ScheduleCache, codec: Codec, numel: int, algorithm: str) -> list[Leg]:
    """Return the programs of one rank for an allreduce of codes. schedules: of this rank."""
    partition = schedules.partition(codec, numel, algorithm)
    used = effective(codec, partition)
    if partition.group:
        program = schedules.of_codes(codec, numel, algorithm, used.wire_bytes(partition.longest), grouped=False)
        legs = [Leg(program, 4, used.identity, used.wire_bytes)]
    else:  # a rank without a part
        nothing = Schedule(schedules.topology.rank, schedules.topology.size, 1, ())
        legs = [Leg(Program(nothing, [(Span(0, 0),)]), 4)]
    if partition.inside_hosts:
        first, last = (schedules.inside_hosts(which, partition.parts, 4, grouped=False) for which in (0, 1))
        legs = [Leg(first, 4), *legs, Leg(last, 4)]
    return legs


def corrected(
    costs: Costs,
    measured: Sequence[tuple[int, float]],
    nbytes: int,
    simulated: Callable[[int], float],
    least_s: float,
) -> float:
    """Return the seconds of a call: the simulated ones, corrected by measured calls of the nearest sizes.

    measured: bytes and seconds of calls, ascending. simulated: returns the simulated seconds for a number of bytes. Inside a
    host, a call takes a time that is the same for all sizes, plus the simulated seconds times a factor, which is interpolated by
    size because caches matter. Between hosts, a call takes the simulated seconds plus what they lack of the measured calls,
    interpolated by size. Beyond the largest measured call, if that has at least _MANY_BYTES, the simulated seconds are
    multiplied instead, by the factor at that call. Between hosts, no call takes less than least_s or than the shortest measured
    call.
    """
    seconds = simulated(nbytes)
    if not measured:
        return max(least_s, seconds)
    sizes = [size for size, _ in measured]
    known = [simulated(size) for size in sizes]
    shortest_s = min(took for _, took in measured)
    if len(costs.hosts) == 1:
        per_call_s = max(0.0, shortest_s - known[0])
        factors = [(took - per_call_s) / known_s for (_, took), known_s in zip(measured, known, strict=True)]
        factor = float(numpy.interp(math.log(max(1, nbytes)), [math.log(size) for size in sizes], factors))
        predicted = per_call_s + factor * seconds
        above = bisect.bisect_left(sizes, nbytes)
        if 0 < above < len(sizes):  # a call between two measured sizes takes a time between theirs
            fewer_s, more_s = sorted((measured[above - 1][1], measured[above][1]))
            predicted = min(max(predicted, fewer_s), more_s)
        return predicted
    least_s = max(least_s, shortest_s)
    missed = [took - known_s for (_, took), known_s in zip(measured, known, strict=True)]
    if nbytes > sizes[-1] >= _MANY_BYTES:
        per_call_s = missed[bisect.bisect_left(sizes, _MANY_BYTES) - 1] if sizes[0] < _MANY_BYTES else 0.0
        return max(least_s, per_call_s + (measured[-1][1] - per_call_s) / known[-1] * seconds)
    return max(least_s, seconds + float(numpy.interp(nbytes, sizes, missed)))


def _interpolated(measured: Sequence[tuple[int, float]], nbytes: int) -> float:
    """Return the seconds of a call, interpolated from measured calls of other sizes."""
    above = next((i for i, (n, _) in enumerate(measured) if n >= nbytes), len(measured) - 1)
    (low, low_s), (high, high_s) = measured[max(0, above - 1)], measured[above]
    slope = (high_s - low_s) / (high - low) if high > low else 0.0
    return max(measured[0][1], high_s + slope * (nbytes - high))


def _in_segments(costs: Costs, verb: str, algorithm: str, itemsize: int, segment_bytes: int, nbytes: int) -> float:
    """Return the simulated seconds of a call."""
    blocks = PLANNERS[verb][algorithm](costs.place(0)).blocks if verb in _OF_BUFFERS else costs.size
    count = max(1, -(-nbytes // (segment_bytes * blocks)))
    call = (costs, verb, algorithm, itemsize, segment_bytes)
    return in_segments(count, lambda number: _priced(*call, nbytes if number == count else nbytes // count * number))


@lru_cache(maxsize=4096)
def _priced(costs: Costs, verb: str, algorithm: str, itemsize: int, segment_bytes: int, nbytes: int) -> float:
    return price(costs, legs_of(costs, verb, algorithm, itemsize, segment_bytes, nbytes))


@lru_cache(maxsize=4096)
def _busiest(costs: Costs, verb: str, algorithm: str, itemsize: int, segment_bytes: int, nbytes: int) -> float:
    return busiest_uplink_s(costs, legs_of(costs, verb, algorithm, itemsize, segment_bytes, nbytes))


def legs_of(costs: Costs, verb: str, algorithm: str, itemsize: int, segment_bytes: int, nbytes: int) -> list[list[Leg]]:
    """Return by rank the programs of a call."""
    segment, numel = max(1, segment_bytes // itemsize), nbytes // itemsize
    schedules = [PLANNERS[verb][algorithm](costs.place(rank)) for rank in range(costs.size)]
    segments: tuple[Layout, ...]
    if verb in _OF_BUFFERS:
        segments = segments_of_buffer(numel, schedules[0].blocks, segment)
    else:
        segments = segments_of_blocks(split(Span(0, numel), costs.size), segment)
    return [[Leg(Program(schedule, segments), itemsize)] for schedule in schedules]
