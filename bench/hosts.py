"""Simulated hosts on one machine: `python -m gradwire.bench hosts --hosts 4 --rate 1gbit --ranks 8 -- allreduce -b 4M`.

Every host has its own network, UTS and mount namespace (own address, hostname, /etc/hosts and /dev/shm), so processes
distinguish hosts as on real ones. A veth pair joins each host to one bridge, which has its own namespace. `tc tbf` limits
both ends of the pair: one end is the host's uplink, the other its downlink. Links are full duplex.

The namespaces have no names and exist only as long as their processes. These processes die with this process, even if it is
killed by SIGKILL. Two runs therefore cannot collide, and nothing is left behind.

The simulation has no wire latency (a veth hop takes microseconds) and no packet loss, and all hosts share the cores of this
machine. Processor time dominates at small sizes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MAX_HOSTS = 200
LEAST_BURST_BYTES, BURST_BYTES, BURST_S = 16 * 1024, 128 * 1024, 0.001
"""The burst of a link after a pause: the bytes of BURST_S at its rate, between LEAST_BURST_BYTES and BURST_BYTES.
BURST_BYTES is the smallest burst that keeps 1 Gbit/s: below the kernel's 64 KiB offload packets, tbf splits them in software,
and allreduce gets half of that rate. Slower links need less; 128 KiB would take 100 Mbit/s ten milliseconds."""
QUEUE_S = 0.05
"""The length of a link's queue in seconds at its rate. An ordinary switch port buffers as much at 1 Gbit/s: a few megabytes."""
MASTER_PORT = 29500
"""The port can be fixed: the first host is always a fresh namespace, in which every port is free."""
GRACE_S = 10.0
"""The time that the other ranks have to print their own errors after the first rank has failed."""
DEADLINE_EXIT = 124


HOLD = """
hostname "$HOST_NAME"
ip link set lo up
mount -t tmpfs tmpfs /dev/shm
echo "$HOST_TABLE" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
echo ready
exec sleep infinity
"""


class HostsError(Exception):
    """Raised if the hosts cannot be set up; the text says why."""


def rate_bits_per_s(rate: str) -> float:
    """Return the bits per second of a rate in `tc`'s notation: "1gbit" -> 1e9.

    Raises:
        ValueError: the rate is not a number followed by kbit, mbit or gbit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None:
        raise ValueError(f"rate {rate!r} is not a number followed by one of {', '.join(RATE_UNITS)}")
    return float(match[1]) * RATE_UNITS[match[2]]


def link_rate(text: str) -> str:
    """Return the text of a flag if it is a rate above 0. Raises argparse.ArgumentTypeError if not."""
    try:
        bits_per_s = rate_bits_per_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if bits_per_s == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate: nothing would arrive")
    return text


def rates_of(rate: str, hosts: int) -> list[str]:
    """Return the rate of every host's link. "100mbit,1gbit" is the rate of the first host, then the rate of all others.

    Raises: ValueError: a rate is malformed, or there are more rates than hosts.
    """
    rates = rate.split(",")
    for each in rates:
        rate_bits_per_s(each)
    if len(rates) > hosts:
        raise ValueError(f"rate {rate!r} names {len(rates)} links; there are {hosts} hosts")
    return rates + rates[-1:] * (hosts - len(rates))


def ranks_per_host(ranks: int, hosts: int) -> list[int]:
    """Spread ranks evenly over the hosts, in order; the first hosts get one more if they do not divide evenly: (5, 4) -> [2, 1,
    1, 1].

    Raises:
        ValueError: there are fewer ranks than hosts, no host, or more than MAX_HOSTS.
    """
    if not 1 <= hosts <= min(ranks, MAX_HOSTS):
        raise ValueError(
            f"{ranks} ranks cannot be spread over {hosts} hosts: each needs one, and {MAX_HOSTS} are the most"
        )
    share, extra = divmod(ranks, hosts)
    return [share + (host < extra) for host in range(hosts)]


def address(host: int, network: int = 0) -> str:
    return f"10.77.{network}.{host + 1}"


def link_shape(rate: str) -> str:
    """Return the arguments of `tc qdisc add` for both ends of a link."""
    bytes_per_s = rate_bits_per_s(rate) / 8
    burst_bytes = max(LEAST_BURST_BYTES, min(BURST_BYTES, int(bytes_per_s * BURST_S)))
    return f"root tbf rate {rate} burst {burst_bytes} limit {burst_bytes + int(bytes_per_s * QUEUE_S)}"


def host_table(alone: str | None = None) -> str:
    """Return the text of /etc/hosts: the address of every host, as IPv4 and as dual-stack sockets show it (mapped to IPv6).

    alone: the name of a host whose table is the one that Debian installs: it contains only this name, with a loopback address.
    """
    if alone is not None:
        return f"127.0.0.1 localhost\n127.0.1.1 {alone}"
    names = [f"{prefix}{address(host)} host{host}" for prefix in ("", "::ffff:") for host in range(MAX_HOSTS)]
    return "\n".join(["127.0.0.1 localhost", *names])


def network_description(hosts: int, rate: str) -> str:
    """Return the description of the network for the results that are measured on it."""
    congestion_control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return f"{hosts} simulated hosts, {rate} links (tc tbf, TCP {congestion_control})"


@dataclass(frozen=True)
class Rank:
    """A process to start: its host, and the environment that torchrun would give it."""

    host: int
    environment: dict[str, str]


def plan_ranks(ranks: int, hosts: int, network: str) -> list[Rank]:
    planned: list[Rank] = []
    for host, local_size in enumerate(ranks_per_host(ranks, hosts)):
        for local_rank in range(local_size):
            environment = {
                "RANK": str(len(planned)),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(local_size),
                "GROUP_RANK": str(host),
                "MASTER_ADDR": address(0),
                "MASTER_PORT": str(MASTER_PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "BENCH_NETWORK": network,
            }
            planned.append(Rank(host, environment))
    return planned


class Namespace:
    """Hold the namespaces of one host open by an idle process, which dies with its parent."""

    def __init__(self, hostname: str, table: str) -> None:
        """table: the text of /etc/hosts."""
        unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "sh", "-ec", HOLD]
        environment = {**os.environ, "HOST_NAME": hostname, "HOST_TABLE": table}
        self.process = subprocess.Popen(
            unshare, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True
        )
        self.pid = self.process.pid
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        if self.process.stdout.readline() != b"ready\n":
            why = self.process.stderr.read().decode().strip()
            self.close()
            raise HostsError(f"namespaces cannot be made: {why}")

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` inside the namespaces, in the current directory."""
        inside = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", f"--wd={os.getcwd()}", "--"]
        return ["setpriv", "--pdeathsig", "KILL", *inside, *command]

    def run(self, command: str) -> None:
        done = subprocess.run(self.enter(command.split()), capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise HostsError(f"`{command}` failed: {done.stderr.strip()}")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Cluster:
    """Connect `hosts` namespaces to one switch by links that are limited each way. A context manager. add_network() adds links.

    rate: see rates_of(). knows_names: whether each host resolves the names of all hosts. Otherwise it resolves only its own name,
    to a loopback address.
    """

    def __init__(self, hosts: int, rate: str, *, knows_names: bool = True) -> None:
        self._stack = ExitStack()
        self._knows_names = knows_names
        try:
            self.switch = self._namespace("switch")
            self.hosts = [self._namespace(f"host{host}") for host in range(hosts)]
            self.add_network(0, rate)
        except BaseException:
            self._stack.close()
            raise

    def _namespace(self, hostname: str) -> Namespace:
        namespace = Namespace(hostname, host_table(None if self._knows_names else hostname))
        self._stack.callback(namespace.close)
        return namespace

    def add_network(self, number: int, rate: str) -> None:
        """Join all hosts to one more bridge, each by the interface eth{number}. rate: see rates_of()."""
        self.switch.run(f"ip link add bridge{number} type bridge")
        self.switch.run(f"ip link set bridge{number} up")
        for host, (namespace, each) in enumerate(zip(self.hosts, rates_of(rate, len(self.hosts)), strict=True)):
            shape, port, interface = link_shape(each), f"port{number}.{host}", f"eth{number}"
            self.switch.run(f"ip link add {port} type veth peer name {interface} netns {namespace.pid}")
            self.switch.run(f"ip link set {port} master bridge{number} up")
            self.switch.run(f"tc qdisc add dev {port} {shape}")
            namespace.run(f"ip address add {address(host, number)}/24 dev {interface}")
            namespace.run(f"ip link set {interface} up")
            namespace.run(f"tc qdisc add dev {interface} {shape}")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def run_ranks(cluster: Cluster, ranks: Sequence[Rank], command: Sequence[str], deadline_s: float) -> int:
    """Run `command` once per rank. Return the exit code of the first rank that failed, 124 after the deadline, else 0."""
    processes: list[subprocess.Popen[bytes]] = []
    exit_code = 0
    give_up = time.monotonic() + deadline_s
    try:
        for rank in ranks:
            inside = cluster.hosts[rank.host].enter(command)
            processes.append(subprocess.Popen(inside, env={**os.environ, **rank.environment}, start_new_session=True))
        while any(process.poll() is None for process in processes):
            if exit_code == 0:
                exit_code = next((process.returncode for process in processes if process.returncode), 0)
                if exit_code != 0:
                    give_up = min(give_up, time.monotonic() + GRACE_S)
            if time.monotonic() > give_up:
                if exit_code == 0:
                    print(
                        f"bench hosts: the ranks had not ended after {deadline_s:g} s: raise --deadline-s",
                        file=sys.stderr,
                    )
                return exit_code or DEADLINE_EXIT
            time.sleep(0.05)
        return exit_code or next((process.returncode for process in processes if process.returncode), 0)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_machine() -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise HostsError(f"not found: {', '.join(missing)} (packages iproute2 and util-linux)")
    if os.geteuid() != 0:
        raise HostsError("network namespaces need root")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench hosts",
        description="Run a benchmark, or any command, on hosts simulated by network namespaces. Needs root.",
    )
    parser.add_argument("--hosts", type=int, default=4, help="hosts to simulate (default 4)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks, spread in contiguous order (default 8)")
    parser.add_argument(
        "--rate",
        default="1gbit",
        help="rate of each link, each way, as tc writes it (1gbit); '100mbit,1gbit': of the first, of the others",
    )
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=600.0,
        help="seconds after which all ranks are killed, with exit code 124 (default 600)",
    )
    parser.add_argument("command", nargs="+", help="after `--`: a benchmark with its flags, or any other command")
    chosen = parser.parse_args(arguments)
    try:
        ranks_per_host(chosen.ranks, chosen.hosts)
        rates_of(chosen.rate, chosen.hosts)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def _stop(signal_number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signal_number)


def main(arguments: Sequence[str], benchmarks: Sequence[str]) -> int:
    """Run the command line. benchmarks: the names after `--` that are short for `python -m gradwire.bench NAME`."""
    chosen = parse_arguments(arguments)
    bench = [sys.executable, "-m", "gradwire.bench"] if chosen.command[0] in benchmarks else []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        check_machine()
        if not bench and shutil.which(chosen.command[0]) is None:
            raise HostsError(
                f"{chosen.command[0]!r} is neither a benchmark ({', '.join(benchmarks)}) nor a command that can be found; a "
                "script follows a command: python train.py"
            )
        with Cluster(chosen.hosts, chosen.rate) as cluster:
            network = network_description(chosen.hosts, chosen.rate)
            ranks = plan_ranks(chosen.ranks, chosen.hosts, network)
            return run_ranks(cluster, ranks, [*bench, *chosen.command], chosen.deadline_s)
    except HostsError as error:
        print(f"bench hosts: {error}", file=sys.stderr)
        return 2
