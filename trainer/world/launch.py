"""Where this process stands in its world, as the environment of whatever launched it tells."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"


@dataclass(frozen=True)
class Launch:
    """Places one process among `size`. local_rank and local_size are None where the launcher does not tell them. variable: which
    tells the rank."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    variable: str = field(default="RANK", compare=False)


@dataclass(frozen=True)
class _Family:
    """Holds the names of the variables that one launcher sets."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


TORCHRUN = "torchrun"
HOROVODRUN = "horovodrun"
OPEN_MPI = "Open MPI"
MPICH = "MPICH"
SLURM = "Slurm"
ALONE = Launch("none", rank=0, size=1, local_rank=0, local_size=1)

_MPICH_RANK = "PMI_RANK"

#: What srun alone sets, and not the shell or the script of a job.
_OF_SRUN = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")

#: Where ports that ranks derive begin, and how many there are: outside of the range that Linux gives to clients.
_FIRST_PORT, _PORTS = 15000, 16384

# In the order of trust. Slurm comes last: its variables are also there around an mpirun or torchrun inside of a job.
_FAMILIES = (
    _Family(TORCHRUN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Family(HOROVODRUN, "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    _Family(
        OPEN_MPI,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Family(MPICH, _MPICH_RANK, "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Family(SLURM, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Return the launch that the environment describes: torchrun's variables, else horovodrun's, Open MPI's, MPICH's
    (PMI) or Slurm's, else ALONE.

    Raises ValueError where the variables are incomplete or contradict each other.
    """
    family = next((family for family in _FAMILIES if family.rank in environment), None)
    if family is None:
        return ALONE
    rank = _whole_number(environment, family.rank)
    size = _whole_number(environment, family.size)
    if not 0 <= rank < size:
        raise ValueError(f"{family.rank}={rank} is no rank of {family.size}={size} processes")
    local_rank, local_size = (
        _whole_number(environment, name) if name in environment else None
        for name in (family.local_rank, family.local_size)
    )
    return Launch(family.launcher, rank, size, local_rank, local_size, family.rank)


def meeting_point(environment: Mapping[str, str], launch: Launch) -> tuple[str, int]:
    """Return address and port at which rank 0 listens for the others: MASTER_ADDR and MASTER_PORT.

    When all run on one host, a missing address is the loopback. Under Slurm it is the first host of
    SLURM_STEP_NODELIST or SLURM_JOB_NODELIST. A missing port follows from what tells jobs apart: SLURM_JOB_ID,
    horovodrun's own port, Open MPI's PMIX_NAMESPACE or, on one host, the process of MPICH that has started the ranks.
    So a plain `srun python train.py` works, and on one host a plain `mpirun python train.py` and `horovodrun python
    train.py`. Raises ValueError, saying what to set or how to start, where that leaves one unknown, and for the one
    process of a Slurm job that srun has not started.
    """
    if launch.launcher == SLURM and not {MASTER_ADDR, MASTER_PORT} <= environment.keys() and not _by_srun(environment):
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
    if port is None and launch.launcher == SLURM:
        port = _slurm_port(environment)
    if port is None and launch.launcher == HOROVODRUN:
        port = _horovodrun_port(environment)
    if port is None and launch.launcher == OPEN_MPI:
        port = _open_mpi_port(environment)
    if port is None and launch.launcher == MPICH and on_one_host:
        port = _mpich_port()
    if address is None or port is None:
        missing = [name for name, value in ((MASTER_ADDR, address), (MASTER_PORT, port)) if value is None]
        raise ValueError(
            f"{launch.launcher} does not say where rank 0 listens: set {' and '.join(missing)} to the same for all ranks "
            f"(the host of rank 0, and a free port there), for example {MASTER_ADDR}=node01 {MASTER_PORT}=29500"
        )
    return address, port


def slurm_hint(environment: Mapping[str, str], program: str) -> str | None:
    """Return what to tell a process that is ALONE in a Slurm job of several tasks; None elsewhere. program: what Python
    was given to run."""
    tasks = environment.get("SLURM_NTASKS", "")
    if "SLURM_JOB_ID" in environment and tasks.isdecimal() and int(tasks) > 1:
        return f"this process is alone in a Slurm job of {tasks} tasks; to start them all: srun python {program}"
    return None


def _by_srun(environment: Mapping[str, str]) -> bool:
    return any(name in environment for name in _OF_SRUN)


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


def _slurm_port(environment: Mapping[str, str]) -> int | None:
    """Return a port that the tasks of one job step agree on, and other steps and jobs do not have."""
    if "SLURM_JOB_ID" not in environment:
        return None
    step = int(environment["SLURM_STEP_ID"]) if environment.get("SLURM_STEP_ID", "").isdecimal() else 0
    return _FIRST_PORT + (_whole_number(environment, "SLURM_JOB_ID") * 16 + step) % _PORTS


def _horovodrun_port(environment: Mapping[str, str]) -> int | None:
    """Return a port that the ranks of one horovodrun agree on: it follows from the one at which horovodrun listens."""
    name = "HOROVOD_GLOO_RENDEZVOUS_PORT"
    return _FIRST_PORT + _whole_number(environment, name) % _PORTS if name in environment else None


def _open_mpi_port(environment: Mapping[str, str]) -> int | None:
    """Return a port that the ranks of one mpirun agree on: its name for the job holds its host and process id."""
    job = environment.get("PMIX_NAMESPACE")
    return None if job is None else _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _mpich_port() -> int | None:
    """Return a port that the ranks of one mpiexec on one host agree on: it follows from the process that started them."""
    launcher = launching_process(_MPICH_RANK)
    return None if launcher is None else _FIRST_PORT + launcher[0] % _PORTS


def launching_process(rank_variable: str) -> list[int] | None:
    """Return the id and the start (in ticks of the clock since boot) of the process that started the ranks of this host: the
    nearest ancestor that has no variable of a rank itself. A shell script between the two has one. None where the system does not
    say, and where the variable was not there when this process started.
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
    """Return when a process started, in ticks of the clock since boot; 0 where the system does not say. process: its id, or
    "self"."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
