"""What programs cost by the model: against times worked out by hand, and what must hold whatever the numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Schedule, receive, send
from gradwire.collectives.schedules.spans import Span, segments_of_buffer
from gradwire.collectives.tuning.calibration import (
    Pair,
    Timed,
    Together,
    Uplinks,
    costs_of,
    fitted,
    slow_pairs,
    uplinks_of,
    without_waiting,
)
from gradwire.collectives.tuning.cost_model import (
    CallCost,
    CodecCost,
    Cores,
    Costs,
    LinkCost,
    SlowLink,
    TuningError,
    slowness,
)
from gradwire.collectives.tuning.prediction import coded_legs, plans_of, predict
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


def pairs(*links: tuple[int, int], size: int, nbytes: int) -> list[list[Leg]]:
    """Return what sends a message over each of these links at once."""
    legs = []
    for rank in range(size):
        steps = [send(to, ALL) for each, to in links if each == rank]
        steps += [receive(each, ALL) for each, to in links if to == rank]
        schedule = Schedule(rank, size, 1, (tuple(step for group in steps for step in group),))
        legs.append([Leg(Program(schedule, [(Span(0, nbytes),)]), 1)])
    return legs


def programs(legs: list[list[Leg]]) -> dict[int, Program]:
    return {rank: leg.program for rank, [leg] in enumerate(legs)}


def test_a_ring_of_two_takes_two_messages_of_half_the_buffer() -> None:
    two = costs((0,), (1,))
    assert predict(two, "allreduce", "ring", 4000, 1 << 20) == pytest.approx(2 * (2.0 + 0.25))
    added = replace(two, reduce_byte_s=1e-4, between=replace(two.between, message_cpu_s=0.5), call_s=1.0)
    # Each of the two rounds: hand over, travel, take. What was received in the first is added before the second.
    assert predict(added, "allreduce", "ring", 4000, 1 << 20) == pytest.approx(1.0 + 2 * (0.5 + 2.25 + 0.5) + 0.2)


def test_ranks_of_a_host_share_its_uplink_in_each_direction() -> None:
    four = costs((0, 1), (2, 3))
    assert price(four, pairs((0, 2), size=4, nbytes=1000)) == pytest.approx(1.25)
    assert price(four, pairs((0, 2), (2, 0), size=4, nbytes=1000)) == pytest.approx(1.25)
    assert price(four, pairs((0, 2), (1, 3), size=4, nbytes=1000)) == pytest.approx(2.25)
    assert price(four, pairs((0, 1), (2, 3), size=4, nbytes=1000)) == 0.0
    three = costs((0,), (1,), (2,))
    assert price(three, pairs((0, 2), (1, 2), size=3, nbytes=1000)) == pytest.approx(2.25)
    slow = replace(three, slow_links=(SlowLink((2, 0), 3e-3),))
    assert price(slow, pairs((0, 2), (1, 0), size=3, nbytes=1000)) == pytest.approx(3.25)


def test_ranks_wait_for_a_core_where_they_share_it() -> None:
    busy = replace(costs((0, 1, 2, 3)), inside=LinkCost(0.0, 0.0, 1.0, 0.0))
    exchange = pairs((0, 1), (1, 0), (2, 3), (3, 2), size=4, nbytes=1)
    assert price(busy, exchange) == pytest.approx(2.0)
    assert price(replace(busy, cores=(Cores((0, 1, 2, 3), 2),)), exchange) == pytest.approx(4.0)
    assert price(replace(busy, slowness=(1.0, 1.0, 1.0, 3.0)), exchange) == pytest.approx(6.0)


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
def test_calls_inside_a_host_correct_the_walk(per_call_s: float, small: float, large: float) -> None:
    """Each call took a fixed time and a multiple of the walk's."""
    two = replace(costs((0, 1), latency_s=0.0), inside=LinkCost(0.0, 1e-3, 0.0, 0.0))

    def said(nbytes: int, by: Costs = two) -> float:
        return predict(by, "allreduce", "ring", nbytes, 1 << 20)

    taken = (400, per_call_s + small * said(400)), (6400, per_call_s + large * said(6400))
    timed = replace(two, calls=(CallCost("allreduce", "ring", taken),))
    assert [said(nbytes, timed) for nbytes, _ in taken] == pytest.approx([seconds for _, seconds in taken])
    assert said(64000, timed) == pytest.approx(per_call_s + large * said(64000))
    halfway = (small + large) / 2  # in the logarithm of the bytes
    assert said(1600, timed) == pytest.approx(per_call_s + halfway * said(1600))
    assert predict(timed, "allreduce", "rsag", 400, 1 << 20) == predict(two, "allreduce", "rsag", 400, 1 << 20)
    assert timed.among([1]).calls == ()


def test_calls_between_hosts_correct_the_walk() -> None:
    """Only the smaller call took longer than the walk says; what the walk lacks shrinks linearly in the bytes."""
    two = costs((0,), (1,), latency_s=0.0)

    def said(nbytes: int, by: Costs = two) -> float:
        return predict(by, "allreduce", "ring", nbytes, 1 << 20)

    taken = (400, said(400) + 0.5), (6400, said(6400))
    timed = replace(two, calls=(CallCost("allreduce", "ring", taken),))
    assert [said(nbytes, timed) for nbytes in (400, 1600, 6400, 64000)] == pytest.approx(
        [said(400) + 0.5, said(1600) + 0.4, said(6400), said(64000)]
    )


def test_a_larger_call_that_was_quicker_is_predicted_as_it_was_measured() -> None:
    two = replace(costs((0, 1), latency_s=0.0), inside=LinkCost(0.0, 1e-3, 0.0, 0.0))
    taken = (400, 9.0), (6400, 5.0)
    timed = replace(two, calls=(CallCost("allreduce", "ring", taken),))
    first, between, last = (predict(timed, "allreduce", "ring", nbytes, 1 << 20) for nbytes in (400, 1600, 6400))
    assert (first, last) == pytest.approx((9.0, 5.0))
    assert 5.0 <= between <= 9.0


@pytest.mark.parametrize("share", [0.4, 1.5])
def test_beyond_a_large_call_between_hosts_the_walk_is_off_by_the_same_share(share: float) -> None:
    two, small, large = costs((0,), (1,)), 1 << 10, 1 << 20

    def said(nbytes: int, by: Costs = two) -> float:
        return predict(by, "allreduce", "ring", nbytes, 1 << 20)

    taken = (small, said(small)), (large, share * said(large))
    timed = replace(two, calls=(CallCost("allreduce", "ring", taken),))
    assert said(64 * large, timed) == pytest.approx(share * said(64 * large))
    part = (large // 2 - small) / (large - small)
    assert said(large // 2, timed) == pytest.approx(said(large // 2) + part * (share - 1) * said(large))


@pytest.mark.parametrize(("burst_bytes", "seconds"), [(0, 0.5), (100, 2.0)])
def test_a_call_in_a_burst_does_not_make_a_prediction_quicker_than_the_links(burst_bytes: int, seconds: float) -> None:
    """In a tree of three ranks, rank 0 receives 1000 bytes from two others, which takes its link 2 seconds."""
    three = replace(costs((0,), (1,), (2,)), burst_bytes=burst_bytes)
    calls = (CallCost("allreduce", "tree", ((1000, 0.5),)),)
    assert predict(replace(three, calls=calls), "allreduce", "tree", 1000, 1 << 20) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("links", "nbytes", "seconds"),
    [([(0, 1)], 100, 0.25), ([(0, 1)], 1000, 1.0), ([(0, 2), (1, 2)], 1000, 2.0), ([(0, 1), (0, 2)], 1000, 2.0)],
)
def test_a_call_begins_with_a_burst_but_no_link_exceeds_its_lasting_rate(
    links: list[tuple[int, int]], nbytes: int, seconds: float
) -> None:
    three = replace(costs((0,), (1,), (2,)), burst_bytes=2000)
    assert price(three, pairs(*links, size=3, nbytes=nbytes)) == pytest.approx(seconds)


def test_without_measured_calls_many_segments_take_no_less_than_the_busiest_link() -> None:
    two = replace(costs((0,), (1,), byte_s=8e-9, latency_s=5e-5), burst_bytes=100_000)
    assert predict(two, "allreduce", "ring", 2_000_000, 1 << 10) >= 2_000_000 * 8e-9


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
    legs = [coded_legs(plans_of(hosts, rank, 96 << 10), codec, numel, "two_shot") for rank in range(size)]
    slow = replace(costs(*hosts, byte_s=1e-8, latency_s=1e-5), codecs=(CodecCost(codec.identity, 2e-10, 1e-10),))
    plain_s = min(predict(slow, "allreduce", name, 4 * numel, 96 << 10) for name in ("ring", "hierarchical"))
    assert 3 * price(slow, legs) < plain_s < 6 * price(slow, legs)
    costly = replace(slow, codecs=(CodecCost(codec.identity, 2e-7, 1e-7),))
    assert price(costly, legs) > plain_s


@pytest.mark.parametrize("begun", [1e-7, 1e-4, 0.3])
def test_a_fitted_number_has_the_walk_take_what_was_measured(begun: float) -> None:
    measured = costs((0,), (1,), latency_s=1e-4)
    exchange = Timed(programs(pairs((0, 1), (1, 0), size=2, nbytes=1000)), 0.0)
    exchange = exchange._replace(seconds=price(measured, exchange.legs))
    wrong = replace(measured, between=replace(measured.between, latency_s=begun))
    found = fitted(wrong, "between", "latency_s", exchange)
    assert price(found, exchange.legs) == pytest.approx(exchange.seconds, rel=2e-3)
    free = fitted(wrong, "between", "latency_s", exchange._replace(seconds=exchange.seconds / 1e3))
    assert free.between.latency_s == 0.0


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


def test_nearly_equal_uplinks_are_equal() -> None:
    assert uplinks_of(times_of_pairs([0.9, 1.0, 1.1, 1.4, 1.4])) == [1.1, 1.1, 1.1, 1.4, 1.4]


@pytest.mark.parametrize("alone_s", [1.0, 2.0])
def test_waits_for_cores_are_no_cost_of_links(alone_s: float) -> None:
    """With all pairs at once, each takes 1.4 times as long; alone_s=2: the connection of the first two hosts is slow."""
    times = times_of_pairs([1.4] * 4, {(0, 1): 1.4 * alone_s})
    freed = without_waiting(times, alone_s)
    assert uplinks_of(freed) == pytest.approx([1.0] * 4)
    assert slow_pairs(freed) == ({} if alone_s == 1.0 else {(0, 1): pytest.approx(2.0)})
    assert without_waiting(times_of_pairs([1.0] * 4), 1.1) == times_of_pairs([1.0] * 4)


@pytest.mark.parametrize(("large_s", "factor"), [(0.5, 1.0), (2.0, 2.0)])
def test_a_fast_large_allreduce_makes_no_link_faster(large_s: float, factor: float) -> None:
    three = replace(costs((0,), (1,), (2,), latency_s=0.0), slow_links=(SlowLink((0, 2), 2e-3),))
    both = programs(pairs((0, 1), (1, 0), size=3, nbytes=250))  # of float32: 1 s
    found = costs_of(three, None, None, None, Together(Timed(both, 1.0), Timed(both, 1.0), None, Timed(both, large_s)))
    assert found.uplinks == pytest.approx((factor * 1e-3,) * 3, rel=5e-3)
    assert found.slow_links[0].byte_s == pytest.approx(2 * found.uplinks[0])


@pytest.mark.parametrize("hosts", [((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)])
def test_costs_fitted_to_times_that_the_walk_takes_predict_them_again(hosts: tuple[tuple[int, ...], ...]) -> None:
    link = LinkCost(2e-5, 1e-9, 3e-6, 1e-10)
    actual = replace(
        costs(*hosts),
        inside=LinkCost(1e-6, 0.0, 2e-6, 2e-10),
        between=link,
        uplinks=(1e-9,) * len(hosts),
        call_s=1e-5,
        reduce_byte_s=1e-10,
    )

    def timed(programs: list[Program]) -> Timed:
        taken = Timed(dict(enumerate(programs)), 0.0)
        return taken._replace(seconds=price(actual, taken.legs))

    def swaps(pair: tuple[int, int], nbytes: int, times: int) -> Timed:
        peers = dict([pair, pair[::-1]])
        rounds = {rank: (send(peer, ALL) + receive(peer, ALL),) * times for rank, peer in peers.items()}
        schedules = [Schedule(rank, 4, 1, rounds.get(rank, ())) for rank in range(4)]
        return timed([Program(schedule, [(Span(0, nbytes // 4),)]) for schedule in schedules])

    def stream(one: int, other: int) -> Timed:
        sent, taken = sum((send(other, ALL) for _ in range(16)), ()), sum((receive(one, ALL) for _ in range(16)), ())
        rounds = {one: (sent, receive(other, ALL)), other: (taken, send(one, ALL))}
        schedules = [Schedule(rank, 4, 1, rounds.get(rank, ())) for rank in range(4)]
        return timed([Program(schedule, [(Span(0, 2),)]) for schedule in schedules])

    def measured(pair: tuple[int, int], moving_byte_s: float | None) -> Pair:
        bulk = swaps(pair, 1 << 20, 1)
        return Pair(swaps(pair, 4, 16), stream(*pair), 16, bulk, 1 << 20, 0.0, moving_byte_s)

    def allreduce(name: str, nbytes: int) -> list[Program]:
        schedules = [PLANNERS["allreduce"][name](actual.place(rank)) for rank in range(4)]
        segments = segments_of_buffer(nbytes // 4, schedules[0].blocks, 24 << 10)
        return [Program(schedule, segments) for schedule in schedules]

    alone = replace(actual, inside=FREE, between=FREE, uplinks=(0.0,) * len(hosts))
    inside = measured((0, 1), None) if len(hosts) < 4 else None
    between = measured((hosts[0][0], hosts[1][0]), link.byte_cpu_s) if len(hosts) > 1 else None
    uplinks = Uplinks(actual.uplinks, (), of_one_rank=len(hosts) == 4) if between else None
    few, many = (timed(allreduce(name, 1 << 10)) for name in ("recursive_doubling", "ring"))
    found = costs_of(alone, inside, between, uplinks, Together(few, many, None, timed(allreduce("ring", 4 << 20))))
    for name in ("recursive_doubling", "rsag", "ring", "tree"):
        for nbytes in (1 << 10, 256 << 10, 16 << 20):
            measured_s = timed(allreduce(name, nbytes))
            assert price(found, measured_s.legs) == pytest.approx(measured_s.seconds, rel=0.1), (name, nbytes)
