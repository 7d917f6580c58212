"""The ports on which gradwire listens, and addresses with a scope."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack

import pytest

from gradwire.collectives.control import ports
from gradwire.collectives.control.addresses import address_text, seen_from, socket_address
from gradwire.collectives.environment import listening_ports


@pytest.fixture
def two_free() -> range:
    """Return two neighbouring ports that were free a moment ago."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                held.enter_context(socket.create_server(("127.0.0.1", first + 1)))
                return range(first, first + 2)
            except (OSError, OverflowError):
                pass


@pytest.mark.parametrize(
    ("text", "allowed"), [("", None), ("29600-29631", range(29600, 29632)), ("1-65535", range(1, 65536))]
)
def test_the_variable_names_a_range(text: str, allowed: range | None) -> None:
    assert listening_ports({"COLLECTIVES_PORTS": text}) == allowed


@pytest.mark.parametrize("text", ["29600", "29631-29600", "0-5", "1-65536", "1-", "-5", "a-b", "1-2-3", " "])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="COLLECTIVES_PORTS"):
        listening_ports({"COLLECTIVES_PORTS": text})


def test_sockets_share_a_range_until_it_is_used_up(two_free: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_RELEASED_S", 0.0)
    with ports.listen_in("127.0.0.1", two_free) as first, ports.listen_in("127.0.0.1", two_free) as second:
        assert {first.getsockname()[1], second.getsockname()[1]} == set(two_free)
        with pytest.raises(ports.PortsTaken, match=f"{two_free[0]}-{two_free[-1]}"):
            ports.listen_in("127.0.0.1", two_free)


def test_a_port_that_is_about_to_be_released_is_waited_for(two_free: range) -> None:
    one = two_free[:1]
    held = ports.listen_in("127.0.0.1", one)
    threading.Timer(0.1, held.close).start()
    with ports.listen_in("127.0.0.1", one) as listening:
        assert listening.getsockname()[1] == one[0]


def test_an_address_that_is_not_of_this_host_is_an_error_at_once(two_free: range) -> None:
    with pytest.raises(OSError, match="assign"):
        ports.listen_in("192.0.2.1", two_free)


@pytest.mark.parametrize(
    ("own", "address", "seen"),
    [
        ("fe80::2%lan", "fe80::1%eth0", "fe80::1%lan"),
        ("fe80::2%lan", "fd77::1", "fd77::1"),
        ("fd77::2", "fe80::1%eth0", "fe80::1%eth0"),
        ("10.0.0.2", "10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_scope_is_that_of_the_host_that_connects(own: str, address: str, seen: str) -> None:
    assert seen_from(own, address) == seen


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "fd77::1", "fe80::1%lo"])
def test_addresses_and_their_texts(address: str) -> None:
    _, place = socket_address(address, 29500)
    assert address_text(place) == address
    assert place[1] == 29500
