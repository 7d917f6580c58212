"""The interfaces of hosts: their rates, and which hosts use a slow one although a faster one reaches all others."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradwire.collectives.control.interfaces import (
    Interface,
    faster_interfaces,
    interfaces_card,
    interfaces_here,
    rated_mbit,
    warn_of_slow_interfaces,
)


@pytest.mark.parametrize(
    ("text", "rate"), [("1000\n", 1000), ("-1\n", None), ("0\n", None), ("fast", None), (None, None)]
)
def test_what_an_interface_is_rated_at(text: str | None, rate: int | None, tmp_path: Path) -> None:
    (tmp_path / "eth0").mkdir()
    if text is not None:
        (tmp_path / "eth0" / "speed").write_text(text)
    assert rated_mbit("eth0", tmp_path) == rate


def test_the_interfaces_of_this_host(tmp_path: Path) -> None:
    """None is a loopback interface, and each address has a subnet."""
    for each in interfaces_here(tmp_path):
        assert each.rated_mbit is None
        assert not any(address.startswith("127.") for address in each.hosts)
        assert all("/" in address for address in each.addresses)


def card(host: str, address: str, *interfaces: Interface) -> dict[str, Any]:
    """Return the card of a rank, as it arrives."""
    made = {"host": host, "name": host, "address": address, **interfaces_card(interfaces)}
    loaded: dict[str, Any] = json.loads(json.dumps(made))
    return loaded


def slow(last: int, rated: int | None = 1000) -> Interface:
    return Interface("mgmt", (f"192.168.0.{last}/24",), rated)


def fast(last: int, rated: int | None = 200_000, subnet: str = "10.0.0") -> Interface:
    return Interface("ib0", (f"{subnet}.{last}/24", f"fd00::{last}/64"), rated)


A, B = card("a", "192.168.0.1", slow(1), fast(1)), card("b", "192.168.0.2", slow(2), fast(2))


@pytest.mark.parametrize(
    ("cards", "hosts"),
    [
        pytest.param([A, A, B, B], ["a", "b"], id="both, each once"),
        pytest.param([A, card("b", "10.0.0.2", fast(2))], ["a"], id="a host without a choice"),
        pytest.param([A, card("b", "fd00::2", slow(2), fast(2))], ["a"], id="IPv6 is the fast one"),
        pytest.param([A, A], [], id="one host"),
        pytest.param([A, B, card("c", "192.168.0.3", slow(3))], [], id="one host is not reached"),
        pytest.param([A, card("b", "192.168.0.2", slow(2), fast(2, subnet="10.0.1"))], ["a", "b"], id="by IPv6 only"),
        pytest.param(
            [A, card("b", "192.168.0.2", slow(2), fast(1))], [], id="the same address on both, as bridges have"
        ),
        pytest.param([card("a", "192.168.0.1", slow(1, None), fast(1)), card("b", "10.0.0.2")], [], id="unknown"),
        pytest.param(
            [card("a", "192.168.0.1", slow(1), fast(1, None)), card("b", "10.0.0.2")], [], id="the other unknown"
        ),
        pytest.param([card("a", "192.168.0.1", slow(1), fast(1, 1000)), card("b", "10.0.0.2")], [], id="equal"),
        pytest.param(
            [card("a", "10.0.0.1", slow(1), fast(1)), card("b", "10.0.0.2", slow(2), fast(2))], [], id="right"
        ),
    ],
)
def test_which_hosts_use_a_slow_interface(cards: Sequence[dict[str, Any]], hosts: list[str]) -> None:
    found = list(faster_interfaces(cards))
    assert [host for host, _, _ in found] == hosts
    assert all((used.name, faster.name) == ("mgmt", "ib0") for _, used, faster in found)


def test_the_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It comes once in a process, and not without a reason."""
    with caplog.at_level(logging.WARNING, "gradwire"):
        warn_of_slow_interfaces([B, B])
        assert not caplog.records
        for _ in range(2):
            warn_of_slow_interfaces([A, B])
    (record,) = caplog.records
    for part in (
        "a, b",
        "mgmt (rated 1 Gbit/s)",
        "ib0 (rated 200 Gbit/s)",
        "COLLECTIVES_INTERFACE=ib0",
        "GLOO_SOCKET_IFNAME=ib0",
    ):
        assert part in record.getMessage()


def test_a_host_without_a_choice_sends_nothing() -> None:
    assert interfaces_card([fast(1)]) == interfaces_card([]) == {}
