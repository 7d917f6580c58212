"""Jobs that a real Slurm of one node starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.debian_hosts import Hosts, debian_hosts, found
from tests.harness import wait_until
from tests.interpreter import python
from tests.pages import ROOT

RECIPES = ROOT / "docs" / "integrations"
DAEMONS = ("munged", "slurmctld", "slurmd")

#: Of a node that runs its jobs as root, without cgroups and without a library for MPI.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost=host0(127.0.0.1)
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=host0 NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""

#: Adds up ranks.
SUMS = """
import torch
import gradwire as hvd

hvd.init(timeout_s=40)
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()}: {total.item()}")
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A host on which Slurm runs, with a script that adds up ranks; whatever runs there at the end is killed."""
    if missing := [name for name in (*DAEMONS, "srun", "sbatch") if found(name) is None]:
        pytest.skip(f"not found: {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "sums.py").write_text(SUMS)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    munge = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
    with debian_hosts(1, folder) as host:
        host.environment["SLURM_CONF"] = str(folder / "slurm.conf")
        host.environment["PATH"] = f"{Path(python()).parent}:{host.environment['PATH']}"
        commands = (
            ["--force", f"--socket={folder}/munge.socket", *munge.values()],
            ["-i", "-c"],
            ["-c", "-N", "host0"],
        )
        for daemon, arguments in zip(DAEMONS, commands, strict=True):
            foreground = "-F" if daemon == "munged" else "-D"
            host.start(0, [str(found(daemon)), foreground, *arguments])
            if daemon == "munged":
                wait_until((folder / "munge.socket").exists)
        try:
            host.outputs((0, ["srun", "true"]), within_s=30.0)
        except AssertionError:
            logs = [path.read_text()[-1000:] for path in folder.glob("slurm*.log")]
            pytest.skip(f"Slurm does not start: {logs}")
        yield host


def test_srun_starts_the_ranks(slurm: Hosts) -> None:
    (output,) = slurm.outputs((0, ["srun", "-n", "2", python(), "sums.py"]))
    assert sorted(output.splitlines()) == [f"rank {rank} of 2: 3.0" for rank in range(2)]


def test_the_recipe_starts_a_torchrun_on_each_node(slurm: Hosts) -> None:
    """On one node in place of the recipe's two."""
    slurm.environment["SCRIPT"] = str(RECIPES / "ddp.py")
    submit = ["sbatch", "--parsable", "--nodes", "1", "--cpus-per-task", "2", "--output", "job.log"]
    (job,) = slurm.outputs((0, [*submit, str(RECIPES / "slurm.sh")]))
    slurm.outputs((0, ["srun", f"--dependency=afterany:{job.strip()}", "true"]))  # sbatch --wait asks rarely
    assert "20 exchanges" in (slurm.folder / "job.log").read_text()
