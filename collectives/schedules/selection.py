"""Select an algorithm by message size: the fastest one by measured costs. Without a measurement, or if the environment sets a
table, select the one in the table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from types import MappingProxyType

from gradwire.collectives.environment import TABLE_PREFIX
from gradwire.collectives.parsing import format_size, parse_size
from gradwire.collectives.schedules.algorithms import BETWEEN_HOSTS, PLANNERS
from gradwire.collectives.schedules.cost import Costs
from gradwire.collectives.schedules.topology import Topology
from gradwire.collectives.schedules.walk import predict

#: Another algorithm replaces the usual one only if it takes at most this share of its time, so that the choice among nearly
#: equal algorithms does not change from run to run.
_WORTH_IT = 0.95

#: How many powers of two table() covers.
_SHOWN_POWERS = 27

_log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Range:
    """Use `algorithm` for messages of `start` bytes up to, not including, `stop`; stop None has no limit."""

    algorithm: str
    start: int
    stop: int | None


Table = tuple[Range, ...]


def parse_table(text: str, allowed: Sequence[str], variable: str) -> Table:
    """Return the table that a text describes, such as 'recursive_doubling:0-16K;rsag:16K-max'. A name alone covers every size.

    Raises ValueError for an unknown name (listing `allowed`), a malformed range, gaps or overlaps.
    """
    rules = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, _, sizes = entry.partition(":")
        name = name.strip()
        if name not in allowed:
            raise ValueError(f"{variable}={text!r}: no algorithm is called {name!r}; known are {', '.join(allowed)}")
        low, dash, high = (sizes or "0-max").partition("-")
        if not dash:
            raise ValueError(f"{variable}={text!r}: {entry!r} needs a range such as {name}:0-16K or {name}:16K-max")
        try:
            rules.append(Range(name, parse_size(low), None if high.strip() == "max" else parse_size(high)))
        except ValueError as error:
            raise ValueError(f"{variable}={text!r}: in {entry!r}, {error}") from None
    rules.sort(key=lambda rule: rule.start)
    stops = [rule.stop for rule in rules]
    if not rules or rules[0].start != 0 or stops[-1] is not None or stops[:-1] != [rule.start for rule in rules[1:]]:
        raise ValueError(f"{variable}={text!r}: the ranges must cover 0-max without gap or overlap")
    return tuple(rules)


def default_table(
    collective: str, topology: Topology, preferred: Mapping[str, str] = MappingProxyType({}), *, quick: bool = False
) -> Table:
    """Return the built-in table of a collective: the link's preferred algorithm, else algorithms by size and topology, from the
    measurements in docs/measurements.md. quick: see Transport.

    Small messages need few rounds between hosts, and few messages inside a host, where ranks share cores. Large messages need
    the fewest bytes and constant neighbours; if hosts have several ranks each, only one copy of the data crosses between hosts.
    """
    if collective in preferred:
        return (Range(preferred[collective], 0, None),)
    several_hosts = len(topology.hosts) > 1
    one_rank_each = topology.size == len(topology.hosts)
    gather = [("rsag", 0)]
    if several_hosts and not one_rank_each:
        allreduce = [("recursive_doubling", 0), ("hierarchical", 128 << 10)]
    elif quick and topology.size == 2:
        allreduce = [("recursive_doubling", 0), ("ring", 256 << 10)]
    elif quick and several_hosts:
        gather = [("rsag", 0), ("ring", topology.size * (32 << 10))]
        allreduce = [("recursive_doubling", 0), ("rsag", topology.size * (4 << 10)), *gather[1:]]
    elif quick:
        allreduce = [("recursive_doubling", 0), ("rsag", 512 << 10)]
    elif several_hosts:
        allreduce = [("recursive_doubling", 0), ("rsag", 128 << 10), ("ring", topology.size * (256 << 10))]
    else:
        allreduce = [("recursive_doubling" if topology.size == 2 else "tree", 0), ("rsag", 2 << 20)]
    tables: dict[str, list[tuple[str, int]]] = {
        "allreduce": allreduce,
        "reduce_scatter": gather,
        "allgather": gather,
        "broadcast": [("tree", 0), ("rsag", 256 << 10)] if several_hosts and topology.size > 2 else [("tree", 0)],
        "reduce": [("tree", 0)],
        "gather": [("direct", 0)],
        "scatter": [("direct", 0)],
        "alltoall": [("direct", 0)],
        "barrier": [("recursive_doubling", 0)],
    }
    entries = tables[collective]
    stops = [start for _, start in entries[1:]] + [None]
    return tuple(Range(name, start, stop) for (name, start), stop in zip(entries, stops, strict=True))


def default_segment_bytes(topology: Topology, *, quick: bool) -> int:
    """Return the default segment size: small if messages are quick; larger between hosts, where small segments would let the
    wire idle; largest inside a host, where each message costs wake-ups. quick: see Transport."""
    if quick:
        return 96 << 10
    return (256 << 10) if len(topology.hosts) > 1 else (4 << 20)


def variables(collectives: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return by collective the environment variables that set tables, such as COLLECTIVES_ALLREDUCE."""
    names = {collective: TABLE_PREFIX + collective.upper() for collective in collectives}
    return {collective: name for collective, name in names.items() if environment.get(name)}


def overrides(collectives: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> dict[str, Table]:
    """Return the tables that the environment sets. collectives: the legal algorithm names of each collective.

    Raises ValueError for an invalid table, such as COLLECTIVES_ALLREDUCE with an unknown algorithm.
    """
    return {
        collective: parse_table(environment[variable], collectives[collective], variable)
        for collective, variable in variables(collectives, environment).items()
    }


def choose(table: Table, nbytes: int) -> str:
    """Return the algorithm of the rule that covers nbytes."""
    return next(rule.algorithm for rule in table if rule.stop is None or nbytes < rule.stop)


def _power_of_two(nbytes: int) -> int:
    """Return the power of two nearest to nbytes, by integer arithmetic."""
    return 1 << (((nbytes * nbytes) | 1).bit_length() // 2)


def _least_near(power: int) -> int:
    """Return the least number whose nearest power of two is 2 ** power."""
    return isqrt(1 << (2 * power - 1)) + 1 if power else 0


def planned(verb: str, names: Sequence[str], hosts: Sequence[Sequence[int]]) -> list[str]:
    """Return the verb's algorithms that have a planner and that differ from the others on these hosts."""
    nested = len(hosts) > 1 and any(len(host) > 1 for host in hosts)
    return [name for name in names if name in PLANNERS[verb] and (nested or name not in BETWEEN_HOSTS)]


class Measured:
    """Chooses by measured costs the fastest algorithm for every verb and power of two of bytes. All ranks have the same costs,
    so they make the same choices.

    usual: returns the choice of the hand-made table. algorithms: the algorithm names of each verb. segment_bytes: the maximum
    size of a segment. logs: whether this rank logs the choices.
    """

    def __init__(
        self,
        costs: Costs,
        algorithms: Mapping[str, Sequence[str]],
        segment_bytes: int,
        usual: Callable[[str, int], str],
        *,
        logs: bool = False,
    ) -> None:
        self.costs = costs
        self._segment_bytes = segment_bytes
        self._usual = usual
        self._logs = logs
        self._chosen: dict[tuple[str, int], str] = {}
        self._names = {
            verb: [
                *planned(verb, names, costs.hosts),
                *(name for name in names if name not in PLANNERS[verb] and costs.measured(verb, name)),
            ]
            for verb, names in algorithms.items()
        }

    def choose(self, verb: str, nbytes: int) -> str:
        """Return the algorithm for a message of nbytes."""
        key = verb, _power_of_two(nbytes)
        if key not in self._chosen:
            self._chosen[key] = self._decide(*key)
        return self._chosen[key]

    def table(self, verb: str) -> Table:
        """Return the choices for up to 64 MB as a table, to be shown."""
        chosen = [(_least_near(power), self.choose(verb, 1 << power)) for power in range(_SHOWN_POWERS)]
        changes = [each for before, each in pairwise([(0, ""), *chosen]) if each[1] != before[1]]
        stops = [start for start, _ in changes[1:]]
        return tuple(Range(name, start, stop) for (start, name), stop in zip(changes, [*stops, None], strict=True))

    def ranked(self, verb: str, nbytes: int) -> list[tuple[float, str]]:
        """Return a verb's algorithms with their predicted seconds, the fastest first."""
        return sorted(
            (predict(self.costs, verb, name, nbytes, self._segment_bytes), name) for name in self._names[verb]
        )

    def _decide(self, verb: str, nbytes: int) -> str:
        names = self._names[verb]
        usual, why = self._usual(verb, nbytes), "the fastest"
        # An algorithm of the link's own, of which no calls were measured, is not among the names: it stays.
        if usual not in names or len(names) == 1:
            return usual
        ranked = self.ranked(verb, nbytes)
        # Where calls of this very size were timed, an algorithm without a time was predicted to be slower.
        timed = [each for each in ranked if nbytes in dict(self.costs.measured(verb, each[1]))]
        ranked = timed or ranked
        chosen = ranked[0][1]
        if any(name == usual and ranked[0][0] > _WORTH_IT * seconds for seconds, name in ranked):
            chosen, why = usual, "the default, and none is much faster"
        if self._logs:
            best = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for seconds, name in ranked[:3])
            _log.debug("gradwire: %s of %s uses %s, %s (%s)", verb, format_size(nbytes), chosen, why, best)
        return chosen
