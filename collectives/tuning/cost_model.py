"""The costs of messages among the ranks of a group, measured or described, and the file that stores them."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median, median_low
from typing import Any, NamedTuple

from gradwire.collectives.schedules.schedule import Place

#: The version of the file format. A file of another version is refused.
VERSION = 2

#: A link or a rank is called slow if it takes this many times as long as others.
SLOW = 1.5

_REMEDY = "make a new one on these hosts: gradwire tune --out FILE"


class TuningError(ValueError):
    """A tuning file cannot be used; the text says why, and what to do."""


@dataclass(frozen=True)
class LinkCost:
    """The cost of a message between two ranks, in seconds: latency_s; byte_s, per byte of one connection; and at either end a
    processor's time, message_cpu_s per message and byte_cpu_s per byte."""

    latency_s: float
    byte_s: float
    message_cpu_s: float
    byte_cpu_s: float


class Cores(NamedTuple):
    """Ranks that compute on the same cores, and the number of cores."""

    ranks: tuple[int, ...]
    number: int


class SlowLink(NamedTuple):
    """A pair of ranks whose connection is slower than other connections of their hosts. byte_s: see LinkCost."""

    pair: tuple[int, int]
    byte_s: float


class CodecCost(NamedTuple):
    """A processor's seconds to encode and to decode a byte of float32 numbers. identity: of the codec."""

    identity: str
    encode_byte_s: float
    decode_byte_s: float


class CallCost(NamedTuple):
    """The measured times of calls: (bytes, seconds), ascending. A link's own algorithm has no Program to simulate, so its costs
    are only these times. For other algorithms, they correct the simulated times."""

    verb: str
    algorithm: str
    measured: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Costs:
    """The costs of messages among the ranks of a group.

    hosts: the ranks of each host, see Topology; machines: a description of each host. inside, between: of messages inside a
    host and between hosts. uplinks: by host, seconds a byte in each direction, for all its ranks together; both directions work
    at the same time. burst_bytes: how many bytes a traffic shaper lets an uplink move at once after a pause. slow_links: pairs
    that are slower than their hosts' uplinks. cores: the ranks that share each group of cores. slowness: by rank, see
    slowness(). call_s: the time of a call beside its messages. reduce_byte_s: a processor's time to add a byte to another, on
    the median rank. codecs: of the measured codecs. calls: the measured times of calls.
    """

    hosts: tuple[tuple[int, ...], ...]
    machines: tuple[str, ...]
    inside: LinkCost
    between: LinkCost
    uplinks: tuple[float, ...]
    cores: tuple[Cores, ...]
    slowness: tuple[float, ...]
    call_s: float
    reduce_byte_s: float
    burst_bytes: int = 0
    slow_links: tuple[SlowLink, ...] = ()
    codecs: tuple[CodecCost, ...] = ()
    calls: tuple[CallCost, ...] = ()

    @property
    def size(self) -> int:
        return len(self.slowness)

    def measured(self, verb: str, algorithm: str) -> tuple[tuple[int, float], ...]:
        """Return the measured seconds of an algorithm's calls, by bytes; empty if none were timed."""
        return next((call.measured for call in self.calls if (call.verb, call.algorithm) == (verb, algorithm)), ())

    def with_times(self, nbytes: int, taken: Mapping[str, float]) -> Costs:
        """Return these costs with the measured seconds of allreduces of nbytes, by algorithm or by the identity of the codec."""
        calls = {(call.verb, call.algorithm): dict(call.measured) for call in self.calls}
        for name, seconds in taken.items():
            calls.setdefault(("allreduce", name), {})[nbytes] = seconds
        return replace(
            self, calls=tuple(CallCost(*call, tuple(sorted(times.items()))) for call, times in calls.items())
        )

    def without_times(self, names: Container[str]) -> Costs:
        """Return these costs without the measured seconds of allreduces by these algorithms or codecs."""
        return replace(self, calls=tuple(call for call in self.calls if call.algorithm not in names))

    def with_messages(self, factor: float) -> Costs:
        """Return these costs with those of messages, but not of bytes, multiplied by a factor."""

        def times(link: LinkCost) -> LinkCost:
            return replace(link, latency_s=factor * link.latency_s, message_cpu_s=factor * link.message_cpu_s)

        return replace(self, inside=times(self.inside), between=times(self.between))

    def codec(self, identity: str) -> CodecCost:
        """Return the costs of a codec. Raises KeyError for one that was not measured."""
        found = next((codec for codec in self.codecs if codec.identity == identity), None)
        if found is None:
            raise KeyError(f"codec {identity!r} was not measured")
        return found

    def among(self, ranks: Sequence[int]) -> Costs:
        """Return the costs among some of the ranks, which are numbered from 0 in the order given."""
        place = {rank: index for index, rank in enumerate(ranks)}

        def placed(members: Iterable[int]) -> tuple[int, ...]:
            return tuple(sorted(place[member] for member in members if member in place))

        kept = sorted((placed(host), index) for index, host in enumerate(self.hosts) if placed(host))
        links = [link for link in self.slow_links if place.keys() >= set(link.pair)]
        return replace(
            self,
            hosts=tuple(members for members, _ in kept),
            machines=tuple(self.machines[index] for _, index in kept),
            uplinks=tuple(self.uplinks[index] for _, index in kept),
            cores=tuple(Cores(members, each.number) for each in self.cores if (members := placed(each.ranks))),
            slowness=tuple(self.slowness[rank] for rank in ranks),
            slow_links=tuple(SlowLink((place[link.pair[0]], place[link.pair[1]]), link.byte_s) for link in links),
            calls=self.calls if len(ranks) == self.size else (),
        )

    def to_json(self) -> str:
        """Return the text of a tuning file."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> Costs:
        """Return the costs in the text of a tuning file. source: its name, for errors. Raises TuningError if it is damaged or
        of another version."""
        try:
            read = json.loads(text)
            version = read.pop("version")
            if version != VERSION:
                raise TuningError(
                    f"tuning file {source} is of version {version!r}, version {VERSION} is needed; {_REMEDY}"
                )
            costs = _costs(read)
        except TuningError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise TuningError(f"tuning file {source} is damaged ({detail}); {_REMEDY}") from None
        return costs

    def check(self, source: str, hosts: Sequence[Sequence[int]], machines: Sequence[str]) -> None:
        """Raise TuningError if these costs were not measured for ranks on these hosts and machines."""
        made_for = _described(self.hosts, self.machines)
        if made_for != (here := _described(hosts, machines)):
            raise TuningError(f"tuning file {source} was made for {made_for}; here are {here}; {_REMEDY}")

    @cached_property
    def slow_hosts(self) -> tuple[int, ...]:
        """The indices of the hosts whose uplink is much slower than the median."""
        usual = median(self.uplinks)
        return tuple(index for index, uplink in enumerate(self.uplinks) if uplink > SLOW * usual > 0)

    def place(self, rank: int) -> Place:
        """Return the Place of a rank, the argument of planners."""
        slow = tuple(sorted(rank for index in self.slow_hosts for rank in self.hosts[index]))
        return Place(rank, self.size, 0, self.hosts, slow)

    def slow(self) -> list[str]:
        """Return a line for each host, link and rank that is much slower than others of its kind."""
        usual = median(self.uplinks)
        lines = [
            f"slow link: the host of ranks {', '.join(map(str, self.hosts[index]))} moves {_rate(self.uplinks[index])}, "
            f"others {_rate(usual)}"
            for index in self.slow_hosts
        ]
        lines += [
            f"slow link: ranks {link.pair[0]} and {link.pair[1]} exchange {_rate(link.byte_s)}, others {_rate(usual)}"
            for link in self.slow_links
        ]
        times = [(rank, times) for rank, times in enumerate(self.slowness) if times > SLOW]
        return [
            *lines,
            *(f"slow rank: rank {rank} computes {times:.1f} times as long as others" for rank, times in times),
        ]


def slowness(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return, by rank, its time for a computation as a multiple of the median rank's if that is more than SLOW, else 1. Not of
    the fastest rank's: other programs may use the cores of all others meanwhile."""
    usual = median_low(seconds)
    return tuple(each / usual if each > SLOW * usual else 1.0 for each in seconds)


def _rate(byte_s: float) -> str:
    return f"{1e-6 / byte_s:.4g} MB/s" if byte_s > 0 else "more than can be measured"


def _described(hosts: Sequence[Sequence[int]], machines: Sequence[str]) -> str:
    return "; ".join(f"ranks {','.join(map(str, host))} on {name}" for host, name in zip(hosts, machines, strict=True))


def _costs(read: Mapping[str, Any]) -> Costs:
    """Return the costs from a file's data. Raises ValueError, TypeError or KeyError if they are malformed."""

    def positive(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{value!r} is not a number of seconds")
        return float(value)

    costs = Costs(
        hosts=tuple(tuple(int(rank) for rank in host) for host in read["hosts"]),
        machines=tuple(map(str, read["machines"])),
        inside=LinkCost(**{name: positive(value) for name, value in read["inside"].items()}),
        between=LinkCost(**{name: positive(value) for name, value in read["between"].items()}),
        uplinks=tuple(map(positive, read["uplinks"])),
        cores=tuple(Cores(tuple(map(int, ranks)), int(number)) for ranks, number in read["cores"]),
        slowness=tuple(map(positive, read["slowness"])),
        call_s=positive(read["call_s"]),
        reduce_byte_s=positive(read["reduce_byte_s"]),
        burst_bytes=int(positive(read["burst_bytes"])),
        slow_links=tuple(SlowLink((int(a), int(b)), positive(byte_s)) for (a, b), byte_s in read["slow_links"]),
        codecs=tuple(CodecCost(str(codec), positive(e), positive(d)) for codec, e, d in read["codecs"]),
        calls=tuple(
            CallCost(str(verb), str(algorithm), tuple((int(n), positive(s)) for n, s in measured))
            for verb, algorithm, measured in read["calls"]
        ),
    )
    ranks = list(range(costs.size))
    of_cores = sorted(rank for cores in costs.cores for rank in cores.ranks)
    if not ranks or sorted(rank for host in costs.hosts for rank in host) != ranks or of_cores != ranks:
        raise ValueError("its hosts and cores must contain every rank once")
    if (
        not len(costs.hosts) == len(costs.machines) == len(costs.uplinks)
        or min(cores.number for cores in costs.cores) < 1
    ):
        raise ValueError("it must describe every host and its uplink, and have one core or more in each group")
    return costs
