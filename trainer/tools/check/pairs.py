"""The test of all hosts of a job: one rank of each takes part, and measures the connection to each other host in both directions,
one after the other."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple
from typing import Any

from gradwire.collectives import Communicator
from gradwire.collectives.control.addresses import seen_from
from gradwire.collectives.control.interfaces import Interface, interfaces_here
from gradwire.collectives.control.key import Key
from gradwire.collectives.control.ports import listen_in
from gradwire.collectives.environment import listening_ports
from gradwire.collectives.errors import CollectiveError
from gradwire.collectives.schedules.topology import host_id
from gradwire.trainer.launcher.hosts import parse_hosts, place
from gradwire.trainer.launcher.job import run_job
from gradwire.trainer.launcher.options import Job
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
from gradwire.trainer.tools.check.lines import ALL_S, KNOCK_S, JsonLines, of_strangers
from gradwire.trainer.tools.check.machine import Finding
from gradwire.trainer.world.process_sets import global_process_set
from gradwire.trainer.world.world import communicator_of, current_world, init, shutdown

#: How long a rank waits for the connection of the other host, and the ranks for a measurement.
_ACCEPT_S, _MEASUREMENT_S = KNOCK_S + 2.0, ALL_S + 30.0


def start_on(names: str, port: int, key: Key | None) -> int:
    """Start this test on hosts as `gradwire run` starts ranks, and return the exit status. names: the hosts, separated by commas.
    Raises ValueError and LinkError as run_job(), and ValueError if there are fewer than two hosts."""
    hosts = place(None, dict.fromkeys(parse_hosts(names), 1))
    if len(hosts) < 2:
        raise ValueError(f"--hosts {names} names one host: give at least two, separated by commas")
    command = [sys.executable, "-m", "gradwire", "check", "--port", str(port), "--hosts"]
    return run_job(Job(command, hosts, master_port=port, key=key))


def all_pairs(meeting_port: int, key: Key | None) -> Iterator[Finding]:
    """Test the connections between the hosts of the ranks that a launcher has started. Yield the findings on rank 0. A collective
    call. meeting_port: the rendezvous port in the commands that start a job. key: that of init()."""
    try:
        init(timeout_s=_MEASUREMENT_S)
    except (CollectiveError, ValueError) as error:
        yield Finding("failed", str(error), "run `gradwire check --listen` on one host, and `--host` on the other")
        return
    try:
        communicator, meeting = communicator_of(global_process_set), current_world().meeting
        address = "127.0.0.1" if meeting is None else meeting.membership.address
        with listen_in("", listening_ports(os.environ)) as listening:
            port = listening.getsockname()[1]
            interfaces = [astuple(each) for each in interfaces_here()]
            mine = [communicator.rank, socket.gethostname(), address, port, interfaces]
            by_host: dict[str, SeenHost] = {}
            for host, said in communicator.allgather_record([host_id(), mine]):
                by_host.setdefault(host, _seen(*said))
            found = _measured([*by_host.values()], communicator, listening, meeting_port, key)
            if communicator.rank == 0:
                yield from found
            else:
                for _ in found:
                    pass
    finally:
        shutdown()


def _seen(rank: int, name: str, address: str, port: int, interfaces: list[Any]) -> SeenHost:
    """Return the host that a rank has described in JSON."""
    seen = tuple(Interface(name, tuple(addresses), rate) for name, addresses, rate in interfaces)
    return SeenHost(rank, name, address, port, seen)


def _measured(
    hosts: list[SeenHost],
    communicator: Communicator,
    listening: socket.socket,
    meeting_port: int,
    key: Key | None,
) -> Iterator[Finding]:
    """Measure one cable after the other, so that none takes the rate of another one. Yield the same findings on all ranks."""
    if len(hosts) < 2:
        yield Finding("failed", "all ranks are on one host", "name the hosts, or start a rank on each: --hosts a,b,c")
        return
    cables = cables_between(hosts)
    carried: dict[Cable, Carried] = {}
    for cable in cables:
        first, second = (hosts[end] for end in cable.ends)
        rates: Carried | None = None
        if communicator.rank == first.rank:
            rates = _measure(cable, second.port, key)
        elif communicator.rank == second.rank:
            _answer(listening, key)
        said = communicator.allgather_record(rates)[first.rank]
        carried[cable] = said if isinstance(said, str) else (said[0], said[1])
        if not any(each.ends == cable.ends and each not in carried for each in cables):
            yield from pair_findings(hosts, {each: carried[each] for each in carried if each.ends == cable.ends})
    yield from slow_pair(hosts, carried)
    yield from start_commands(hosts, best_interfaces(hosts, carried), meeting_port)


def _measure(cable: Cable, port: int, key: Key | None) -> Carried:
    """Connect to the second host of a cable, and return what it carries. A cable in use is what the kernel selects."""
    own, other = cable.addresses[0], seen_from(*cable.addresses)
    source = None if cable.in_use else (own, 0)
    try:
        with socket.create_connection((other, port), KNOCK_S, source) as connection, of_strangers():
            line = JsonLines(connection, key, dials=True)
            there = line.measure_rate()
            line.echo()
            return there * 8e-6, float(line.read()) * 8e-6
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def _answer(listening: socket.socket, key: Key | None) -> None:
    """Take part in one measurement; return without one if no rank connects."""
    end = time.monotonic() + _ACCEPT_S
    with suppress(TimeoutError):
        while (left_s := end - time.monotonic()) > 0:
            listening.settimeout(left_s)
            connection, _ = listening.accept()
            with connection, suppress(OSError), of_strangers():
                line = JsonLines(connection, key, dials=False)
                line.echo()
                line.write(line.measure_rate())
                return
