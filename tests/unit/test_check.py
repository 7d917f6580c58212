"""What `gradwire check` finds, and how it says it."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from gradwire.collectives.control.key import Key
from gradwire.collectives.control.own_address import own_address
from gradwire.trainer.tools.check import __main__ as command
from gradwire.trainer.tools.check import lines, links, machine, ranks
from gradwire.trainer.tools.check.machine import Finding
from tests.harness import wait_until
from tests.ports import unused_port
from tests.ranks.test_init import listener

GREETING = b'"gradwire check 3"\n'


def test_a_line() -> None:
    assert str(Finding("ok", "fine")) == "ok      fine"
    assert str(Finding("failed", "not so", "mend it")) == "failed  not so\n        -> mend it"


@pytest.mark.parametrize(
    ("addresses", "environment", "state", "said"),
    [
        (["10.0.0.7"], {}, "ok", "node07, resolves to 10.0.0.7"),
        (["127.0.1.1"], {}, "note", "resolves to 127.0.1.1, which other hosts do not reach"),
        (["10.0.0.7", "::1"], {}, "note", "which other hosts do not reach"),
        (["127.0.1.1"], {"GLOO_SOCKET_IFNAME": "eth7"}, "ok", "GLOO_SOCKET_IFNAME=eth7 takes precedence"),
        (None, {}, "note", "node07, does not resolve: .*Name or service not known"),
    ],
)
def test_own_name(
    addresses: list[str] | None,
    environment: dict[str, str],
    state: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.getaddrinfo

    def resolve(name: Any, *arguments: Any, **named: Any) -> Any:
        if name != "node07":
            return real(name, *arguments, **named)
        if addresses is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "gethostname", lambda: "node07")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    found = machine.own_name(environment)
    assert found.state == state
    assert re.search(said, found.what)
    assert (found.do is not None and "export GLOO_SOCKET_IFNAME=" in found.do) == (state == "note")


def test_interface() -> None:
    assert machine.interface({"COLLECTIVES_INTERFACE": "lo"}) == Finding(
        "note",
        "ranks here are reached at 127.0.0.1, interface lo, but from this host only",
        "for more than one host: connect this one to a network, or name an interface in COLLECTIVES_INTERFACE",
    )
    wrong = machine.interface({"COLLECTIVES_INTERFACE": "eth77"})
    assert wrong.state == "failed"
    assert "COLLECTIVES_INTERFACE='eth77' names no interface with an address" in wrong.what


@pytest.mark.parametrize(
    ("environment", "state", "said"),
    [
        ({}, "ok", "not started by a launcher"),
        ({"MASTER_PORT": "29500"}, "note", "MASTER_PORT is set, but RANK is not"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "failed", "does not say where rank 0 listens"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "failed", "RANK=2 is not a rank of WORLD_SIZE=2"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9"},
            "ok",
            "torchrun: rank 1 of 2, meets at a:9",
        ),
        ({"SLURM_JOB_ID": "4", "SLURM_NTASKS": "3"}, "note", "srun python train.py"),
    ],
)
def test_launcher(environment: dict[str, str], state: str, said: str) -> None:
    found = machine.launcher(environment)
    assert found.state == state
    assert said in found.what


def test_open_files() -> None:
    assert machine.open_files(1024).state == "ok"
    assert machine.open_files(-1) == Finding("ok", "a process may open any number of files")
    assert machine.open_files(256) == Finding(
        "note", "a process may open 256 files, too few for many ranks", "ulimit -n 65536"
    )


def test_a_driver_that_hangs_or_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def hang(*arguments: Any, **named: Any) -> Any:
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "CUDA does not answer within 60 s" in machine.gpus()[0].what
    crash = subprocess.CompletedProcess("python", -11, stdout="", stderr="Traceback\nRuntimeError: driver too old\n")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **named: crash)
    assert machine.gpus() == [Finding("failed", "CUDA: RuntimeError: driver too old", "look at nvidia-smi and dmesg")]


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (found,) = machine.look_at_gpus()
    assert found.state == "note"
    assert "sees no GPU" in found.what


def test_a_gpu_without_nccl_and_cupy_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch, "ones", lambda *shape, device, dtype: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert [found.state for found in machine.look_at_gpus()] == ["ok", "note", "note"]


WELL = {"gloo": "ok", "TCP": "ok", "shared memory": "ok"}


@pytest.mark.parametrize(
    ("said", "states", "last"),
    [
        ([(WELL, ""), (WELL, "")], ["ok", "ok", "ok"], "sums are right"),
        ([(WELL, ""), (WELL | {"TCP": "a wrong sum"}, "")], ["ok", "failed", "ok"], "sums are right"),
        (
            [(WELL, ""), (WELL | {"shared memory": "another PID namespace?"}, "")],
            ["ok", "ok", "note"],
            "share no memory and use TCP: another PID namespace?",
        ),
        (
            [(WELL, ""), ({"gloo": "ok"}, "it did not finish in time")],
            ["ok", "failed"],
            "TCP: it did not finish in time",
        ),
        ([({}, "a rank ended with exit code -11: "), ({}, "")], ["failed"], "gloo: a rank ended with exit code -11"),
    ],
)
def test_two_ranks_are_one_line_each(said: Any, states: list[str], last: str) -> None:
    findings = ranks.findings(said)
    assert [finding.state for finding in findings] == states
    assert last in findings[-1].what
    assert all(finding.do for finding in findings if finding.state != "ok")


def listens(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


@contextmanager
def listening(port: int, found: list[Finding], key: Key | None = None) -> Iterator[None]:
    thread = threading.Thread(target=lambda: found.extend(links.listen(port, key, 30)))
    thread.start()
    try:
        wait_until(lambda: listens(port))
        yield
    finally:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("has_key", [False, True])
def test_links_in_both_directions(has_key: bool) -> None:
    """What connects before, and says nothing, is nobody, and so is who greets without the key."""
    there: list[Finding] = []
    key = Key.made() if has_key else None
    port = unused_port()
    with listening(port, there, key):
        if has_key:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(GREETING)
                assert b"check" not in stranger.recv(1 << 12)
        found = list(links.links("127.0.0.1", port, key))
    assert [finding.state for finding in found] == ["ok", "ok", "note", "ok", "ok"], found
    assert found[0].what == f"to 127.0.0.1 port {port}: open"
    assert found[1].what.startswith("to 127.0.0.1: ports ")
    assert found[2].what == f"port {port} is in use here, so 127.0.0.1 could not test it"
    assert found[3].what.startswith("from 127.0.0.1: ports ")
    assert re.search(
        r" us there and back; one connection carries [1-9]\d* MB/s there, [1-9]\d* MB/s back$", found[4].what
    )
    assert there[1:] == [Finding("ok", "127.0.0.1 has finished its check and prints the result")]


def test_strangers_end_their_connections_only() -> None:
    """Whatever they send, the listener waits for the check of another host. Nor do they end who dials it."""
    there: list[Finding] = []
    port = unused_port()
    with listening(port, there):
        for message in (b"[" * 100_000 + b"\n", b"[" * 4000 + b"\n", b"[70000]\n", b"{}\n", b"\xff\n"):
            for greeting in (b"", GREETING):
                with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):
                    stranger.sendall(greeting + message)
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(1 << 12):
                        pass
        found = list(links.links("127.0.0.1", port, None))
    assert [finding.state for finding in found] == ["ok", "ok", "note", "ok", "ok"], found
    assert [finding.state for finding in there] == ["ok", "ok"], there


@pytest.mark.parametrize("after_greeting", [False, True])
@pytest.mark.parametrize("message", [b"[" * 100_000 + b"\n", b"[70000]\n", b"7\n"])
def test_a_stranger_that_is_dialled_is_a_finding(message: bytes, after_greeting: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as program:

        def answer() -> None:
            with program.accept()[0] as connection, suppress(OSError):
                connection.sendall(GREETING * after_greeting + message)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 12):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        found = list(links.links("127.0.0.1", program.getsockname()[1], None))
        thread.join()
    assert [finding.state for finding in found] == ["ok"] * after_greeting + ["failed"], found


def test_blocked_ports_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first knock is this side's, at the first of two ports; all others are answered."""
    knocks: list[int] = []
    real = socket.create_connection

    def connect(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        if address[1] != port:
            knocks.append(address[1])
            if len(knocks) in (1, 4):
                raise TimeoutError
        return real(address, timeout)

    port = unused_port()
    with listening(port, []):
        monkeypatch.setattr(socket, "create_connection", connect)
        found = list(links.links("127.0.0.1", port, None))
    blocked = [finding for finding in found if finding.state == "failed"]
    why = "no answer within 3 s: a firewall drops it, or the host is down"
    assert [finding.what for finding in blocked] == [
        f"to 127.0.0.1: port {knocks[0]}: {why}",
        f"from 127.0.0.1: port {knocks[3]}: {why}",
    ]
    assert "the ports of 127.0.0.1" in (blocked[0].do or "")
    assert "the ports of this host" in (blocked[1].do or "")


def test_nobody_listens_and_nobody_comes() -> None:
    port = unused_port()
    (found,) = links.links("127.0.0.1", port, None)
    assert found == Finding(
        "failed",
        f"no process listens at 127.0.0.1 port {port}",
        f"run on 127.0.0.1 first: gradwire check --listen --port {port}",
    )
    (found,) = links.links("no host.invalid", port, None)
    assert found.what.startswith("no host.invalid does not resolve: ")
    waits = links.listen(port, None, 0.05)
    found = next(waits)
    assert listens(port)
    assert found.state == "ok"
    assert found.do is not None
    assert f"gradwire check --host {own_address(os.environ, time.monotonic() + 10)} --port {port}" in found.do
    (found,) = waits
    assert found.what.startswith("within 0.05 s ")
    with listener() as silent:
        (found,) = links.listen(silent.getsockname()[1], None, 1)
        assert found.what.startswith("cannot listen at port ")


def test_something_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "ANSWER_S", 0.05)
    with listener() as silent:
        port = silent.getsockname()[1]
        (found,) = links.links("127.0.0.1", port, None)
    assert found.state == "failed"
    assert found.what == f"127.0.0.1 port {port}: timed out"
    assert found.do == f"run there: gradwire check --listen --port {port}"


def test_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for state, status, last in (("note", 0, "everything that gradwire needs works"), ("failed", 1, "1 failed")):
        finding = Finding(state, "it", "mend it")  # type: ignore[arg-type]
        monkeypatch.setattr(command, "_checks", lambda host, port, key, finding=finding: iter([finding]))
        assert command.main([]) == status
        assert capsys.readouterr().out.splitlines()[-1] == last
    with pytest.raises(SystemExit):
        command.main(["--port", "0"])
    with pytest.raises(SystemExit):
        command.main(["--host", "a", "--listen"])
    with pytest.raises(SystemExit):
        command.main(["--hosts", "localhost"])
    with pytest.raises(SystemExit):  # names are left out, and no launcher has started this process
        command.main(["--hosts"])
