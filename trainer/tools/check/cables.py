"""What joins the hosts of a job: the interfaces of each pair of hosts, what they carry, and which of them a job should use. All
functions are pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from gradwire.collectives.control.interfaces import Interface, rate_text
from gradwire.trainer.tools.check.machine import Finding

#: How many times as much another interface must carry before a job should use it, and a pair before it counts as slow.
_FASTER, _SLOWER = 1.2, 0.5


@dataclass(frozen=True)
class SeenHost:
    """Describes a host. rank: that measures on it. address: at which ranks reach it. port: at which the rank listens."""

    rank: int
    name: str
    address: str
    port: int
    interfaces: tuple[Interface, ...]

    @property
    def used(self) -> Interface:
        """Return the interface in use; one without a name if the address is not the first one of any."""
        mine = (each for each in self.interfaces if self.address in each.hosts)
        return next(mine, Interface(self.address, (self.address,), None))


@dataclass(frozen=True)
class Cable:
    """Joins two hosts by an interface of each. ends: the numbers of the hosts. in_use: whether ranks use it."""

    ends: tuple[int, int]
    interfaces: tuple[Interface, Interface]
    addresses: tuple[str, str]
    in_use: bool

    @property
    def rating(self) -> str:
        """Return the interfaces with their rates, as text."""
        return " to ".join(dict.fromkeys(each.rating for each in self.interfaces))


#: Megabits per second in both directions, or why there is no connection.
Carried = tuple[float, float] | str


def cables_between(hosts: Sequence[SeenHost]) -> list[Cable]:
    """Return, for each pair of hosts, the cable in use, and then those by other interfaces with addresses of one subnet."""
    found = []
    for ends in combinations(range(len(hosts)), 2):
        a, b = (hosts[end] for end in ends)
        found.append(Cable(ends, (a.used, b.used), (a.address, b.address), in_use=True))
        for mine in a.interfaces:
            for other in b.interfaces:
                joined = ((x, y) for x in mine.hosts for y in other.hosts if mine.reaches(y) and other.reaches(x))
                addresses = next(((x, y) for x, y in joined if (":" in x) == (":" in y)), None)
                if addresses is not None and (mine, other) != (a.used, b.used):
                    found.append(Cable(ends, (mine, other), addresses, in_use=False))
    return found


def pair_findings(hosts: Sequence[SeenHost], carried: Mapping[Cable, Carried]) -> Iterator[Finding]:
    """Yield a finding for each cable of a pair of hosts. carried: of these cables."""
    used = next(_least(rates) for cable, rates in carried.items() if cable.in_use)
    for cable, rates in carried.items():
        a, b = (hosts[end].name for end in cable.ends)
        what = f"{a} and {b}{'' if cable.in_use else ', not in use'}: {cable.rating}"
        if isinstance(rates, str):
            do = f"let {a} connect to {cable.addresses[1]}: a firewall may forbid it" if cable.in_use else None
            yield Finding("failed" if cable.in_use else "note", f"{what} does not connect: {rates}", do)
            continue
        there, back = (rate_text(float(f"{rate:.3g}")) for rate in rates)
        is_better = not cable.in_use and _least(rates) > _FASTER * used
        yield Finding("note" if is_better else "ok", f"{what} carries {there} there, {back} back")


def slow_pair(hosts: Sequence[SeenHost], carried: Mapping[Cable, Carried]) -> Iterator[Finding]:
    """Yield a finding that names the pair of hosts with the slowest connection in use, if there are several pairs."""
    rates = {cable: _least(each) for cable, each in carried.items() if cable.in_use}
    if len(rates) < 2:
        return
    slowest = min(rates, key=lambda cable: rates[cable])
    usual = statistics.median(rate for cable, rate in rates.items() if cable is not slowest)
    a, b = (hosts[end].name for end in slowest.ends)
    of_others = f"{rate_text(float(f'{usual:.3g}'))} is the median of the others"
    what = f"the slowest pair is {a} and {b} with {rate_text(float(f'{rates[slowest]:.3g}'))}; {of_others}"
    if rates[slowest] < _SLOWER * usual:
        yield Finding("note", what, "look at the cables, ports and negotiated rates of these hosts")
    else:
        yield Finding("ok", what)


def best_interfaces(hosts: Sequence[SeenHost], carried: Mapping[Cable, Carried]) -> tuple[Interface, ...]:
    """Return the interface of each host with which a job is fastest: others than those in use only if these join all hosts, and
    carry more between the slowest pair."""
    in_use = tuple(host.used for host in hosts)
    best, best_mbit = in_use, _FASTER * min(_least(rates) for cable, rates in carried.items() if cable.in_use)
    for first in hosts[0].interfaces:
        chosen = [first]
        for end in range(1, len(hosts)):
            fits = {
                cable.interfaces[1]: _least(rates)
                for cable, rates in carried.items()
                if cable.ends == (0, end) and cable.interfaces[0] == first
            }
            chosen += [max(fits, key=lambda each: fits[each])] if fits else []
        joined = [
            max((_least(r) for c, r in carried.items() if c.ends == ends and c.interfaces == pair), default=0.0)
            for ends, pair in zip(combinations(range(len(hosts)), 2), combinations(chosen, 2), strict=False)
        ]
        if len(chosen) == len(hosts) and min(joined) > best_mbit:
            best, best_mbit = tuple(chosen), min(joined)
    return best


def start_commands(hosts: Sequence[SeenHost], chosen: Sequence[Interface], port: int) -> Iterator[Finding]:
    """Yield the command that starts a training on each host. chosen: the interface of each host."""
    changes = [interface != host.used for host, interface in zip(hosts, chosen, strict=True)]
    if any(changes):
        names = (f"{host.name}: {each.name}" for host, each in zip(hosts, chosen, strict=True))
        yield Finding("note", f"a job is faster with other interfaces: {', '.join(names)}", "start it as below")
    address = chosen[0].hosts[0] if changes[0] else hosts[0].address
    for number, (host, interface, change) in enumerate(zip(hosts, chosen, changes, strict=True)):
        variable = f"COLLECTIVES_INTERFACE={interface.name} " if change else ""
        nodes = f"--nnodes {len(hosts)} --nproc-per-node 1 --node-rank {number}"
        command = f"{variable}torchrun {nodes} --master-addr {address} --master-port {port} train.py"
        yield Finding("ok", f"start on {host.name}: {command}")


def _least(rates: Carried) -> float:
    """Return the rate of the slower direction; 0 without a connection."""
    return 0.0 if isinstance(rates, str) else min(rates)
