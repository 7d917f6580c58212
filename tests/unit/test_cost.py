"""What programs cost by the model: against times worked out by hand, and what must hold whatever the numbers."""

from __future__ import annotations

import json
from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Round, Schedule, receive, send
from gradwire.collectives.schedules.spans import Span
from gradwire.collectives.tuning.calibration import (
    Pair,
    calibrated,
    link_of,
    slow_pairs,
    uplinks_of,
    without_waiting,
)
from gradwire.collectives.tuning.cost_model import (
    CodecCost,
    Cores,
    Costs,
    LinkCost,
    SlowLink,
    TuningError,
    slowness,
)
from gradwire.collectives.tuning.prediction import coded_legs, legs_of, predict, schedules_of
from gradwire.collectives.tuning.simulator import Leg, price

FREE = LinkCost(0.0, 0.0, 0.0, 0.0)
ALL = (Span(0, 1),)


def costs(*hosts: tuple[int, ...], byte_s: float = 1e-3, latency_s: float = 0.25, cores: int = 64) -> Costs:
    """Return costs in which only the wire between hosts takes time: 1 ms a byte, and a quarter of a second a message."""
    size = sum(map(len, hosts))
    return Costs(
        hosts=hosts,
        machines=("a machine",) * len(hosts),
        inside=FREE,
        between=replace(FREE, latency_s=latency_s, byte_s=byte_s),
        uplinks=(byte_s,) * len(hosts),
        cores=(Cores(tuple(range(size)), cores),),
        slowness=(1.0,) * size,
        call_s=0.0,
        reduce_byte_s=0.0,
    )


def leg_of(rank: int, size: int, nbytes: int, *rounds: Round) -> list[Leg]:
    return [Leg(Program(Schedule(rank, size, 1, rounds), [(Span(0, nbytes),)]), 1)]


def ring(by: Costs, nbytes: int) -> float:
    return predict(by, "allreduce", "ring", nbytes, 1 << 20)


def timed(by: Costs, algorithm: str, *taken: tuple[int, float]) -> Costs:
    for nbytes, seconds in taken:
        by = by.with_times(nbytes, {algorithm: seconds})
    return by


def test_a_ring_of_two_takes_two_messages_of_half_the_buffer() -> None:
    two = costs((0,), (1,))
    assert ring(two, 4000) == pytest.approx(2 * (2.0 + 0.25))
    added = replace(two, reduce_byte_s=1e-4, between=replace(two.between, message_cpu_s=0.5), call_s=1.0)
    # Each of the two rounds: hand over, travel, take. What was received in the first is added before the second.
    assert ring(added, 4000) == pytest.approx(1.0 + 2 * (0.5 + 2.25 + 0.5) + 0.2)


FOUR, THREE = costs((0, 1), (2, 3)), costs((0,), (1,), (2,))
SLOW = replace(THREE, slow_links=(SlowLink((2, 0), 3e-3),))
BURSTS = replace(THREE, burst_bytes=2000)
BUSY = replace(costs((0, 1, 2, 3)), inside=LinkCost(0.0, 0.0, 1.0, 0.0))
SWAPS = [(0, 1), (1, 0), (2, 3), (3, 2)]


@pytest.mark.parametrize(
    ("by", "links", "nbytes", "seconds"),
    [
        # Ranks of a host share its uplink in each direction.
        (FOUR, [(0, 2)], 1000, 1.25),
        (FOUR, [(0, 2), (2, 0)], 1000, 1.25),
        (FOUR, [(0, 2), (1, 3)], 1000, 2.25),
        (FOUR, [(0, 1), (2, 3)], 1000, 0.0),
        (THREE, [(0, 2), (1, 2)], 1000, 2.25),
        (SLOW, [(0, 2), (1, 0)], 1000, 3.25),
        # Ranks wait for a core where they share it.
        (BUSY, SWAPS, 1, 2.0),
        (replace(BUSY, cores=(Cores((0, 1, 2, 3), 2),)), SWAPS, 1, 4.0),
        (replace(BUSY, slowness=(1.0, 1.0, 1.0, 3.0)), SWAPS, 1, 6.0),
        # A call begins with a burst, but no link exceeds its lasting rate.
        (BURSTS, [(0, 1)], 100, 0.25),
        (BURSTS, [(0, 1)], 1000, 1.0),
        (BURSTS, [(0, 2), (1, 2)], 1000, 2.0),
        (BURSTS, [(0, 1), (0, 2)], 1000, 2.0),
    ],
)
def test_messages_at_once_wait_for_what_they_share(
    by: Costs, links: list[tuple[int, int]], nbytes: int, seconds: float
) -> None:
    def steps(rank: int) -> Round:
        sent = sum((send(to, ALL) for each, to in links if each == rank), ())
        return sent + sum((receive(each, ALL) for each, to in links if to == rank), ())

    assert price(by, [leg_of(rank, by.size, nbytes, steps(rank)) for rank in range(by.size)]) == pytest.approx(seconds)


@settings(max_examples=40, deadline=None)
@given(
    algorithm=st.sampled_from(sorted(PLANNERS["allreduce"])),
    hosts=st.sampled_from([((0,), (1,), (2,)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,), (3,), (4,))]),
    nbytes=st.integers(64, 1 << 16).map(lambda words: 4 * words),
    segment_bytes=st.sampled_from([1 << 12, 1 << 16]),
    cores=st.integers(1, 5),
)
def test_nothing_is_quicker_where_anything_costs_more(
    algorithm: str, hosts: tuple[tuple[int, ...], ...], nbytes: int, segment_bytes: int, cores: int
) -> None:
    link = LinkCost(5e-5, 1e-8, 5e-6, 2e-10)
    some = replace(costs(*hosts, byte_s=1e-8, cores=cores), inside=link, between=link, reduce_byte_s=1e-10)
    call = ("allreduce", algorithm, nbytes, segment_bytes)
    seconds = predict(some, *call)
    # No rank can be through before the bytes of one host's share have left it.
    floor = 2 * (len(hosts) - 1) / len(hosts) * nbytes * 1e-8 / max(map(len, hosts))
    assert seconds >= 0.99 * floor
    doubled = LinkCost(1e-4, 2e-8, 1e-5, 4e-10)
    everything = replace(
        some, inside=doubled, between=doubled, uplinks=(2e-8,) * len(hosts), reduce_byte_s=2e-10, call_s=0.0
    )
    assert predict(everything, *call) == pytest.approx(2 * seconds)
    if cores >= some.size:  # those who wait for a core may change places, and be through sooner for it (Graham, 1966)
        assert predict(some, *call[:2], 4 * nbytes, segment_bytes) >= seconds


def test_many_segments_take_what_a_walk_over_all_of_them_takes() -> None:
    four = replace(costs((0,), (1,), (2,), (3,), byte_s=1e-8, latency_s=1e-5), reduce_byte_s=1e-10)
    short = predict(four, "allreduce", "ring", 36 << 12, 1 << 12)
    long = predict(four, "allreduce", "ring", 360 << 12, 1 << 12)
    assert 9 * short < long < 10 * short


@pytest.mark.parametrize(("per_call_s", "small", "large"), [(0.5, 1.0, 1.5), (0.0, 0.8, 1.2)])
def test_calls_inside_a_host_correct_the_simulation(per_call_s: float, small: float, large: float) -> None:
    """Each call took a fixed time and a multiple of the simulated one."""
    two = replace(costs((0, 1), latency_s=0.0), inside=LinkCost(0.0, 1e-3, 0.0, 0.0))
    factors = {
        400: small,
        1600: (small + large) / 2,
        6400: large,
        64000: large,
    }  # between in the logarithm of the bytes
    taken = {nbytes: per_call_s + factor * ring(two, nbytes) for nbytes, factor in factors.items()}
    known = timed(two, "ring", (400, taken[400]), (6400, taken[6400]))
    assert {nbytes: ring(known, nbytes) for nbytes in taken} == pytest.approx(taken)
    assert predict(known, "allreduce", "rsag", 400, 1 << 20) == predict(two, "allreduce", "rsag", 400, 1 << 20)
    assert known.among([1]).calls == ()
    slower = timed(two, "ring", (400, 9.0), (6400, 5.0))  # a larger call that was quicker
    assert [ring(slower, nbytes) for nbytes in (400, 6400)] == pytest.approx([9.0, 5.0])
    assert 5.0 <= ring(slower, 1600) <= 9.0


@pytest.mark.parametrize("share", [0.4, 1.5])
def test_calls_between_hosts_correct_the_simulation(share: float) -> None:
    """What the simulation lacks shrinks linearly in the bytes. Beyond a large call it is off by the same share."""
    two, large = costs((0,), (1,), latency_s=0.0), 1 << 20
    known = timed(two, "ring", (400, ring(two, 400) + 0.5), (6400, ring(two, 6400)))
    missed = {400: 0.5, 1600: 0.4, 6400: 0.0, 64000: 0.0}
    assert [ring(known, nbytes) - ring(two, nbytes) for nbytes in missed] == pytest.approx([*missed.values()])
    known = timed(two, "ring", (1 << 10, ring(two, 1 << 10)), (large, share * ring(two, large)))
    assert ring(known, 64 * large) == pytest.approx(share * ring(two, 64 * large))
    part = (large // 2 - 1024) / (large - 1024)
    assert ring(known, large // 2) == pytest.approx(ring(two, large // 2) + part * (share - 1) * ring(two, large))


@pytest.mark.parametrize(("burst_bytes", "seconds"), [(0, 0.5), (100, 2.0)])
def test_a_call_in_a_burst_does_not_make_a_prediction_quicker_than_the_links(burst_bytes: int, seconds: float) -> None:
    """In a tree of three ranks, rank 0 receives 1000 bytes from two others, which takes its link 2 seconds."""
    three = timed(replace(costs((0,), (1,), (2,)), burst_bytes=burst_bytes), "tree", (1000, 0.5))
    assert predict(three, "allreduce", "tree", 1000, 1 << 20) == pytest.approx(seconds)
    two = replace(costs((0,), (1,), byte_s=8e-9, latency_s=5e-5), burst_bytes=1000 * burst_bytes)
    assert predict(two, "allreduce", "ring", 2_000_000, 1 << 10) >= 2_000_000 * 8e-9  # without measured calls


def test_among_some_ranks_what_is_known_of_them_stays() -> None:
    five = replace(costs((0, 3), (1, 4), (2,)), uplinks=(1.0, 2.0, 3.0), slow_links=(SlowLink((1, 2), 9.0),))
    three = five.among([2, 1, 3])
    assert three.hosts == ((0,), (1,), (2,))
    assert three.uplinks == (3.0, 2.0, 1.0)
    assert three.slow_links == (SlowLink((1, 0), 9.0),)


def test_a_file_is_read_as_it_was_written_or_refused() -> None:
    written = replace(costs((0, 1), (2,)), slow_links=(SlowLink((0, 2), 1e-6),))
    text = written.to_json()
    assert Costs.from_json(text, "tuning.json") == written
    read = json.loads(text)
    refused = {
        "version 2 is needed": {**read, "version": 1},
        "damaged": {**read, "uplinks": [1.0]},
        "not a number of seconds": {**read, "call_s": "fast"},
        "KeyError": {key: value for key, value in read.items() if key != "between"},
    }
    for said, changed in refused.items():
        with pytest.raises(TuningError, match=rf"tuning\.json.*{said}.*gradwire tune --out FILE"):
            Costs.from_json(json.dumps(changed), "tuning.json")
    made_for = r"made for ranks 0,1 on a machine; ranks 2 on a machine; here are ranks 0,1 on another;.*gradwire tune"
    with pytest.raises(TuningError, match=made_for):
        written.check("tuning.json", ((0, 1),), ["another"])
    written.check("tuning.json", written.hosts, written.machines)
    for damaged in (text[:-20], "[" * 100_000, "[]", ""):
        with pytest.raises(TuningError, match="damaged"):
            Costs.from_json(damaged, "tuning.json")


def test_a_rank_is_slow_beside_the_median_rank() -> None:
    assert slowness([1.0, 2.0, 2.0, 2.0]) == (1.0, 1.0, 1.0, 1.0)
    assert slowness([2.0, 2.0, 8.0, 2.0]) == (1.0, 1.0, 4.0, 1.0)
    assert slowness([1.0, 2.0]) == (1.0, 2.0)


def test_what_is_slow_is_named() -> None:
    some = replace(
        costs((0, 1), (2,), (3,)),
        uplinks=(1e-8, 1e-8, 1e-7),
        slowness=(1.0, 4.0, 1.0, 1.0),
        slow_links=(SlowLink((0, 2), 5e-8),),
    )
    assert some.slow() == [
        "slow link: the host of ranks 3 moves 10 MB/s, others 100 MB/s",
        "slow link: ranks 0 and 2 exchange 20 MB/s, others 100 MB/s",
        "slow rank: rank 1 computes 4.0 times as long as others",
    ]
    assert costs((0,), (1,)).slow() == []
    too_quick = replace(some, uplinks=(0.0, 0.0, 0.0), slowness=(1.0,) * 4)  # the processors took all of the time
    assert too_quick.slow() == ["slow link: ranks 0 and 2 exchange 20 MB/s, others more than can be measured"]


@pytest.mark.parametrize("hosts", [((0,), (1,), (2,)), ((0, 2), (1, 3)), ((0, 1, 2), (3,))])
def test_codes_pay_on_slow_links_and_not_where_encoding_takes_longer(hosts: tuple[tuple[int, ...], ...]) -> None:
    numel, codec, size = 1 << 20, make_codec("int8"), sum(map(len, hosts))
    legs = [coded_legs(schedules_of(hosts, rank, 96 << 10), codec, numel, "two_shot") for rank in range(size)]
    slow = replace(costs(*hosts, byte_s=1e-8, latency_s=1e-5), codecs=(CodecCost(codec.identity, 2e-10, 1e-10),))
    plain_s = min(predict(slow, "allreduce", name, 4 * numel, 96 << 10) for name in ("ring", "hierarchical"))
    assert 3 * price(slow, legs) < plain_s < 6 * price(slow, legs)
    costly = replace(slow, codecs=(CodecCost(codec.identity, 2e-7, 1e-7),))
    assert price(costly, legs) > plain_s


def times_of_pairs(uplinks: list[float], slow: dict[tuple[int, int], float] | None = None) -> list[dict[int, float]]:
    """Return by host and partner the times of pairs on these uplinks, except for slow pairs."""
    hosts = range(len(uplinks))
    return [
        {b: (slow or {}).get((min(a, b), max(a, b)), max(uplinks[a], uplinks[b])) for b in hosts if a != b}
        for a in hosts
    ]


@pytest.mark.parametrize("count", [2, 3, 4, 9])
@pytest.mark.parametrize("first", [1.0, 2.0, 10.0])
def test_uplinks_and_slow_pairs_are_found_in_the_times_of_pairs(count: int, first: float) -> None:
    uplinks = [first, *[1.0] * (count - 1)]
    found = [first, first] if count == 2 else uplinks  # a pair is as slow as its slower uplink
    assert uplinks_of(times_of_pairs(uplinks)) == found
    assert slow_pairs(times_of_pairs(uplinks)) == {}
    if count > 3:
        slow = {(0, 1): 20.0, (2, 3): 2.0}
        assert uplinks_of(times_of_pairs(uplinks, slow)) == uplinks
        assert slow_pairs(times_of_pairs(uplinks, slow)) == slow
    if count == 9:
        assert uplinks_of(times_of_pairs(uplinks, {(1, 2): 0.9})) == uplinks  # by luck
        assert uplinks_of(times_of_pairs([0.9, 1.0, 1.1, 1.4, 1.4])) == [1.1, 1.1, 1.1, 1.4, 1.4]  # nearly equal ones


@pytest.mark.parametrize("alone_s", [1.0, 2.0])
def test_waits_for_cores_are_no_cost_of_links(alone_s: float) -> None:
    """With all pairs at once, each takes 1.4 times as long; alone_s=2: the connection of the first two hosts is slow."""
    times = times_of_pairs([1.4] * 4, {(0, 1): 1.4 * alone_s})
    freed = without_waiting(times, alone_s)
    assert uplinks_of(freed) == pytest.approx([1.0] * 4)
    assert slow_pairs(freed) == ({} if alone_s == 1.0 else {(0, 1): pytest.approx(2.0)})
    assert without_waiting(times_of_pairs([1.0] * 4), 1.1) == times_of_pairs([1.0] * 4)


@pytest.mark.parametrize("inside", [True, False])
def test_the_cost_of_a_link_predicts_the_times_that_it_comes_from(inside: bool) -> None:
    actual = LinkCost(2e-5, 0.0 if inside else 1e-9, 3e-6, 2e-10)
    two = replace(
        costs((0, 1) if inside else (0,), *[] if inside else [(1,)]), inside=actual, between=actual, call_s=1e-5
    )
    two = replace(two, uplinks=(0.0,) * len(two.hosts))

    def seconds(nbytes: int, *rounds: tuple[Round, Round]) -> float:
        return price(two, [leg_of(rank, 2, nbytes, *(each[rank] for each in rounds)) for rank in range(2)])

    def swap(rank: int) -> Round:
        return send(1 - rank, ALL) + receive(1 - rank, ALL)

    stream = [(sum((send(1, ALL) for _ in range(16)), ()), sum((receive(0, ALL) for _ in range(16)), ()))]
    swaps_s, bulk_s = seconds(4, *[(swap(0), swap(1))] * 16), seconds(1 << 20, (swap(0), swap(1)))
    stream_s = seconds(4, *stream, (receive(1, ALL), send(0, ALL)))
    found = link_of(Pair(16, swaps_s, stream_s, bulk_s, 1 << 20, None if inside else actual.byte_cpu_s), 1e-5)
    assert astuple(found) == pytest.approx(astuple(actual), rel=0.03)


@pytest.mark.parametrize("hosts", [((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)])
def test_small_allreduces_correct_the_costs_of_messages_and_of_calls(hosts: tuple[tuple[int, ...], ...]) -> None:
    alone = replace(
        costs(*hosts, byte_s=1e-9), inside=LinkCost(1e-6, 0.0, 2e-6, 2e-10), between=LinkCost(2e-5, 1e-9, 3e-6, 1e-10)
    )
    few, many = (legs_of(alone, "allreduce", name, 4, 1 << 20, 1 << 10) for name in ("recursive_doubling", "ring"))
    actual = replace(alone.with_messages(3.0), call_s=1e-5)
    factor, call_s = calibrated(alone, few, price(actual, few), many, price(actual, many))
    assert (factor, call_s) == pytest.approx((3.0, 1e-5), rel=0.05)
