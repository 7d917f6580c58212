"""Who a process is, by the environment of its launcher."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import gradwire as hvd
from gradwire.trainer.world import launch
from gradwire.trainer.world.joined import cross_position
from gradwire.trainer.world.launch import ALONE, Launch, meeting_point, read_launch, slurm_hint, torchrun_variables
from tests.pages import ROOT
from tests.ranks.programs import start
from tests.unit.test_horovod_environment import HOROVODRUN

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node07",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "node[03-04]",
}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, ALONE),
        ({"MASTER_ADDR": "node07", "MASTER_PORT": "1234"}, ALONE),
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Launch("torchrun", 0, 2, None, None)),
        (HOROVODRUN, Launch("horovodrun", 1, 2, 1, 2)),
        (OPEN_MPI, Launch("Open MPI", 2, 4, 0, 2)),
        (MPICH, Launch("MPICH", 3, 4, 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launch("MPICH", 0, 1, None, None)),
        (SLURM, Launch("Slurm", 6, 8, 2, 4)),
        (SLURM | MPICH, Launch("MPICH", 3, 4, 1, 2)),
        (SLURM | OPEN_MPI, Launch("Open MPI", 2, 4, 0, 2)),
        (SLURM | MPICH | OPEN_MPI | TORCHRUN, Launch("torchrun", 5, 8, 1, 4)),
    ],
)
def test_position(environment: dict[str, str], launch: Launch) -> None:
    assert read_launch(environment) == launch


def meet(environment: dict[str, str]) -> tuple[str, int]:
    return meeting_point(environment, read_launch(environment))


def test_meeting_point_that_is_told() -> None:
    assert meet(TORCHRUN) == ("node07", 1234)
    for environment in (OPEN_MPI, MPICH, SLURM, HOROVODRUN):
        assert meet(environment | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"}) == ("10.0.0.1", 99)


def test_meeting_point_on_one_host() -> None:
    on_one_host = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_PORT": "99"}
    assert meet(on_one_host) == ("127.0.0.1", 99)
    assert meet(HOROVODRUN) == ("127.0.0.1", 15000 + 4711)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "the launcher's environment lacks WORLD_SIZE"),
        (MPICH | {"PMI_RANK": "one"}, "PMI_RANK must be a whole number, not 'one'"),
        (MPICH | {"PMI_RANK": "4"}, "PMI_RANK=4 is not a rank of PMI_SIZE=4 processes"),
        (TORCHRUN | {"RANK": "-1"}, "RANK=-1 is not a rank of WORLD_SIZE=8 processes"),
        (TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK must be a whole number, not ''"),
        (HOROVODRUN | {"HOROVOD_RANK": "2"}, "HOROVOD_RANK=2 is not a rank of HOROVOD_SIZE=2 processes"),
        (OPEN_MPI, "set MASTER_ADDR and MASTER_PORT"),
        (OPEN_MPI | {"PMIX_NAMESPACE": "prterun-node01-4711@1"}, "set MASTER_ADDR to"),
        (HOROVODRUN | {"HOROVOD_LOCAL_SIZE": "1"}, "horovodrun does not say where rank 0 listens: set MASTER_ADDR to"),
        (MPICH | {"MASTER_ADDR": "node01"}, "set MASTER_PORT to"),
        (MPICH | {"MASTER_PORT": "29500"}, "set MASTER_ADDR to"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
            "Slurm does not say .* set MASTER_ADDR and MASTER_PORT",
        ),
    ],
)
def test_contradictions_and_meeting_points_that_nobody_tells(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        meet(environment)


def test_torchrun_variables_of_all_launchers() -> None:
    found = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node01", "MASTER_PORT": "99"}
    assert torchrun_variables(OPEN_MPI | {"MASTER_ADDR": "node01", "MASTER_PORT": "99"}) == found
    assert torchrun_variables(TORCHRUN).items() <= TORCHRUN.items()
    in_a_shell = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert torchrun_variables({}) == torchrun_variables(in_a_shell) == {}
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        torchrun_variables(OPEN_MPI)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node07", "node07"),
        ("node07,node09", "node07"),
        ("node[03-04]", "node03"),
        ("node[3,5-9],gpu1", "node3"),
        ("rack2-[010-019]-ib,gpu[1-2]", "rack2-010-ib"),
        ("gpu1,node[03-04]", "gpu1"),
    ],
)
def test_slurm_meets_on_its_first_host(nodes: str, first: str) -> None:
    assert meet(SLURM | {"SLURM_JOB_NODELIST": nodes})[0] == first
    assert meet(SLURM | {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_NODELIST": "other"})[0] == first


def test_slurm_ports_differ_by_job_and_step() -> None:
    ports = {meet(SLURM | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step})[1] for job in ("4711", "4712") for step in "01"}
    assert len(ports) == 4
    assert all(1024 < port < 32768 for port in ports), "outside of the range of ephemeral ports"
    assert meet(SLURM | {"SLURM_JOB_ID": "4711", "COLLECTIVES_PORTS": "29600-29601"})[1] in (29600, 29601)


def test_open_mpi_on_one_host_needs_nothing_set() -> None:
    def point(rank: str, job: str) -> tuple[str, int]:
        told = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": job}
        return meet(OPEN_MPI | told)

    points = {point(rank, f"prterun-node01-{process}@1") for process in range(4711, 4721) for rank in "0123"}
    assert len(points) == 10
    assert all(address == "127.0.0.1" and 1024 < port < 32768 for address, port in points)


def test_a_slurm_job_without_srun() -> None:
    """Its script runs once, with the variables of a first task; the others would never come."""
    script = {name: value for name, value in SLURM.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
    with pytest.raises(ValueError, match=r"srun has not started this process.* `srun python train.py`"):
        meet(script)
    assert meet(script | {"MASTER_ADDR": "node01", "MASTER_PORT": "29500"}) == ("node01", 29500)
    assert read_launch(script | {"SLURM_NTASKS": "1"}).size == 1


@pytest.mark.parametrize(
    ("environment", "hint"),
    [
        (
            {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8"},
            "this process is alone in a Slurm job of 8 tasks; to start them all: srun python -m mine",
        ),
        ({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "4711"}, None),
        ({"SLURM_NTASKS": "8"}, None),
        ({}, None),
    ],
)
def test_a_process_alone_in_a_slurm_job(environment: dict[str, str], hint: str | None) -> None:
    assert read_launch(environment) == ALONE
    assert slurm_hint(environment, "-m mine") == hint


#: Without the package, whose import takes seconds.
MEET = f"""
import os, runpy
launch = runpy.run_path({launch.__file__!r})
print(*launch["meeting_point"](os.environ, launch["read_launch"](os.environ)))
"""


def started_by_mpich(commands: list[list[str]]) -> list[str]:
    """What ranks say, started as MPICH does: all by one process, which is not a rank."""
    places = [
        {"PMI_RANK": str(r), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(r), "MPI_LOCALNRANKS": "2"} for r in range(2)
    ]
    ranks = [start(command, ROOT, **place) for command, place in zip(commands, places, strict=True)]
    return [rank.communicate(timeout=60)[0].strip() for rank in ranks]


def test_mpich_on_one_host_needs_nothing_set() -> None:
    """Whether it starts Python itself or a script that does."""
    direct = [sys.executable, "-c", MEET]
    behind_a_script = ["/bin/sh", "-c", '"$0" "$@"; exit $?', *direct]
    first, second = started_by_mpich([direct, behind_a_script])
    address, port = first.split()
    assert first == second
    assert address == "127.0.0.1"
    assert 1024 < int(port) < 32768
    assert int(port) == 15000 + os.getpid() % 16384


@pytest.mark.parametrize(
    ("module", "command"),
    [
        (None, "mine.py"),
        (SimpleNamespace(name="mine.__main__"), "-m mine"),
        (SimpleNamespace(name="gradwire.trainer.tools.check.__main__"), "-m gradwire check"),
        (SimpleNamespace(name="gradwire.bench.__main__"), "-m gradwire.bench step"),
        (SimpleNamespace(name="gradwire.bench.private.turns"), "-m gradwire.bench.private.turns"),
    ],
)
def test_one_process_is_told_how_to_start_two(
    module: Any, command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "step", "--rounds"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", module)
    hvd.init()
    hvd.shutdown()
    said = f"gradwire: one process, which trains alone; to start two: torchrun --nproc-per-node 2 {command}"
    assert [record.message for record in caplog.records] == [said]


def test_cross_position() -> None:
    """Hosts of 3, 1 and 2 ranks, dealt round-robin: rank -> local rank."""
    local_ranks = [0, 0, 0, 1, 1, 2]
    assert [cross_position(rank, local_ranks) for rank in range(6)] == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2), (0, 1)]
