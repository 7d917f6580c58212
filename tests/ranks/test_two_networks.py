"""Two hosts that a network of 100 Mbit/s and one of 1 Gbit/s join, while ranks use the slow one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.bench.hosts import address
from tests.debian_hosts import Hosts, debian_hosts
from tests.harness import wide
from tests.interpreter import python

WARNS = """
import logging, sys
import gradwire as hvd

logging.basicConfig(stream=sys.stdout)
hvd.init(timeout_s=20)
hvd.shutdown()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "warns.py").write_text(WARNS)
    for interface, rate in (("eth0", "100"), ("eth1", "1000")):  # veth has one rate, whatever tc does
        (folder / "net" / interface).mkdir(parents=True)
        (folder / "net" / interface / "speed").write_text(f"{rate}\n")
    with debian_hosts(2, folder, ("100mbit", "1gbit")) as made:
        made.outputs(*((host, ["mount", "--bind", "net", "/sys/class/net"]) for host in range(2)))
        yield made


def torchrun(hosts: Hosts, network: int, *program: str) -> list[str]:
    """Run a rank of a program on each host. Return what they print. network: in which the hosts meet."""
    command = [str(Path(python()).with_name("torchrun")), "--nnodes", "2", "--nproc-per-node", "1"]
    towards = [*command, "--master-addr", address(0, network), "--node-rank"]
    return hosts.outputs(*((host, [*towards, str(host), *program]) for host in range(2)))


def test_rank_0_warns_of_the_slow_network(hosts: Hosts) -> None:
    first, second = torchrun(hosts, 0, "warns.py")
    (line,) = [line for line in first.splitlines() if "COLLECTIVES_INTERFACE=eth1" in line]
    for part in ("host0, host1", "eth0 (rated 100 Mbit/s)", "eth1 (rated 1 Gbit/s)", "GLOO_SOCKET_IFNAME=eth1"):
        assert part in line
    assert "COLLECTIVES_INTERFACE" not in second


@pytest.mark.parametrize("network", [0, *wide(1)])
def test_check_measures_both_networks(hosts: Hosts, network: int) -> None:
    """It names the network that is faster than that in use, and starts the job there."""
    first, second = torchrun(hosts, network, "-m", "gradwire", "check", "--hosts")
    assert second == ""
    used, other, *advice = first.splitlines()
    names = ("eth0 (rated 100 Mbit/s)", "eth1 (rated 1 Gbit/s)")
    assert names[network] in used
    assert f"not in use: {names[1 - network]}" in other
    assert ["COLLECTIVES_INTERFACE=eth1" in line for line in advice[-2:]] == [network == 0] * 2
    assert all(f"--node-rank {host} --master-addr {address(0, 1)}" in advice[host - 2] for host in range(2))
