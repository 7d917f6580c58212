"""The predicted time of an allreduce among any number of identical hosts, from a walk of one host's programs.

If all hosts have the same number of ranks and the same links, a planner's schedules are equal up to a shift by whole hosts: the
ranks of every host do the same as those of the first, at the same time. So only the first host's programs are made and walked.
A message that the first host receives from another host is replaced by the message that it sends to the host at the same
distance in the other direction. The result is exact for a ring. For other planners it is an approximation: a span of blocks
that wraps around is two messages, and `direct` reduces in the order of ranks. The tests compare with the walk of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gradwire.collectives.compression.algorithms_for import algorithms_for, ride, shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.schedule import Place
from gradwire.collectives.schedules.selection import default_segment_bytes
from gradwire.collectives.schedules.topology import Topology
from gradwire.collectives.tuning.cost_model import Costs, LinkCost
from gradwire.collectives.tuning.prediction import coded_legs, schedules_of
from gradwire.collectives.tuning.simulator import Leg, in_segments, price

#: The algorithms of allreduce whose schedules are equal for every host up to a shift.
SHIFTED = ("ring", "rsag", "direct", "hierarchical", "hierarchical(rsag)", "hierarchical(direct)")
#: The algorithms of SHIFTED that 'auto' chooses from: with one host or one rank a host, and with several ranks a host.
_FLAT = ("ring", "rsag")
_BY_HOSTS = ("rsag", "hierarchical", "hierarchical(rsag)")
#: The greatest number of messages to walk for one world. The walk then takes about half a minute.
MOST_MESSAGES = 1_000_000

_FLOAT32 = 4


@dataclass(frozen=True)
class Network:
    """The network between the ranks of identical hosts. uplink_byte_s: the seconds per byte of a host's link, each way. known:
    measured costs of calls, sums and codecs; without it, these take no time."""

    between: LinkCost
    inside: LinkCost
    uplink_byte_s: float
    ranks_per_host: int = 1
    known: Costs | None = None

    def costs(self, ranks: int) -> Costs:
        """Return the costs of a world of `ranks` ranks. Raises ValueError if the ranks do not fill their hosts."""
        local, known = min(ranks, self.ranks_per_host), self.known
        if ranks < 1 or local < 1 or ranks % local:
            raise ValueError(
                f"{ranks} ranks with {self.ranks_per_host} a host: the ranks must be 1, fewer than a host has, or a multiple of "
                "that"
            )
        hosts = tuple(tuple(range(first, first + local)) for first in range(0, ranks, local))
        return Costs(
            hosts=hosts,
            machines=("described",) * len(hosts),
            inside=self.inside,
            between=self.between,
            uplinks=(self.uplink_byte_s,) * len(hosts),
            cores=(),
            slowness=(1.0,) * ranks,
            call_s=known.call_s if known else 0.0,
            reduce_byte_s=known.reduce_byte_s if known else 0.0,
            codecs=known.codecs if known else (),
        )


@dataclass(frozen=True)
class AllreduceCost:
    """The cost of one allreduce. seconds: the time until the last rank has finished. wire_bytes: the bytes of the rank that
    sends most."""

    algorithm: str
    seconds: float
    wire_bytes: int


class AllreducePredictor:
    """Predict the cost of allreduces of float32 in a world of identical hosts.

    algorithm: one of SHIFTED or, with a codec, one that the codec supports; 'auto' takes the fastest suitable one at each size.
    codec: None for no codec. Raises ValueError for an algorithm that the codec does not support, or that is not in SHIFTED.
    """

    def __init__(self, costs: Costs, algorithm: str = "auto", codec: Codec | None = None) -> None:
        self.costs = costs
        self._codec = codec
        self._segment_bytes = default_segment_bytes(Topology(0, costs.hosts), quick=True)
        self._calls: dict[int, AllreduceCost] = {}
        self._messages = 0
        allowed = SHIFTED if codec is None else _ridden(codec)
        if algorithm not in ("auto", *allowed):
            with_codec = f" with codec {codec.name}" if codec else ""
            raise ValueError(
                f"algorithm {algorithm!r}{with_codec} cannot be simulated; allowed are auto, {', '.join(allowed)}"
            )
        self._algorithms = (algorithm,) if algorithm != "auto" else self._suitable(allowed)

    def _suitable(self, allowed: tuple[str, ...]) -> tuple[str, ...]:
        if allowed[0] not in SHIFTED:
            return allowed[:1]
        return _BY_HOSTS if len(self.costs.hosts[0]) > 1 and len(self.costs.hosts) > 1 else _FLAT

    def call(self, numel: int) -> AllreduceCost:
        """Return the cost of an allreduce of numel numbers. Raises ValueError if the walk would be too long."""
        if numel not in self._calls:
            calls = [self._walked(algorithm, numel) for algorithm in self._algorithms]
            self._calls[numel] = min(calls, key=lambda call: call.seconds)
        return self._calls[numel]

    def seconds(self, numel: int) -> float:
        """Return the seconds of an allreduce of numel numbers."""
        return self.call(numel).seconds

    def _walked(self, algorithm: str, numel: int) -> AllreduceCost:
        costs, codec = self.costs, self._codec
        if costs.size == 1:
            return AllreduceCost(algorithm, 0.0, 0)
        local = costs.hosts[0]
        sent = 0.0

        def walk(number: int) -> float:
            nonlocal sent
            part = numel * number // count
            self._check(algorithm, numel, number)
            legs = [self.legs(rank, algorithm, part) for rank in local]
            sent = max(sum(leg.program.sent_bytes(leg.nbytes) for leg in each) for each in legs) * numel / part
            return price(costs, legs, partial(_like, len(local), costs.size))

        count = self._segments(algorithm, numel)
        seconds = in_segments(count, walk)
        if codec is not None and self._as_numbers(algorithm):
            cost = costs.codec(codec.identity)
            seconds += _FLOAT32 * numel * (cost.encode_byte_s + cost.decode_byte_s)
        return AllreduceCost(algorithm, seconds, round(sent))

    def _as_numbers(self, algorithm: str) -> bool:
        """Return whether the messages can be added as they are: numbers, or codes of a summable codec."""
        return self._codec is None or (self._codec.summable and algorithm in SHIFTED)

    def _segments(self, algorithm: str, numel: int) -> int:
        """Return the number of segments of a buffer of numel numbers."""
        costs, codec = self.costs, self._codec
        if self._as_numbers(algorithm):
            blocks = PLANNERS["allreduce"][algorithm](Place(0, costs.size, 0, costs.hosts)).blocks
            itemsize = codec.wire_dtype.itemsize if codec else _FLOAT32
            return max(1, -(-numel * itemsize // (blocks * self._segment_bytes)))
        assert codec is not None
        return len(schedules_of(costs.hosts, 0, self._segment_bytes).partition(codec, numel, algorithm).chunks)

    def legs(self, rank: int, algorithm: str, numel: int) -> list[Leg]:
        """Return the programs of a rank for an allreduce of numel numbers. numel is rounded up so that all blocks have the same
        length."""
        costs, codec = self.costs, self._codec
        schedules = schedules_of(costs.hosts, rank, self._segment_bytes)
        if self._as_numbers(algorithm):
            itemsize = codec.wire_dtype.itemsize if codec else _FLOAT32
            schedule = PLANNERS["allreduce"][algorithm](Place(rank, costs.size, 0, costs.hosts))
            numel = -(-numel // schedule.blocks) * schedule.blocks
            return [Leg(schedules.of_buffer("allreduce", algorithm, 0, numel, itemsize, grouped=False), itemsize)]
        assert codec is not None
        numel = -(-numel // (costs.size * codec.alignment)) * costs.size * codec.alignment
        return coded_legs(schedules, codec, numel, algorithm)

    def _check(self, algorithm: str, numel: int, segments: int) -> None:
        """Count the messages of the segments. Raises ValueError if there are more than MOST_MESSAGES so far."""
        local, place = len(self.costs.hosts[0]), Place(0, self.costs.size, 0, self.costs.hosts)
        planner = PLANNERS["allreduce"][algorithm] if algorithm in SHIFTED else ride(algorithm).planner
        self._messages += segments * local * sum(map(len, planner(place).rounds))
        if self._messages > MOST_MESSAGES:
            raise ValueError(
                f"{algorithm} on {self.costs.size} ranks, of buckets such as one of {numel} numbers, is too large to replay: "
                f"a host's ranks exchange more than {MOST_MESSAGES} messages. Take another algorithm, larger buckets, "
                "fewer ranks or a smaller model"
            )


def _ridden(codec: Codec) -> tuple[str, ...]:
    """Return the algorithms that the codec supports here. Summable codes use the algorithms of numbers."""
    if codec.summable:
        return SHIFTED
    ridden = algorithms_for(codec, SHIFTED, with_feedback=codec.needs_feedback)
    return (shot_of(codec), *(name for name in ridden if name in SHIFTED))


def _like(local: int, size: int, sender: int, receiver: int) -> tuple[int, int]:
    """Return the sender and receiver of the message that host 0 receives, if a message is shifted by whole hosts of `local`
    ranks."""
    receiving = receiver % local
    return (sender - receiver + receiving) % size, receiving
