"""The test of the connections between two hosts, in both directions: at the rendezvous port, and at ports as those of ranks.

The listener accepts one connection after the other at the rendezvous port, until one sends the greeting: of any other, it reads
no more bytes than that. The two sides then take turns to open ports, to which the other side connects, send a probe longer than a
packet, and measure the connection. They exchange only lines of JSON and zeros.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from gradwire.collectives.control.addresses import address_text, without_scope
from gradwire.collectives.control.asking import look_up
from gradwire.collectives.control.key import Key
from gradwire.collectives.control.own_address import own_address
from gradwire.collectives.control.paths import REMEDY
from gradwire.collectives.control.ports import listen_in, listen_on
from gradwire.collectives.control.records import Connection
from gradwire.collectives.environment import INTERFACE_VARIABLES, listening_ports
from gradwire.collectives.errors import LinkError
from gradwire.trainer.tools.check.lines import ANSWER_S, KNOCK_S, MOST_PORTS, JsonLines, of_strangers, plain
from gradwire.trainer.tools.check.machine import Finding

#: How many ports each side opens beside the rendezvous port, and the number of round trips.
_DEALT_OUT, _PINGS = MOST_PORTS - 1, 50


def links(host: str, port: int, key: Key | None) -> Iterator[Finding]:
    """Test the connections to and from a host on which `gradwire check --listen` runs, with the same key."""
    there, command = f"{host} port {port}", f"gradwire check --listen --port {port}"
    try:
        address = look_up(host, time.monotonic() + ANSWER_S)[0]
    except (LinkError, OSError, UnicodeError) as error:
        yield Finding("failed", f"{host} does not resolve: {error}", "write its address, or add it to /etc/hosts")
        return
    try:
        connection = socket.create_connection((address, port), KNOCK_S)
    except ConnectionRefusedError:
        yield Finding("failed", f"no process listens at {there}", f"run on {host} first: {command}")
        return
    except OSError as error:
        do = f"open port {port} of {host} in its firewall; and run there: {command}"
        yield Finding("failed", f"to {there}: {_why(error)}", do)
        return
    with connection:
        try:
            with of_strangers():
                line = JsonLines(connection, key, dials=True)
                yield Finding("ok", f"to {there}: open")
                yield from _both_directions(line, host, str(address), port)
                if line.try_large_packets():
                    yield _measured(line, host)
                else:
                    yield Finding("failed", f"{host}: large packets are lost on the way, but small ones arrive", REMEDY)
        except OSError as error:
            yield Finding("failed", f"{there}: {_text(error)}", f"run there: {command}")


def _both_directions(line: JsonLines, host: str, address: str, port: int) -> Iterator[Finding]:
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
        given = own_address(os.environ, time.monotonic() + ANSWER_S, host)
        if without_scope(given) != without_scope(seen) and not ipaddress.ip_address(seen).is_loopback:
            variable = next((name for name in INTERFACE_VARIABLES if os.environ.get(name)), None)
            do = (
                f"correct or unset {variable}"
                if variable
                else "use a network that translates no addresses, such as a VPN"
            )
            yield Finding("note", f"{host} sees this host as {seen}, but ranks here would announce {given}", do)


def _measured(line: JsonLines, host: str) -> Finding:
    back_s = statistics.median(line.round_trip(0) for _ in range(_PINGS))
    there = line.measure_rate()
    line.echo()
    rates = f"{there / 1e6:.0f} MB/s there, {float(line.read()) / 1e6:.0f} MB/s back"
    return Finding("ok", f"{host}: {back_s * 1e6:.0f} us there and back; one connection carries {rates}")


def listen(port: int, key: Key | None, timeout_s: float) -> Iterator[Finding]:
    """Take part in the test of another host, if it connects within timeout_s seconds, with the same key. The first finding comes
    before it connects."""
    end = time.monotonic() + timeout_s
    try:
        listening = listen_on("", port)
    except OSError as error:
        do = "end the process that uses it, or give another --port"
        yield Finding("failed", f"cannot listen at port {port}: {error.strerror}", do)
        return
    with listening:
        here = socket.gethostname()
        with suppress(LinkError, ValueError):  # the test of this machine reports it
            here = own_address(os.environ, time.monotonic() + ANSWER_S)
        do = f"run on the other host: gradwire check --host {here} --port {port}"
        yield Finding("ok", f"listens at {here} port {port}, for {timeout_s:g} s at most", do)
        why = "no host connected"
        while (left := end - time.monotonic()) > 0:
            listening.settimeout(left)
            try:
                connection, peer = listening.accept()
            except TimeoutError:
                break
            name = plain(address_text(peer))
            with connection:
                try:
                    with of_strangers():
                        _answer(JsonLines(connection, key, dials=False), name)
                except OSError as error:  # perhaps another program connected
                    why = f"{name} connected, but: {_text(error)}"
                else:
                    yield Finding("ok", f"{name} has finished its check and prints the result")
                    return
        yield Finding("failed", f"within {timeout_s:g} s {why}", do)


def _answer(line: JsonLines, peer: str) -> None:
    """Take part in one test."""
    with ExitStack() as stack:
        line.write(_open(stack, line.socket, None))
        ports = line.read_ports()
    line.write({"blocked": _blocked(peer, ports), "seen": peer})
    if line.try_large_packets():
        line.echo()
        line.write(line.measure_rate())


def _open(stack: ExitStack, connection: Connection, port: int | None) -> list[int]:
    """Listen at ports as ranks do, and at a given one if it is free, until the stack is closed. Return the ports."""
    address, allowed = plain(address_text(connection.getsockname())), listening_ports(os.environ)
    found = []
    for number in (*([] if port is None else [port]), *[0] * _DEALT_OUT):
        with suppress(OSError):
            made = listen_on(address, number) if number else listen_in(address, allowed)
            found.append(stack.enter_context(made).getsockname()[1])
    return found


def _blocked(address: str, ports: list[int]) -> list[str]:
    """Connect to ports at which the other side listens. Return those that cannot be reached, each with the reason."""
    found = []
    for port in ports:
        try:
            socket.create_connection((address, port), KNOCK_S).close()
        except OSError as error:
            found.append(f"port {port}: {_why(error)}")
    return found


def _direction(name: str, ports: list[int], blocked: list[str], do: str) -> Finding:
    if blocked:
        return Finding("failed", f"{name}: {'; '.join(blocked)}", f"{do}, or allow all connections from the other host")
    if not ports:
        return Finding("note", f"{name}: no port could be opened for a test")
    return Finding("ok", f"{name}: ports {', '.join(map(str, ports))} open")


def _text(error: OSError) -> str:
    return str(error) or type(error).__name__


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {KNOCK_S:g} s: a firewall drops it, or the host is down"
    if isinstance(error, ConnectionRefusedError):
        return "refused: a firewall rejects it"
    return error.strerror or str(error)
