"""Simulated hosts, as far as they are planned without root."""

import pytest

from gradwire.bench import hosts


@pytest.mark.parametrize(
    ("ranks", "count", "spread"),
    [(5, 4, [2, 1, 1, 1]), (8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (1, 1, [1]), (4, 1, [4])],
)
def test_ranks_are_spread_evenly_the_first_hosts_taking_more(ranks: int, count: int, spread: list[int]) -> None:
    assert hosts.ranks_per_host(ranks, count) == spread


@pytest.mark.parametrize(("ranks", "count"), [(3, 4), (3, 0), (0, 0), (300, 201)])
def test_hosts_without_ranks_are_refused(ranks: int, count: int) -> None:
    with pytest.raises(ValueError, match="cannot be spread"):
        hosts.ranks_per_host(ranks, count)


def test_ranks_get_the_environment_of_torchrun() -> None:
    planned = hosts.plan_ranks(5, 4, "a network")
    assert [rank.host for rank in planned] == [0, 0, 1, 2, 3]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    assert [planned[1].environment[name] for name in names] == ["1", "5", "1", "2", "0", "10.77.0.1"]
    assert [planned[4].environment[name] for name in names] == ["4", "5", "0", "1", "3", "10.77.0.1"]


@pytest.mark.parametrize(("rate", "bits"), [("1gbit", 1e9), ("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64kbit", 64e3)])
def test_rates_are_written_as_tc_does(rate: str, bits: float) -> None:
    assert hosts.rate_bits_per_s(rate) == bits


@pytest.mark.parametrize("rate", ["", "1", "1gb", "1 gbit", "gbit", "1gbit; reboot"])
def test_other_rates_are_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        hosts.rate_bits_per_s(rate)


def test_the_first_links_may_have_rates_of_their_own() -> None:
    assert hosts.rates_of("100mbit,1gbit", 3) == ["100mbit", "1gbit", "1gbit"]
    with pytest.raises(ValueError, match="names 3 links; there are 2 hosts"):
        hosts.rates_of("1gbit,1gbit,1gbit", 2)


def test_flags_after_the_dashes_belong_to_the_command() -> None:
    chosen = hosts.parse_arguments(
        ["--hosts", "2", "--ranks", "3", "--", "allreduce", "-b", "4M", "--json", "out.json"]
    )
    assert chosen.command == ["allreduce", "-b", "4M", "--json", "out.json"]


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.bench.hosts.shutil.which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(hosts.HostsError, match=r"tc \(packages iproute2"):
        hosts.check_machine()


def test_root_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.bench.hosts.shutil.which", lambda tool: tool)
    monkeypatch.setattr("gradwire.bench.hosts.os.geteuid", lambda: 1000)
    with pytest.raises(hosts.HostsError, match="root"):
        hosts.check_machine()
