"""The test of the connections between two hosts, in both directions: at the rendezvous port and at ephemeral ports.

The listener accepts one connection after the other at the rendezvous port, until one sends _GREETING: of any other, it reads no
more bytes than that. The two sides then take turns to open ports, to which the other side connects, send a probe longer than a
packet, and measure the connection. They exchange only lines of JSON and zeros.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from gradwire.collectives.control.asking import look_up
from gradwire.collectives.control.own_address import own_address
from gradwire.collectives.control.paths import REMEDY, LargePacketsLost, check_paths
from gradwire.collectives.environment import INTERFACE_VARIABLES
from gradwire.collectives.errors import LinkError
from gradwire.trainer.tools.check.machine import Finding

_GREETING = b'"gradwire check 3"\n'
#: The limits of the greeting, of each answer, of a whole test, and of a connection to a port.
_GREETING_S, _ANSWER_S, _ALL_S, _KNOCK_S = 5.0, 30.0, 120.0, 3.0
_DEALT_OUT = 2
#: The number of round trips, and at most how many zeros measure the rate, for at most about how long.
_PINGS, _STREAM_BYTES, _STREAM_S = 50, 1 << 28, 1.0
_LONGEST_LINE = 1 << 12
_STRANGE = "the other side is not gradwire check"


class _JsonLines:
    """Sends and receives lines of JSON on a connection, after the greetings, with a deadline for each answer, and one for all.
    Raises ConnectionError if the other side sends another greeting."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._end = time.monotonic() + _GREETING_S
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(_GREETING)
        for each in _GREETING:
            if self._receive(1)[0] != each:
                raise ConnectionError(_STRANGE)
        self._end = time.monotonic() + _ALL_S

    def write(self, said: Any, zeros: int = 0) -> None:
        """Send a value, and so many zeros."""
        self._send(json.dumps(said).encode() + b"\n" + bytes(zeros))

    def read(self) -> Any:
        """Return the next value from the other side. Raises OSError if it does not arrive."""
        line = b""
        while not line.endswith(b"\n"):
            line += self._receive(1)  # and not a byte more: the next bytes may not be a line
            if len(line) > _LONGEST_LINE:
                raise ConnectionError(_STRANGE)
        return json.loads(line)

    def read_ports(self) -> list[int]:
        """Return the ports that the other side has opened."""
        ports: list[int] = self.read()
        if type(ports) is not list or len(ports) > _DEALT_OUT + 1 or {*map(type, ports)} - {int}:
            raise ConnectionError(_STRANGE)
        if not all(0 < port < 1 << 16 for port in ports):
            raise ConnectionError(_STRANGE)
        return ports

    def echo(self) -> None:
        """Answer the other side's round trips: receive the zeros that follow each number, and send it back, until a None."""
        while (count := self.read()) is not None:
            left = int(count)
            while left > 0:
                left -= len(self._receive(min(left, 1 << 16)))
            self.write(count)

    def round_trip(self, zeros: int) -> float:
        """Send zeros, and return the seconds until the other side confirms them."""
        start = time.perf_counter()
        self.write(zeros, zeros)
        self.read()
        return time.perf_counter() - start

    def measure_rate(self) -> float:
        """Return how many bytes per second arrive at the other side, and end its echo()."""
        zeros, took_s = 1 << 16, self.round_trip(1 << 16)
        while took_s < _STREAM_S / 2 and zeros < _STREAM_BYTES:
            zeros *= 2
            took_s = self.round_trip(zeros)
        self.write(None)
        return zeros / took_s

    def try_large_packets(self) -> bool:
        """Return whether a probe longer than one packet arrives at both ends. Raises OSError for all other errors."""
        self.socket.setblocking(False)
        try:
            check_paths(0, {1: self.socket}, min(time.monotonic() + _ANSWER_S, self._end), lambda: None)
        except LargePacketsLost:
            return False
        except LinkError as error:
            raise ConnectionError(str(error)) from error
        return True

    def _send(self, data: bytes) -> None:
        self._limit()
        self.socket.sendall(data)

    def _receive(self, at_most: int) -> bytes:
        self._limit()
        if not (piece := self.socket.recv(at_most)):
            raise ConnectionError("the other side has closed the connection")
        return piece

    def _limit(self) -> None:
        if (left_s := self._end - time.monotonic()) <= 0:  # also if the other side never pauses
            raise TimeoutError("timed out")
        self.socket.settimeout(min(_ANSWER_S, left_s))


@contextmanager
def _of_strangers() -> Iterator[None]:
    """Raise ConnectionError for the other side's data that cannot be read: another program may send anything."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ConnectionError(_STRANGE) from error


def links(host: str, port: int) -> Iterator[Finding]:
    """Test the connections to and from a host on which `gradwire check --listen` runs."""
    there, command = f"{host} port {port}", f"gradwire check --listen --port {port}"
    try:
        address = look_up(host, time.monotonic() + _ANSWER_S)[0]
    except (LinkError, OSError, UnicodeError) as error:
        yield Finding("failed", f"{host} does not resolve: {error}", "write its address, or add it to /etc/hosts")
        return
    try:
        connection = socket.create_connection((address, port), _KNOCK_S)
    except ConnectionRefusedError:
        yield Finding("failed", f"no process listens at {there}", f"run on {host} first: {command}")
        return
    except OSError as error:
        do = f"open port {port} of {host} in its firewall; and run there: {command}"
        yield Finding("failed", f"to {there}: {_why(error)}", do)
        return
    with connection:
        try:
            with _of_strangers():
                line = _JsonLines(connection)
                yield Finding("ok", f"to {there}: open")
                yield from _both_directions(line, host, str(address), port)
                if line.try_large_packets():
                    yield _measured(line, host)
                else:
                    yield Finding("failed", f"{host}: large packets are lost on the way, but small ones arrive", REMEDY)
        except OSError as error:
            yield Finding("failed", f"{there}: {_text(error)}", f"run there: {command}")


def _both_directions(line: _JsonLines, host: str, address: str, port: int) -> Iterator[Finding]:
    ports = line.read_ports()
    yield _direction(f"to {host}", ports, _blocked(address, ports), f"open the ports of {host} in its firewall")
    with ExitStack() as stack:
        ports = _open(stack, line.socket, port)
        line.write(ports)
        answer = line.read()
    if port not in ports:
        yield Finding("note", f"port {port} is in use here, so {host} could not test it")
    yield _direction(f"from {host}", ports, answer["blocked"], "open the ports of this host in its firewall")
    seen = answer["seen"]
    with suppress(LinkError, ValueError):  # the test of this machine reports it
        given = own_address(os.environ, time.monotonic() + _ANSWER_S, host)
        if given != seen and not ipaddress.ip_address(seen).is_loopback:
            variable = next((name for name in INTERFACE_VARIABLES if os.environ.get(name)), None)
            do = (
                f"correct or unset {variable}"
                if variable
                else "use a network that translates no addresses, such as a VPN"
            )
            yield Finding("note", f"{host} sees this host as {seen}, but ranks here would announce {given}", do)


def _measured(line: _JsonLines, host: str) -> Finding:
    back_s = statistics.median(line.round_trip(0) for _ in range(_PINGS))
    there = line.measure_rate()
    line.echo()
    rates = f"{there / 1e6:.0f} MB/s there, {float(line.read()) / 1e6:.0f} MB/s back"
    return Finding("ok", f"{host}: {back_s * 1e6:.0f} us there and back; one connection carries {rates}")


def listen(port: int, timeout_s: float) -> Iterator[Finding]:
    """Take part in the test of another host, if it connects within timeout_s seconds."""
    end = time.monotonic() + timeout_s
    try:
        server = _server("", port)
    except OSError as error:
        do = "end the process that uses it, or give another --port"
        yield Finding("failed", f"cannot listen at port {port}: {error.strerror}", do)
        return
    with server:
        why = "no host connected"
        while (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, peer = server.accept()
            except TimeoutError:
                break
            name = _plain(peer[0])
            with connection:
                try:
                    with _of_strangers():
                        _answer(_JsonLines(connection), name)
                except OSError as error:  # perhaps another program connected
                    why = f"{name} connected, but: {_text(error)}"
                else:
                    yield Finding("ok", f"{name} has finished its check and prints the result")
                    return
        do = f"run on the other host: gradwire check --host {socket.gethostname()} --port {port}"
        yield Finding("failed", f"within {timeout_s:g} s {why}", do)


def _answer(line: _JsonLines, peer: str) -> None:
    """Take part in one test."""
    with ExitStack() as stack:
        line.write(_open(stack, line.socket, None))
        ports = line.read_ports()
    line.write({"blocked": _blocked(peer, ports), "seen": peer})
    if line.try_large_packets():
        line.echo()
        line.write(line.measure_rate())


def _open(stack: ExitStack, connection: socket.socket, port: int | None) -> list[int]:
    """Listen at ephemeral ports, and at a given one if it is free, until the stack is closed. Return the ports."""
    address = _plain(connection.getsockname()[0])
    found = []
    for number in (*([] if port is None else [port]), *[0] * _DEALT_OUT):
        with suppress(OSError):
            found.append(stack.enter_context(_server(address, number)).getsockname()[1])
    return found


def _server(address: str, port: int) -> socket.socket:
    if address or not socket.has_dualstack_ipv6():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)


def _blocked(address: str, ports: list[int]) -> list[str]:
    """Connect to ports at which the other side listens. Return those that cannot be reached, each with the reason."""
    found = []
    for port in ports:
        try:
            socket.create_connection((address, port), _KNOCK_S).close()
        except OSError as error:
            found.append(f"port {port}: {_why(error)}")
    return found


def _direction(name: str, ports: list[int], blocked: list[str], do: str) -> Finding:
    if blocked:
        return Finding("failed", f"{name}: {'; '.join(blocked)}", f"{do}, or allow all connections from the other host")
    if not ports:
        return Finding("note", f"{name}: no port could be opened for a test")
    return Finding("ok", f"{name}: ports {', '.join(map(str, ports))} open")


def _plain(address: str) -> str:
    """Return an IPv4 address without the prefix that a socket of IPv6 gives it; other addresses unchanged."""
    return address.removeprefix("::ffff:")


def _text(error: OSError) -> str:
    return str(error) or type(error).__name__


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_KNOCK_S:g} s: a firewall drops it, or the host is down"
    if isinstance(error, ConnectionRefusedError):
        return "refused: a firewall rejects it"
    return error.strerror or str(error)
