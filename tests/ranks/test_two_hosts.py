"""Jobs on two hosts as Debian installs them: the name of a host resolves to a loopback address, and no host knows another's name.

The hosts are namespaces of this machine, with a real sshd in each. Their default route leads to a network without other hosts. No
variable names an interface.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from gradwire.bench.hosts import address
from gradwire.collectives.environment import INTERFACE_VARIABLES
from tests.debian_hosts import DEADLINE_S, Hosts, debian_hosts, found
from tests.harness import wait_until, wide_rows
from tests.interpreter import python

STEPS = 3

#: Trains, beside a gloo group that the script makes itself, and prints the weights and the sum over ranks.
TRAINS = f"""
import json, os, sys
import torch
import torch.distributed as dist
import gradwire as hvd

hvd.init(timeout_s=20)
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
for step in range({STEPS}):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + hvd.rank())).mean().backward()
    optimizer.step()
count = torch.ones(1)
dist.all_reduce(count, group=dist.new_group(backend="gloo"))
weights = model.weight.tolist()
hvd.shutdown()
left = [name for name in {INTERFACE_VARIABLES} if name in os.environ]
print(json.dumps([os.uname().nodename, weights, count.item(), left, "GRADWIRE_KEY_FILE" in os.environ]))
"""

#: The same in an elastic job.
TRAINS_ELASTIC = f"""
import json, os, sys
import torch
import gradwire as hvd
from gradwire.trainer.elastic import memory, watcher

# The parent of a command of tests.interpreter is not the agent.
sys.modules["gradwire.trainer.elastic.run"].find_agent = lambda: memory.Agent(os.getpid(), watcher.started_at(os.getpid()))
hvd.init(timeout_s=20)
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

@hvd.elastic.run
def train(state):
    while state.step < {STEPS}:
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + hvd.rank())).mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()

train(state)
print(json.dumps([os.uname().nodename, model.weight.tolist(), 2.0, [], "GRADWIRE_KEY_FILE" in os.environ]))
"""

#: Exchanges numbers by torch's init_process_group, and by gloo that gradwire makes.
BACKEND = """
import json, os
import torch
import torch.distributed as dist
from gradwire.collectives import Communicator

rank = int(os.environ["RANK"])
for name in ("MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
    del os.environ[name]
dist.init_process_group("gradwire", init_method="tcp://10.77.0.1:29611", rank=rank, world_size=2)
mine, native = torch.full((4,), 1.0 + rank), torch.ones(1)
dist.all_reduce(mine)
with Communicator(link="process_group", timeout_s=20) as communicator:
    communicator.allreduce(native, algorithm="native")
print(json.dumps([os.uname().nodename, [mine.tolist()], native.item(), [], False]))
dist.destroy_process_group()
"""


def joint() -> list[list[float]]:
    """Return the weights that one process learns from the batches of both ranks."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = torch.cat([torch.full((2, 4), 1.0), torch.full((2, 4), 2.0)])
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    weights: list[list[float]] = model.weight.tolist()
    return weights


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """The two hosts, and a third one, from which a user starts jobs and which knows the names of the two."""
    folder = tmp_path_factory.mktemp("hosts")
    for name, text in {"trains.py": TRAINS, "elastic.py": TRAINS_ELASTIC, "backend.py": BACKEND}.items():
        (folder / name).write_text(text)
    (folder / "discover").write_text("#!/bin/sh\nprintf 'host0:1\\nhost1:1\\n'\n")
    (folder / "discover").chmod(0o755)
    with debian_hosts(3, folder) as made:
        yield made


@pytest.fixture(scope="module")
def ssh(hosts: Hosts) -> Hosts:
    """The hosts, which reach each other by ssh."""
    if (sshd := found("sshd")) is None or found("ssh") is None:
        pytest.skip("there is no sshd (Debian: apt-get install openssh-server)")
    folder = hosts.folder / "ssh"
    folder.mkdir()
    for key in ("host_key", "user_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True, timeout=DEADLINE_S
        )
    known = ",".join(each for host in range(2) for each in (f"host{host}", address(host)))
    (folder / "ssh_known_hosts").write_text(f"{known} {(folder / 'host_key.pub').read_text()}")
    (folder / "ssh_config").write_text("IdentityFile /etc/ssh/user_key\n")
    (folder / "sshd_config").write_text(
        "HostKey /etc/ssh/host_key\nAuthorizedKeysFile /etc/ssh/user_key.pub\nStrictModes no\nPermitRootLogin yes\n"
        "UsePAM no\nUseDNS no\nPidFile none\n"
    )
    for host in range(3):
        names = f"{address(0)} host0\\n{address(1)} host1\\n" if host == 2 else ""
        prepare = "mount -t tmpfs tmpfs /run && mkdir /run/sshd && mount --bind ssh /etc/ssh"
        hosts.outputs((host, ["sh", "-c", f"{prepare} && printf '{names}' >> /etc/hosts"]))
    for host in range(2):
        log = hosts.folder / f"sshd.{host}"
        hosts.start(host, [sshd, "-D", "-E", str(log)])
        wait_until(lambda log=log: log.exists() and "listening" in log.read_text())  # type: ignore[misc]
    try:
        hosts.outputs((0, ["ssh", "-o", "BatchMode=yes", address(1), "true"]))
    except AssertionError:
        pytest.skip(f"root cannot log in by ssh: {(hosts.folder / 'sshd.1').read_text()}")
    return hosts


def results(output: str) -> Mapping[str, list[object]]:
    """Return the lists that ranks have printed, by host."""
    return {host: rest for host, *rest in map(json.loads, output.splitlines())}


@pytest.mark.parametrize("script", ["trains.py", "backend.py"])
def test_torchrun(hosts: Hosts, script: str) -> None:
    """Give torchrun the address of the first host, as its manual does."""
    command = [str(Path(python()).with_name("torchrun")), "--nnodes", "2", "--nproc-per-node", "1"]
    towards = [*command, "--master-addr", address(0), "--node-rank"]
    outputs = hosts.outputs(*((host, [*towards, str(host), script]) for host in range(2)))
    expected = joint() if script == "trains.py" else [[3.0] * 4]
    assert results("".join(outputs)) == {f"host{host}": [expected, 2.0, [], False] for host in range(2)}


def test_info(hosts: Hosts) -> None:
    """It prints over which network rank 0 reaches the other host."""
    command = [str(Path(python()).with_name("torchrun")), "--nnodes", "2", "--master-addr", address(0), "--node-rank"]
    first, _ = hosts.outputs(*((host, [*command, str(host), "-m", "gradwire", "info"]) for host in range(2)))
    assert f"rank 0 to rank 1: TCP, from {address(0)}\n" in first


def test_the_check_names_the_network_of_the_other_host(hosts: Hosts) -> None:
    """The host's own name leads to a loopback address, and its default route elsewhere."""
    program = (
        "from gradwire.trainer.tools.check.machine import interface, own_name\n"
        f"print(own_name({{}}, {address(1)!r}).do)\nprint(interface({{}}, {address(1)!r}).what)"
    )
    (output,) = hosts.outputs((0, [python(), "-c", program]))
    advice, reached = output.splitlines()
    assert "export GLOO_SOCKET_IFNAME=eth0" in advice
    assert f"{address(0)}, interface eth0" in reached


@pytest.mark.parametrize(
    ("launcher", "flags", "script"),
    [
        (0, ["-H", f"{address(0)}:1,{address(1)}:1"], "trains.py"),
        (2, ["--private", "-H", "host0:1,host1:1"], "trains.py"),
        (0, ["--private", "--min-np", "2", "-H", f"localhost:1,{address(1)}:1"], "elastic.py"),
        *wide_rows(
            (0, ["--min-np", "2", "-H", f"localhost:1,{address(1)}:1"], "elastic.py"),
            (0, ["-H", f"localhost:1,{address(1)}:1"], "trains.py"),
            (2, ["--min-np", "2", "--host-discovery-script", "./discover"], "elastic.py"),
        ),
    ],
)
def test_gradwire_run(ssh: Hosts, launcher: int, flags: list[str], script: str) -> None:
    """Start from one of the two hosts and from another one."""
    (output,) = ssh.outputs((launcher, [python(), "-m", "gradwire", "run", *flags, script]))
    printed = "\n".join(line.partition("<stdout>: ")[2] for line in output.splitlines())
    assert results(printed) == {f"host{host}": [joint(), 2.0, [], "--private" in flags] for host in range(2)}


@pytest.mark.wide
def test_check_starts_on_all_hosts(ssh: Hosts) -> None:
    """The hosts' other interfaces, with addresses of one subnet, do not reach each other."""
    (output,) = ssh.outputs((0, [python(), "-m", "gradwire", "check", "--hosts", f"localhost,{address(1)}"]))
    lines = [line.removeprefix("[0]<stdout>: ") for line in output.splitlines()]
    assert "host0 and host1: eth0" in lines[0]
    assert "not in use: uplink (rate unknown) does not connect" in lines[1]
    assert [f"start on host{host}: torchrun" in lines[host - 2] for host in range(2)] == [True, True]
