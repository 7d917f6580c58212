"""Hosts that send larger packets than something between them forwards."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gradwire.bench import hosts
from tests.harness import wait_until, wide
from tests.interpreter import python
from tests.pages import ROOT
from tests.ranks.programs import start

DEADLINE_S = 60.0
OF_HOSTS, BETWEEN = 9000, 1500

INIT = """
import sys
import gradwire as hvd
from gradwire.collectives import CollectiveError

try:
    hvd.init(timeout_s=20)
except CollectiveError as error:
    print(error.ranks, error)
    sys.exit(3)
"""

LATER = """
import sys, time
from pathlib import Path
import torch
import gradwire as hvd
from gradwire.collectives import CollectiveTimeout, Communicator

hvd.init(timeout_s=20)
communicator = Communicator(timeout_s=6)
communicator.allreduce(torch.ones(1 << 18))
folder = Path(sys.argv[1])
(folder / f"trains-{hvd.rank()}").touch()
while not (folder / "changed").exists():
    time.sleep(0.01)
try:
    communicator.allreduce(torch.ones(1 << 18))
except CollectiveTimeout as error:
    print(error.ranks, error)
    sys.exit(3)
"""


def can_be_simulated() -> bool:
    if os.geteuid() != 0 or not all(map(shutil.which, hosts.TOOLS)):
        return False
    try:
        hosts.Cluster(1, "1gbit").__exit__()
    except hosts.HostsError:
        return False
    return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[hosts.Cluster]:
    """Three hosts; large packets to and from the last one are lost."""
    if not can_be_simulated():
        pytest.skip("needs root, network namespaces, and the package iproute2")
    with hosts.Cluster(3, "1gbit") as cluster:
        for number, host in enumerate(cluster.hosts):
            host.run(f"ip link set eth0 mtu {OF_HOSTS} gso_max_segs 1")
            cluster.switch.run(f"ip link set port0.{number} mtu {OF_HOSTS if number < 2 else BETWEEN} gso_max_segs 1")
        yield cluster


def begin(stack: ExitStack, host: hosts.Namespace, *command: str, **environment: str) -> subprocess.Popen[str]:
    process = start(host.enter([python(), *command]), ROOT, **environment)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def test_the_pair_is_named(cluster: hosts.Cluster) -> None:
    """On both its ranks; the third one names this pair or another one of the same host."""
    with ExitStack() as stack:
        planned = hosts.plan_ranks(3, 3, "")
        ranks = [begin(stack, cluster.hosts[each.host], "-c", INIT, **each.environment) for each in planned]
        said = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    for rank, text in enumerate(said):
        assert ranks[rank].returncode == 3, text
        assert "large packets are lost between" in text
        (pair,) = re.findall(r"^\((\d), (\d)\) rank", text, flags=re.MULTILINE)
        assert pair[1] == "2"
        assert all(f"rank {member} at 10.77.0.{int(member) + 1}" in text for member in pair)


def test_a_pair_that_begins_to_lose_large_packets_is_named(cluster: hosts.Cluster, tmp_path: Path) -> None:
    """As where a route changes in the middle of a training."""
    with ExitStack() as stack:
        planned = hosts.plan_ranks(2, 2, "")
        program = ("-c", LATER, str(tmp_path))
        ranks = [begin(stack, cluster.hosts[each.host], *program, **each.environment) for each in planned]
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, DEADLINE_S)
        cluster.switch.run(f"ip link set port0.1 mtu {BETWEEN}")
        stack.callback(cluster.switch.run, f"ip link set port0.1 mtu {OF_HOSTS}")
        (tmp_path / "changed").touch()
        said = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode == 3, text
        (pair,) = re.findall(
            r"^\(\) rank .* large packets are lost between rank (\d) at \S+ and rank (\d) at", text, flags=re.M
        )
        assert {*pair} == {"0", "1"}


@pytest.mark.parametrize("there", [2, *wide(1)])
def test_the_check_of_two_hosts_finds_it(cluster: hosts.Cluster, there: int) -> None:
    with ExitStack() as stack:
        listening = begin(stack, cluster.hosts[there], "-m", "gradwire.trainer.tools.check", "--listen")
        found = ""
        for _ in range(20):  # until it listens
            check = begin(stack, cluster.hosts[0], "-m", "gradwire.trainer.tools.check", "--host", hosts.address(there))
            found = check.communicate(timeout=DEADLINE_S)[0]
            if "no process listens" not in found:
                break
        listening.communicate(timeout=DEADLINE_S)
    lost = f"{hosts.address(there)}: large packets are lost on the way, but small ones arrive"
    assert (lost in found) == (there == 2), found
    assert ("one connection carries" in found) == (there == 1), found
