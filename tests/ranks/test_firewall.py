"""Jobs on two hosts whose firewalls open the rendezvous port and COLLECTIVES_PORTS. All addresses are of one kind: IPv4, IPv6, or
those of IPv6 that are valid on one link only.

The hosts are namespaces of this machine, and have different names for their interfaces. Their firewalls are those of the kernel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.debian_hosts import Hosts, debian_hosts, found
from tests.harness import wide
from tests.interpreter import python
from tests.ranks.test_two_hosts import joint

MEETING, PORTS = 29500, range(29600, 29602)
INTERFACES = ("eth0", "lan")
ADDRESSES = {"IPv4": "10.77.0.{}/24", "IPv6": "fd77::{}/64", "link-local IPv6": "fe80::{}/64"}
RANKS_OF_HOST = 2

RULES = f"""
flush ruleset
table inet firewall {{
    chain input {{
        type filter hook input priority 0; policy accept;
        iif lo accept
        tcp dport {{ {MEETING}, {PORTS[0]}-{PORTS[-1]} }} accept
        tcp flags & (syn | ack) == syn reject with tcp reset
    }}
}}
"""

#: Trains, tries what needs gloo, and prints the rank, the weights, the sum over ranks, the errors, and the ports of the host.
TRAINS = """
import json
from pathlib import Path
import torch
import torch.distributed as dist
import gradwire as hvd
from gradwire.collectives import Communicator
from tests.ranks.test_two_hosts import STEPS
from tests.soak.strangers import ports

def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__

hvd.init(timeout_s=20)
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
for step in range(STEPS):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + hvd.rank() % 2)).mean().backward()
    optimizer.step()
count = torch.ones(1)
dist.all_reduce(count, group=dist.new_group())
with Communicator(timeout_s=20) as communicator:
    errors = [error_of(lambda: communicator.allreduce(torch.ones(1), algorithm="native"))]
errors += [error_of(lambda: Communicator(link="process_group", timeout_s=20).close())]
listening = set().union(*(ports(Path(f"/proc/net/{name}").read_text()) for name in ("tcp", "tcp6")))
print(json.dumps([hvd.rank(), model.weight.tolist(), count.item(), errors, sorted(listening)]), flush=True)
hvd.barrier()
hvd.shutdown()
"""

MEETS = """
import json
import gradwire as hvd

try:
    hvd.init(timeout_s=20)
except hvd.CollectiveError as error:
    print(json.dumps([error.rank, sorted(error.ranks), str(error)]))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if found("nft") is None:
        pytest.skip("not found: nft (Debian: apt-get install nftables)")
    folder = tmp_path_factory.mktemp("hosts")
    for name, text in {"rules": RULES, "trains.py": TRAINS, "meets.py": MEETS}.items():
        (folder / name).write_text(text)
    with debian_hosts(2, folder) as made:
        for host, interface in enumerate(INTERFACES):
            commands = (
                "ip link delete uplink",
                f"ip link set eth0 down name {interface}",
                f"echo 1 > /proc/sys/net/ipv6/conf/{interface}/addr_gen_mode",  # no address but those of ADDRESSES
                f"ip link set {interface} up",
            )
            made.outputs((host, ["sh", "-ec", "\n".join(commands)]))
        yield made


def give_addresses(hosts: Hosts, kind: str) -> list[str]:
    """Give the hosts addresses of one kind only, and return that of the first host as each host writes it."""
    for host, interface in enumerate(INTERFACES):
        address = ADDRESSES[kind].format(host + 1)
        hosts.outputs((host, ["ip", "address", "flush", "dev", interface]))
        without_wait = [] if kind == "IPv4" else ["nodad"]
        hosts.outputs((host, ["ip", "address", "add", address, "dev", interface, *without_wait]))
    first = ADDRESSES[kind].format(1).partition("/")[0]
    return [f"{first}%{interface}" if kind == "link-local IPv6" else first for interface in INTERFACES]


def run(
    hosts: Hosts, kind: str, program: Sequence[str], local_size: int, ports: range | None, *, is_open: bool = False
) -> list[str]:
    """Run local_size ranks of a program on each host. Return what they print. is_open: without the firewall."""
    meeting = give_addresses(hosts, kind)
    for host in range(len(INTERFACES)):
        hosts.outputs((host, ["nft", *(("flush", "ruleset") if is_open else ("-f", "rules"))]))
    bounds = {} if ports is None else {"COLLECTIVES_PORTS": f"{ports[0]}-{ports[-1]}"}
    commands = []
    for rank in range(len(INTERFACES) * local_size):
        host, local_rank = divmod(rank, local_size)
        environment: Mapping[str, Any] = {
            "RANK": rank,
            "WORLD_SIZE": len(INTERFACES) * local_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": local_size,
            "MASTER_ADDR": meeting[host],
            "MASTER_PORT": MEETING,
            **bounds,
        }
        settings = [f"{name}={value}" for name, value in environment.items()]
        commands.append((host, ["env", *settings, python(), *program]))
    return hosts.outputs(*commands)


@pytest.mark.parametrize("kind", ADDRESSES)
def test_a_job_trains_inside_the_firewall(hosts: Hosts, kind: str) -> None:
    """Each rank needs one port, also for a second group and several Communicators. No rank falls back on gloo."""
    for rank, said in enumerate(run(hosts, kind, ["trains.py"], RANKS_OF_HOST, PORTS)):
        here = [MEETING] if rank < RANKS_OF_HOST else []
        assert json.loads(said) == [rank, joint(), 4.0, ["ValueError", "CollectiveError"], [*here, *PORTS]]


@pytest.mark.parametrize("kind", [*wide("IPv6"), "link-local IPv6"])
def test_the_system_chooses_ports_of_ipv6(hosts: Hosts, kind: str) -> None:
    """gloo knows no scopes, so it is not used between link-local addresses."""
    errors = ["ValueError", "CollectiveError"] if kind == "link-local IPv6" else [None] * 2
    for rank, said in enumerate(run(hosts, kind, ["trains.py"], 1, None, is_open=True)):
        assert json.loads(said)[:-1] == [rank, joint(), 2.0, errors]


@pytest.mark.parametrize(("local_size", "ports", "named"), [(1, None, []), (2, PORTS[:1], ["29600-29600", "2 ranks"])])
def test_all_ranks_fail_if_ports_are_missing(
    hosts: Hosts, local_size: int, ports: range | None, named: list[str]
) -> None:
    """The firewall refuses ports that the system chooses; and one port is too few for two ranks of a host."""
    for rank, said in enumerate(run(hosts, "IPv4", ["meets.py"], local_size, ports)):
        given, ranks, text = json.loads(said)
        assert given == rank
        assert ranks
        assert all(part in text for part in named)


def test_check_measures_inside_the_firewall(hosts: Hosts) -> None:
    """Each host needs a port for its rank, and one for the measurement."""
    first, second = run(hosts, "link-local IPv6", ["-m", "gradwire", "check", "--hosts"], 1, PORTS)
    assert "failed" not in first
    assert f"--master-addr {ADDRESSES['link-local IPv6'].format(1).partition('/')[0]}%eth0" in first
    assert second == ""


def test_the_launcher_stays_in_the_range(hosts: Hosts) -> None:
    """Its store takes a port, and each rank another one."""
    three = f"{PORTS[0]}-{PORTS[-1] + 1}"
    command = ["env", f"COLLECTIVES_PORTS={three}", python(), "-m", "gradwire", "run", "-np", "2", "trains.py"]
    (output,) = hosts.outputs((0, command))
    for line in output.splitlines():
        *_, listening = json.loads(line.partition("<stdout>: ")[2])
        assert listening == [*PORTS, PORTS[-1] + 1]
