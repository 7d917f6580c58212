"""Hosts as Debian installs them, on this machine: each is a few namespaces, and knows only its own name, as a loopback address.

Their default route leads to a network without other hosts. Tests that use them are skipped where namespaces cannot be made.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from gradwire.bench.hosts import Cluster, HostsError, check_machine
from tests.harness import wait_until
from tests.pages import ROOT

DEADLINE_S = 60.0


def found(command: str) -> str | None:
    """Return the path of a command, which may be one for administrators; None if there is none."""
    return shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Hosts:
    """Hosts that share a folder. environment: the variables of commands."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self._cluster = cluster
        self._networks = {os.readlink(f"/proc/{host.pid}/ns/net") for host in cluster.hosts}

    def start(self, host: int, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command on a host, in the folder. Its standard error is that of pytest."""
        inside = self._cluster.hosts[host].enter(["env", "--chdir", str(self.folder), *command])
        return subprocess.Popen(inside, env=self.environment, stdout=subprocess.PIPE, text=True)

    def outputs(self, *commands: tuple[int, Sequence[str]], within_s: float = DEADLINE_S) -> list[str]:
        """Return what commands print that run at the same time, each on a host. Raises AssertionError if one fails."""
        started = [self.start(host, command) for host, command in commands]
        try:
            printed = [process.communicate(timeout=within_s)[0] for process in started]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(str(error)) from error
        finally:
            for process in started:
                process.kill()
                process.wait()
        assert [process.returncode for process in started] == [0] * len(commands)
        return printed

    def end(self) -> None:
        """End all processes on the hosts, in whatever session they are."""
        wait_until(lambda: not [each for each in Path("/proc").glob("[0-9]*") if self._kill(each)])

    def _kill(self, process: Path) -> bool:
        with suppress(OSError):
            if os.readlink(process / "ns" / "net") in self._networks:
                os.kill(int(process.name), signal.SIGKILL)
                return " Z " not in (process / "stat").read_text()
        return False


@contextmanager
def debian_hosts(number: int, folder: Path, rates: Sequence[str] = ("10gbit",)) -> Iterator[Hosts]:
    """Make hosts that share a folder, and at the end kill what runs there. Skip the test if they cannot be made. rates: of the
    networks that join them, by eth0, eth1 and so on."""
    (folder / "resolv.conf").touch()
    with ExitStack() as stack:
        try:
            check_machine()
            cluster = stack.enter_context(Cluster(number, rates[0], knows_names=False))
            for network, rate in enumerate(rates[1:], start=1):
                cluster.add_network(network, rate)
            made = Hosts(cluster, folder)
            stack.callback(made.end)
            for host, namespace in enumerate(cluster.hosts):
                namespace.run(
                    f"mount --bind {folder}/resolv.conf /etc/resolv.conf"
                )  # no look-up waits for a name server
                namespace.run("ip link add uplink type veth peer name nowhere")
                namespace.run(f"ip address add 192.168.77.{host + 1}/24 dev uplink")
                namespace.run("ip link set nowhere up")
                namespace.run("ip link set uplink up")
                namespace.run("ip route add default dev uplink")
        except HostsError as error:
            pytest.skip(str(error))
        yield made
