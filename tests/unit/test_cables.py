"""Which interfaces join the hosts of a job, which pair is slow, and which interfaces the job should use."""

from __future__ import annotations

from itertools import combinations

import pytest

from gradwire.collectives.control.interfaces import Interface
from gradwire.trainer.tools.check.cables import (
    Cable,
    Carried,
    SeenHost,
    best_interfaces,
    cables_between,
    pair_findings,
    slow_pair,
    start_commands,
)


def host(number: int, *, has_fast: bool = True) -> SeenHost:
    """Return a host that uses mgmt, and may have a faster interface too."""
    mgmt = Interface("mgmt", (f"192.168.0.{number}/24",), 1000)
    fast = Interface("fast", (f"10.0.0.{number}/24", f"fd00::{number}/64"), 10_000)
    return SeenHost(number, f"host{number}", f"192.168.0.{number}", 4000, (mgmt, fast)[: 1 + has_fast])


THREE = [host(number) for number in range(1, 4)]


def carried(hosts: list[SeenHost], mgmt: float = 900.0, fast: Carried = (9000.0, 8000.0)) -> dict[Cable, Carried]:
    return {cable: (mgmt, mgmt) if cable.in_use else fast for cable in cables_between(hosts)}


def test_the_cables() -> None:
    """Interfaces of different subnets join nothing."""
    cables = cables_between(THREE)
    expected = [(ends, name, name == "mgmt") for ends in combinations(range(3), 2) for name in ("mgmt", "fast")]
    assert [(cable.ends, cable.interfaces[0].name, cable.in_use) for cable in cables] == expected
    assert all(cable.interfaces[0].name == cable.interfaces[1].name for cable in cables)
    assert len(cables_between([host(1), host(2, has_fast=False)])) == 1


def test_an_address_of_no_interface_is_measured_too() -> None:
    """As behind a network that translates addresses."""
    (cable, *_) = cables_between([SeenHost(0, "a", "172.16.0.9", 4000, host(1).interfaces), host(2)])
    assert cable.in_use
    assert cable.addresses == ("172.16.0.9", "192.168.0.2")
    assert cable.interfaces[0].rated_mbit is None


@pytest.mark.parametrize(
    ("fast", "states"),
    [((9000.0, 8000.0), ["ok", "note"]), ((9000.0, 1000.0), ["ok", "ok"]), ("timed out", ["ok", "note"])],
)
def test_the_findings_of_a_pair(fast: Carried, states: list[str]) -> None:
    used, other = pair_findings(THREE[:2], carried(THREE[:2], fast=fast))
    assert [used.state, other.state] == states
    assert "mgmt (rated 1 Gbit/s) carries 900 Mbit/s there, 900 Mbit/s back" in used.what
    assert "fast (rated 10 Gbit/s)" in other.what


def test_a_pair_without_a_connection_has_failed() -> None:
    cables = {cable: "no route to host" for cable in cables_between(THREE[:2]) if cable.in_use}
    (found,) = pair_findings(THREE, cables)
    assert found.state == "failed"
    assert found.do is not None


@pytest.mark.parametrize(("rate", "state"), [(90.0, "note"), (800.0, "ok")])
def test_the_slow_pair_is_named(rate: float, state: str) -> None:
    rates = carried(THREE)
    slow = next(cable for cable in rates if cable.in_use and cable.ends == (1, 2))
    (found,) = slow_pair(THREE, rates | {slow: (900.0, rate)})
    assert found.state == state
    assert f"host2 and host3 with {rate:g} Mbit/s" in found.what
    assert not list(slow_pair(THREE[:2], carried(THREE[:2])))


def test_the_best_interfaces() -> None:
    """Those that join all hosts, and carry more; else those in use."""
    rates = carried(THREE)
    missing = {cable: "refused" if cable.ends == (1, 2) and not cable.in_use else each for cable, each in rates.items()}
    one_without = [*THREE[:2], host(3, has_fast=False)]
    for hosts, measured, best in (
        (THREE, rates, "fast"),
        (THREE, carried(THREE, fast=(1000.0, 1000.0)), "mgmt"),
        (THREE, missing, "mgmt"),
        (one_without, carried(one_without), "mgmt"),
    ):
        assert {each.name for each in best_interfaces(hosts, measured)} == {best}


@pytest.mark.parametrize("place", [0, 1])
def test_the_commands(place: int) -> None:
    """One for each host. They name an interface only if it is not the one in use."""
    chosen = [each.interfaces[place] for each in THREE]
    *notes, first, second, third = start_commands(THREE, chosen, 29511)
    assert len(notes) == place
    for number, found in enumerate((first, second, third)):
        assert f"host{number + 1}: " in found.what
        assert f"--nnodes 3 --nproc-per-node 1 --node-rank {number}" in found.what
        assert f"--master-addr {('192.168.0.1', '10.0.0.1')[place]} --master-port 29511" in found.what
        assert ("COLLECTIVES_INTERFACE=fast " in found.what) == bool(place)
