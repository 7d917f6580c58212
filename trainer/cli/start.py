"""How the agent of a host is started: here as a child process, elsewhere by ssh."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping

from gradwire.collectives.environment import HOST_ID
from gradwire.collectives.link.own_address import own_address
from gradwire.trainer.cli.hosts import Host
from gradwire.trainer.cli.options import Job

#: What of the environment goes to other hosts. The id of a host is its own.
_PREFIXES = ("COLLECTIVES_", "GLOO_", "HOROVOD_", "NCCL_")
_NAMES = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "VIRTUAL_ENV")
_NOT = (HOST_ID,)


def commands(job: Job, environment: Mapping[str, str]) -> list[list[str]]:
    """Return what starts the agent of each host. Raises ValueError where this host has no address for the others."""
    return [_command(job, node, environment) for node in range(len(job.hosts))]


def handed_on(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that go to other hosts. Raises ValueError for a name given with -x that is not set here."""
    if missing := next((name for name in job.names if name not in environment), None):
        raise ValueError(f"-x {missing}: it is not set here; write -x {missing}=VALUE")
    names = {name for name in environment if name.startswith(_PREFIXES)} | {*_NAMES, *job.names}
    return {name: environment[name] for name in sorted(names - {*_NOT}) if name in environment} | job.settings


def _command(job: Job, node: int, environment: Mapping[str, str]) -> list[str]:
    host = job.hosts[node]
    agent = [sys.executable, "-m", "gradwire.trainer.cli.agent"]
    numbers = {"nodes": len(job.hosts), "node": node, "slots": host.slots, "first-rank": host.first_rank}
    for name, number in (numbers | {"timeout": job.start_timeout_s}).items():
        agent += [f"--{name}", str(number)]
    if len(job.hosts) > 1:
        agent += ["--endpoint", f"{_master(job, environment)}:{job.master_port}"]
    agent += job.command
    return agent if host.is_here else _by_ssh(job, host, agent, environment)


def _master(job: Job, environment: Mapping[str, str]) -> str:
    """Return the address of the first host, as all hosts know it."""
    first = job.hosts[0]
    address = own_address({**environment, **job.settings}) if first.is_here else first.name
    return f"[{address}]" if ":" in address else address


def _by_ssh(job: Job, host: Host, agent: list[str], environment: Mapping[str, str]) -> list[str]:
    settings = [f"{name}={value}" for name, value in handed_on(job, environment).items()]
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={job.start_timeout_s}", "-o", "ServerAliveInterval=15"]
    if job.ssh_port is not None:
        ssh += ["-p", str(job.ssh_port)]
    if job.ssh_identity_file is not None:
        ssh += ["-i", job.ssh_identity_file]
    return [*ssh, host.name, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *settings, *agent])}"]
