"""Ranks by host, on hosts of different sizes."""

import pytest

from gradwire.collectives.plan.topology import Topology, host_id


def test_hosts_are_found_from_what_ranks_report() -> None:
    topology = Topology.from_host_ids(3, ["b", "a", "b", "a", "c"])
    assert topology.hosts == ((0, 2), (1, 3), (4,))
    assert (topology.local_rank, topology.local_size) == (1, 2)
    last = Topology.from_host_ids(4, ["b", "a", "b", "a", "c"])
    assert (last.local_rank, last.local_size) == (0, 1)


def test_the_host_id_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    found = host_id()
    assert found
    monkeypatch.setenv("COLLECTIVES_HOST_ID", "rack7")
    assert host_id() == "rack7" != found
