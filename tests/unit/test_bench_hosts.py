"""Simulated hosts, as far as they are planned without root."""

import pytest

from gradwire.bench import hosts


def test_ranks_are_spread_evenly_the_first_hosts_taking_more() -> None:
    for ranks, count, spread in ((5, 4, [2, 1, 1, 1]), (8, 4, [2] * 4), (7, 3, [3, 2, 2]), (1, 1, [1]), (4, 1, [4])):
        assert hosts.ranks_per_host(ranks, count) == spread
    for ranks, count in ((3, 4), (3, 0), (0, 0), (300, 201)):
        with pytest.raises(ValueError, match="cannot be spread"):
            hosts.ranks_per_host(ranks, count)


def test_ranks_get_the_environment_of_torchrun() -> None:
    planned = hosts.plan_ranks(5, 4, "a network")
    assert [rank.host for rank in planned] == [0, 0, 1, 2, 3]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    assert [planned[1].environment[name] for name in names] == ["1", "5", "1", "2", "0", "10.77.0.1"]
    assert [planned[4].environment[name] for name in names] == ["4", "5", "0", "1", "3", "10.77.0.1"]


def test_rates_are_written_as_tc_does() -> None:
    for rate, bits in (("1gbit", 1e9), ("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64kbit", 64e3)):
        assert hosts.rate_bits_per_s(rate) == bits
    assert hosts.rates_of("100mbit,1gbit", 3) == ["100mbit", "1gbit", "1gbit"]
    for wrong in ("", "1", "1gb", "1 gbit", "gbit", "1gbit; reboot", "1gbit,1gbit,1gbit"):
        with pytest.raises(ValueError, match="rate"):
            hosts.rates_of(wrong, 2)


def test_flags_after_the_dashes_belong_to_the_command() -> None:
    command = ["allreduce", "-b", "4M", "--json", "out.json"]
    assert hosts.parse_arguments(["--hosts", "2", "--ranks", "3", "--", *command]).command == command


def test_tools_and_root_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.bench.hosts.os.geteuid", lambda: 1000)
    monkeypatch.setattr("gradwire.bench.hosts.shutil.which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(hosts.HostsError, match=r"tc \(packages iproute2"):
        hosts.check_machine()
    monkeypatch.setattr("gradwire.bench.hosts.shutil.which", lambda tool: tool)
    with pytest.raises(hosts.HostsError, match="root"):
        hosts.check_machine()
