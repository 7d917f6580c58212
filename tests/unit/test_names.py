"""What becomes of waits for the look-up of a name that never returns, as while the name servers are down."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire.collectives.control import asking
from gradwire.collectives.control.asking import connections, hang_up, look_up, unblock
from gradwire.collectives.control.membership import coming_together
from gradwire.collectives.control.own_address import own_address
from gradwire.collectives.errors import CollectiveTimeout, LinkError
from gradwire.trainer.__main__ import main
from gradwire.trainer.tools.check import links, machine
from gradwire.trainer.world import meeting
from gradwire.trainer.world.launch import Launch

SOON_S = 0.2  # the deadline of a look-up
DEADLINE_S = 20.0  # by which a wait has ended that has a deadline
NAME = "rank0.example"


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let no look-up of a name return until the test is over. The names that were looked up are added to the list."""
    names: list[str] = []
    over = threading.Event()
    real = socket.getaddrinfo

    def never(host: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("flags") == socket.AI_NUMERICHOST:
            return real(host, *arguments, **options)
        names.append(host)
        over.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "the test is over")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    began = time.monotonic()
    yield names
    over.set()
    assert time.monotonic() - began < DEADLINE_S


def soon() -> float:
    return time.monotonic() + SOON_S


def is_late(error: LinkError) -> bool:
    return error.timed_out and f"the look-up of '{NAME}' on host {socket.gethostname()}" in str(error)


def test_an_address_is_not_looked_up(looked_up: list[str]) -> None:
    for address in ("127.0.0.1", "::1", "10.0.0.7"):
        assert look_up(address, deadline=0.0) == [address]
    assert looked_up == []


def test_a_name_that_nobody_knows_is_no_wait() -> None:
    with pytest.raises(socket.gaierror):
        look_up("no host.invalid", time.monotonic() + DEADLINE_S)
    with pytest.raises(UnicodeError):
        look_up("a" * 100, time.monotonic() + DEADLINE_S)


def test_a_name_is_looked_up() -> None:
    assert {"127.0.0.1", "::1"} & set(look_up("localhost", time.monotonic() + DEADLINE_S))


def test_the_error_names_the_host(looked_up: list[str]) -> None:
    with pytest.raises(LinkError) as caught:
        look_up(NAME, soon())
    assert is_late(caught.value)


def test_the_address_of_a_rank(looked_up: list[str]) -> None:
    """An interface that is named needs no look-up."""
    named = {"MASTER_ADDR": NAME, "COLLECTIVES_INTERFACE": "lo"}
    assert own_address(named, deadline=0.0) == "127.0.0.1"
    assert looked_up == []
    with pytest.raises(LinkError) as caught:
        own_address({"MASTER_ADDR": NAME}, soon())
    assert is_late(caught.value)


def test_which_address_a_rank_has() -> None:
    """A variable comes before the peer. A peer at a loopback address is on this host, and shows no network."""
    nowhere = "192.0.2.1"
    assert own_address({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": nowhere}, soon(), nowhere) == "127.0.0.1"
    assert own_address({"MASTER_ADDR": "127.0.0.1"}, soon(), "127.0.1.1") == "127.0.0.1"
    assert own_address({}, soon(), "127.0.1.1") == own_address({}, soon())


def test_the_ranks_do_not_meet(looked_up: list[str]) -> None:
    with pytest.raises(CollectiveTimeout, match=f"rank 3: .*not done after 5 s: .*'{NAME}'"), coming_together(3, 5.0):
        own_address({"MASTER_ADDR": NAME}, soon())


def test_a_rank_that_initializes(looked_up: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", NAME)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(CollectiveTimeout, match=f"rank 1: init: .*'{NAME}'"):
        meeting.meet(Launch("torchrun", 1, 2, None, None), SOON_S, "gloo")


def test_a_rank_whose_later_look_up_does_not_return(looked_up: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a rank that connects to the store, after the look-ups before."""
    monkeypatch.setenv("MASTER_ADDR", NAME)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("COLLECTIVES_INTERFACE", "lo")
    monkeypatch.setattr(meeting, "connections", lambda *_: set())
    monkeypatch.setattr(meeting, "_GRACE_S", 0.0)
    monkeypatch.setattr(asking, "_UNBLOCK_S", SOON_S)
    with pytest.raises(CollectiveTimeout, match=f"rank 1: init: .*at {NAME}:29500: .*is a name server down"):
        meeting.meet(Launch("torchrun", 1, 2, None, None), SOON_S, "gloo")


def test_connections_that_are_shut_down(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Without the address of the store none is found, which takes no longer than the wait for the call that ends."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    assert connections("localhost", store.port, time.monotonic() + DEADLINE_S)
    request.getfixturevalue("looked_up")
    with pytest.raises(LinkError, match="the look-up of 'localhost'"):
        connections("localhost", store.port, soon())
    monkeypatch.setattr(asking, "_UNBLOCK_S", SOON_S)
    unblock(Future(), partial(hang_up, store))
    assert connections("127.0.0.1", store.port, deadline=0.0) | connections("::1", store.port, deadline=0.0)


def test_what_check_finds(looked_up: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_NAME_S", SOON_S)
    monkeypatch.setattr(links, "ANSWER_S", SOON_S)
    monkeypatch.setattr(socket, "gethostname", lambda: "node07")
    (to_host,) = links.links(NAME, 29500, None)
    found = [("node07", machine.own_name({})), (NAME, machine.interface({"MASTER_ADDR": NAME})), (NAME, to_host)]
    for name, finding in found:
        assert finding.state != "ok"
        assert f"the look-up of {name!r} on host node07 has not returned" in finding.what


@pytest.mark.parametrize("elastic", [[], ["--min-np", "1"]])
def test_a_launcher(looked_up: list[str], elastic: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One whose ranks on other hosts need the address of this host."""
    hosts = ["-np", "2", "-H", f"localhost:1,{NAME}:1", "--start-timeout", "1"]
    assert main(["run", *hosts, *elastic, "true"]) == 2
    assert f"gradwire: the look-up of '{NAME}'" in capsys.readouterr().err
