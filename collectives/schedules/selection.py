"""Select an algorithm by message size from a table: gradwire's own, or one that the environment sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gradwire.collectives.environment import TABLE_PREFIX
from gradwire.collectives.parsing import parse_size
from gradwire.collectives.schedules.topology import Topology


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
