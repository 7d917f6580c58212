"""How long an allreduce takes among any number of like ranks: the programs of one host's ranks, walked for all.

Where every host has as many ranks, on like links, a planner's schedules are the same but for a shift by whole hosts: what the
ranks of the first host do, those of each other host do at the same time. So only the first host's programs are made and walked,
and what one of its ranks receives from a rank elsewhere is what it sends itself to the rank as far on the other side. That is
exact for a ring. Other planners are not quite alike: a span of blocks that wraps around is two messages, and `direct` takes what
it receives in the order of ranks. The tests compare with the walk of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gradwire.collectives.compression.algorithms_for import algorithms_for, ride, shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.plan.algorithms import PLANNERS
from gradwire.collectives.plan.coded import CodedProgram
from gradwire.collectives.plan.cost import Costs, LinkCost
from gradwire.collectives.plan.schedule import Place
from gradwire.collectives.plan.selection import default_segment_bytes
from gradwire.collectives.plan.topology import Topology
from gradwire.collectives.plan.walk import Leg, in_segments, price
from gradwire.collectives.run.plans import Plans, legal_algorithms

#: Allreduces that are the same for every host but for a shift.
SHIFTED = ("ring", "rsag", "direct", "hierarchical", "hierarchical(rsag)", "hierarchical(direct)")
#: Those of them among which 'auto' chooses: with one rank a host, and with several.
_FLAT = ("ring", "rsag")
_BY_HOSTS = ("rsag", "hierarchical", "hierarchical(rsag)")
#: The most messages that are walked for one world, which takes about half a minute.
MOST_MESSAGES = 1_000_000

_FLOAT32 = 4


def described(
    ranks: int,
    ranks_per_host: int,
    between: LinkCost,
    inside: LinkCost,
    uplink_byte_s: float,
    known: Costs | None = None,
) -> Costs:
    """Return the costs of a world of like hosts, in which nothing else costs time than messages and, where they are given, what
    is `known` of calls, sums and codecs. uplink_byte_s: of a host. Raises ValueError where the ranks do not fill their hosts."""
    local = min(ranks, ranks_per_host)
    if ranks < 1 or ranks_per_host < 1 or ranks % local:
        raise ValueError(
            f"{ranks} ranks with {ranks_per_host} a host: the ranks must be 1, fewer than a host has, or a multiple of that"
        )
    hosts = tuple(tuple(range(first, first + local)) for first in range(0, ranks, local))
    return Costs(
        hosts=hosts,
        machines=("described",) * len(hosts),
        inside=inside,
        between=between,
        uplinks=(uplink_byte_s,) * len(hosts),
        cores=(),
        slowness=(1.0,) * ranks,
        call_s=known.call_s if known else 0.0,
        reduce_byte_s=known.reduce_byte_s if known else 0.0,
        codecs=known.codecs if known else (),
    )


@dataclass(frozen=True)
class Call:
    """Says what one allreduce costs. seconds: until the last rank is through. wire_bytes: what a rank sends, the busiest of its
    host."""

    algorithm: str
    seconds: float
    wire_bytes: int


class Exchange:
    """Prices allreduces of float32 in a world of like hosts.

    algorithm: of SHIFTED, or what the codec rides; 'auto' for the quickest of those that suit any size. codec: that numbers
    travel by, None for none. Raises ValueError for algorithms that the codec does not ride, or that differ from host to host.
    """

    def __init__(
        self, costs: Costs, algorithm: str = "auto", codec: Codec | None = None, *, quick: bool = True
    ) -> None:
        self.costs = costs
        self._codec = codec
        self._segment_bytes = default_segment_bytes(Topology(0, costs.hosts), quick=quick)
        self._calls: dict[int, Call] = {}
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

    def call(self, numel: int) -> Call:
        """Return what an allreduce of so many numbers costs. Raises ValueError where there is too much to walk."""
        if numel not in self._calls:
            calls = [self._walked(algorithm, numel) for algorithm in self._algorithms]
            self._calls[numel] = min(calls, key=lambda call: call.seconds)
        return self._calls[numel]

    def seconds(self, numel: int) -> float:
        """Return how long such a call takes."""
        return self.call(numel).seconds

    def _walked(self, algorithm: str, numel: int) -> Call:
        costs, codec = self.costs, self._codec
        if costs.size == 1:
            return Call(algorithm, 0.0, 0)
        local = costs.hosts[0]
        sent = 0.0

        def walk(number: int) -> float:
            nonlocal sent
            part = numel * number // count
            self._check(algorithm, numel, number)
            legs = [self.legs(rank, algorithm, part) for rank in local]
            sent = max(sum(map(_sent_bytes, each)) for each in legs) * numel / part
            return price(costs, legs, partial(_like, len(local), costs.size))

        count = self._segments(algorithm, numel)
        seconds = in_segments(count, walk)
        if codec is not None and self._as_numbers(algorithm):
            cost = costs.codec(codec.identity)
            seconds += _FLOAT32 * numel * (cost.encode_byte_s + cost.decode_byte_s)
        return Call(algorithm, seconds, round(sent))

    def _as_numbers(self, algorithm: str) -> bool:
        """Return whether what travels can be added as it is."""
        return self._codec is None or (self._codec.summable and algorithm in SHIFTED)

    def _segments(self, algorithm: str, numel: int) -> int:
        """Return how many segments a buffer is cut into."""
        costs, codec = self.costs, self._codec
        if self._as_numbers(algorithm):
            blocks = PLANNERS["allreduce"][algorithm](Place(0, costs.size, 0, costs.hosts)).blocks
            itemsize = codec.wire_dtype.itemsize if codec else _FLOAT32
            return max(1, -(-numel * itemsize // (blocks * self._segment_bytes)))
        assert codec is not None
        return len(self._plans(0).partition(codec, numel, algorithm).chunks)

    def _plans(self, rank: int) -> Plans:
        return Plans(Topology(rank, self.costs.hosts), legal_algorithms({}), {}, self._segment_bytes)

    def legs(self, rank: int, algorithm: str, numel: int) -> list[Leg]:
        """Return the programs of a rank for an allreduce of at least so many numbers: of so many that all blocks are alike."""
        costs, codec = self.costs, self._codec
        plans = self._plans(rank)
        if self._as_numbers(algorithm):
            itemsize = codec.wire_dtype.itemsize if codec else _FLOAT32
            schedule = PLANNERS["allreduce"][algorithm](Place(rank, costs.size, 0, costs.hosts))
            numel = -(-numel // schedule.blocks) * schedule.blocks
            return [Leg(plans.of_buffer("allreduce", algorithm, 0, numel, itemsize, grouped=False), itemsize)]
        assert codec is not None
        numel = -(-numel // (costs.size * codec.alignment)) * costs.size * codec.alignment
        return plans.legs(codec, numel, algorithm)

    def _check(self, algorithm: str, numel: int, segments: int) -> None:
        """Count the messages that so many segments take. Raises ValueError for more than can be walked."""
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
    """Return what the codec's numbers may travel by here: where codes can be added, as numbers."""
    if codec.summable:
        return SHIFTED
    ridden = algorithms_for(codec, SHIFTED, with_feedback=codec.needs_feedback)
    return (shot_of(codec), *(name for name in ridden if name in SHIFTED))


def _like(local: int, size: int, sender: int, receiver: int) -> tuple[int, int]:
    """Return sender and receiver of a message moved by whole hosts, of `local` ranks each, to one that host 0 receives."""
    receiving = receiver % local
    return (sender - receiver + receiving) % size, receiving


def _sent_bytes(leg: Leg) -> int:
    if isinstance(leg.program, CodedProgram):
        assert leg.code_bytes is not None
        return leg.program.sent_bytes(leg.code_bytes)
    return leg.itemsize * leg.program.sent()[1]
