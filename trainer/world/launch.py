"""The place of this process in its world, read from the environment variables of its launcher."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradwire.collectives.environment import listening_ports

MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"


@dataclass(frozen=True)
class Launch:
    """Holds the place of one process among `size`. local_rank and local_size are None if the launcher does not set them.
    variable: the name of the environment variable that holds the rank."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    variable: str = field(default="RANK", compare=False)


TORCHRUN = "torchrun"
HOROVODRUN = "horovodrun"
OPEN_MPI = "Open MPI"
MPICH = "MPICH"
SLURM = "Slurm"
ALONE = Launch("none", rank=0, size=1, local_rank=0, local_size=1)

_MPICH_RANK = "PMI_RANK"
_HOROVODRUN_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"

#: Variables that only srun sets: they are missing in the shell and in the script of a job.
_OF_SRUN = {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"}

#: The ports from which a rendezvous port is chosen without COLLECTIVES_PORTS: outside of the range from which Linux assigns ports
#: to clients.
PORTS = range(15000, 15000 + 16384)

# In the order of precedence. Slurm is last: its variables are also set for an mpirun or torchrun inside of a job.
_VARIABLES = {
    TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    HOROVODRUN: tuple(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    OPEN_MPI: tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    MPICH: (_MPICH_RANK, "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    SLURM: ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}
"""Which variables each launcher sets: rank, size, local rank and local size."""


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Return the launch that the environment describes: torchrun's variables, else horovodrun's, Open MPI's, MPICH's
    (PMI) or Slurm's, else ALONE.

    Raises ValueError if the variables are incomplete or contradict each other.
    """
    launcher = next((launcher for launcher, names in _VARIABLES.items() if names[0] in environment), None)
    if launcher is None:
        return ALONE
    rank_name, size_name, *local = _VARIABLES[launcher]
    rank, size = _whole_number(environment, rank_name), _whole_number(environment, size_name)
    if not 0 <= rank < size:
        raise ValueError(f"{rank_name}={rank} is not a rank of {size_name}={size} processes")
    local_rank, local_size = (_whole_number(environment, name) if name in environment else None for name in local)
    return Launch(launcher, rank, size, local_rank, local_size, rank_name)


def meeting_point(environment: Mapping[str, str], launch: Launch) -> tuple[str, int]:
    """Return the address and the port at which rank 0 listens for the others: MASTER_ADDR and MASTER_PORT.

    If all ranks run on one host, a missing address becomes the loopback address. Under Slurm, it becomes the first host of
    SLURM_STEP_NODELIST or SLURM_JOB_NODELIST. A missing port is derived from a value that differs between jobs: SLURM_JOB_ID,
    horovodrun's own port, Open MPI's PMIX_NAMESPACE or, on one host, the process of MPICH that has started the ranks.
    So a plain `srun python train.py` works, and on one host a plain `mpirun python train.py` and `horovodrun python
    train.py`. Raises ValueError, which says what to set or how to start, if the address or the port remains unknown, and
    for a process of a Slurm job that srun has not started.
    """
    if _is_shell_of_slurm(environment, launch):
        raise ValueError(
            f"this is a Slurm job of {launch.size} tasks, but srun has not started this process, so nobody starts the "
            f"others: start them with `srun python train.py`, or this one alone with `SLURM_NTASKS=1 python train.py`"
        )
    address = environment.get(MASTER_ADDR)
    on_one_host = launch.local_size == launch.size
    if address is None and on_one_host:
        address = "127.0.0.1"
    if address is None and launch.launcher == SLURM:
        address = _first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
    port = _whole_number(environment, MASTER_PORT) if MASTER_PORT in environment else None
    if port is None:
        port = _derived_port(environment, launch.launcher, on_one_host)
    if address is None or port is None:
        missing = [name for name, value in ((MASTER_ADDR, address), (MASTER_PORT, port)) if value is None]
        raise ValueError(
            f"{launch.launcher} does not say where rank 0 listens: set {' and '.join(missing)} to the same for all ranks "
            f"(the host of rank 0, and a free port there), for example {MASTER_ADDR}=node01 {MASTER_PORT}=29500"
        )
    return address, port


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would set for this process, for programs that read only that: its rank, the number of ranks, and where
    they meet. It is empty for one process, and in a shell of a Slurm job. Raises ValueError as read_launch() and meeting_point().
    """
    launch = read_launch(environment)
    if launch.size == 1 or _is_shell_of_slurm(environment, launch):
        return {}
    address, port = meeting_point(environment, launch)
    return {"RANK": f"{launch.rank}", "WORLD_SIZE": f"{launch.size}", MASTER_ADDR: address, MASTER_PORT: f"{port}"}


def slurm_hint(environment: Mapping[str, str], program: str) -> str | None:
    """Return a hint for the user of a process that is ALONE in a Slurm job of several tasks; None otherwise. program: the
    arguments of Python that run it."""
    tasks = environment.get("SLURM_NTASKS", "")
    if "SLURM_JOB_ID" in environment and tasks.isdecimal() and int(tasks) > 1:
        return f"this process is alone in a Slurm job of {tasks} tasks; to start them all: srun python {program}"
    return None


def _is_shell_of_slurm(environment: Mapping[str, str], launch: Launch) -> bool:
    """Return whether this process is in a Slurm job, but was not started by srun, nor told where rank 0 is."""
    is_told = {MASTER_ADDR, MASTER_PORT} <= environment.keys()
    return launch.launcher == SLURM and not is_told and not _OF_SRUN & environment.keys()


def _whole_number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise ValueError(f"the launcher's environment lacks {name}") from None
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {environment[name]!r}") from None


def _first_host(node_list: str) -> str | None:
    """Return the first host of a Slurm node list: 'node[01-04,07]-ib,gpu1' -> 'node01-ib'."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^\[,]*)", node_list)
    return "".join(part or "" for part in match.groups()) if match else None


def _derived_port(environment: Mapping[str, str], launcher: str, on_one_host: bool) -> int | None:
    """Return a port that is equal on the ranks of one job and usually differs between jobs; None if nothing identifies a job.

    It is derived from Slurm's job step; the port at which horovodrun listens; Open MPI's name for the job, which contains its
    host and process id; or, on one host, the process of MPICH that has started the ranks.
    """
    number: int | None = None
    if launcher == SLURM and "SLURM_JOB_ID" in environment:
        step = environment.get("SLURM_STEP_ID", "")
        number = _whole_number(environment, "SLURM_JOB_ID") * 16 + (int(step) if step.isdecimal() else 0)
    elif launcher == HOROVODRUN and _HOROVODRUN_PORT in environment:
        number = _whole_number(environment, _HOROVODRUN_PORT)
    elif launcher == OPEN_MPI and "PMIX_NAMESPACE" in environment:
        number = zlib.crc32(environment["PMIX_NAMESPACE"].encode())
    elif launcher == MPICH and on_one_host and (process := launching_process(_MPICH_RANK)) is not None:
        number = process[0]
    ports = listening_ports(environment) or PORTS
    return None if number is None else ports[number % len(ports)]


def launching_process(rank_variable: str) -> list[int] | None:
    """Return the id and the start (in clock ticks since boot) of the process that started the ranks of this host: the nearest
    ancestor without rank_variable in its environment. A shell script between the two has the variable. None if the system does
    not provide this, or if the variable was not set when this process started.
    """
    process = "self"
    rank = f"{rank_variable}=".encode()
    try:
        while any(variable.startswith(rank) for variable in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")):
            status = Path(f"/proc/{process}/status").read_text()
            process = status.partition("PPid:")[2].split()[0]
    except OSError:
        return None
    return [int(process), started_at(process)] if process != "self" else None


def started_at(process: str) -> int:
    """Return when a process started, in clock ticks since boot; 0 if the system does not provide this. process: its id, or
    "self"."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
