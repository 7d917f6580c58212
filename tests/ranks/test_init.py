"""Joining and leaving the world as a user's script does: again and again, and where nobody answers."""

import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.interpreter import FINALIZE, python
from tests.pages import ROOT
from tests.ports import unused_port
from tests.ranks.programs import ended, launch_text, start

SIZE = 3

AGAIN_AND_AGAIN = """
import torch
import gradwire as hvd

for _ in range(3):
    hvd.init(timeout_s=30)
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(hvd.size())] * 3
    hvd.shutdown()
print("rank done", flush=True)
"""


def by_open_mpi(script: str, folder: Path) -> str:
    """Start ranks as its mpirun does on one host, where they derive the port at which rank 0 keeps the store."""
    together = {
        "OMPI_COMM_WORLD_SIZE": str(SIZE),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(SIZE),
        "PMIX_NAMESPACE": f"test-{os.getpid()}@1",
    }
    places = [{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)} for rank in range(SIZE)]
    processes = [start([python(), "-c", script], folder, **together, **place) for place in places]
    said = "".join(ended(process)[1] for process in processes)
    assert [process.returncode for process in processes] == [0] * SIZE, said
    return said


@pytest.mark.parametrize("launch", [partial(launch_text, processes=SIZE), by_open_mpi], ids=["torchrun", "Open MPI"])
def test_a_world_follows_the_other_without_a_barrier(tmp_path: Path, launch: Callable[[str, Path], str]) -> None:
    """Some ranks still leave when others have come for the next one: each world has a store to itself."""
    assert launch(AGAIN_AND_AGAIN, tmp_path).count("rank done") == SIZE


def test_info_of_all_ranks_under_a_launcher_other_than_torchrun(tmp_path: Path) -> None:
    said = by_open_mpi("import sys\nfrom gradwire.trainer.__main__ import main\nsys.exit(main(['info']))", tmp_path)
    assert re.findall(r"^ranks +(\d+)$", said, re.MULTILINE) == [f"{SIZE}"], said


@contextmanager
def listener() -> Iterator[socket.socket]:
    """A program at a port of its own that accepts every connection, and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


def comes_in_vain(rank: int, port: int) -> subprocess.Popen[str]:
    """Start one rank of two, which waits for a second."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return start([python(), "-c", "import gradwire as hvd; hvd.init(timeout_s=1)"], ROOT, **place, **{FINALIZE: "yes"})


def test_a_listener_that_says_nothing() -> None:
    """An error says where and who, and the process ends by it, whether or not the other then hangs up."""
    with listener() as stays, listener() as leaves:
        ports = [each.getsockname()[1] for each in (stays, leaves)]
        first, second = (comes_in_vain(1, port) for port in ports)
        said = ["", ""]
        assert second.stdout is not None
        for line in second.stdout:
            said[1] += line
            if "CollectiveError" in line:
                leaves.close()  # while the interpreter ends
        codes = [0, second.wait()]
        codes[0], said[0] = ended(first)
    assert codes == [1, 1], said
    for port, text in zip(ports, said, strict=True):
        who = rf"CollectiveTimeout: rank 1: init: not done after 1 s waiting for rank 0: .*:{port}: .*does not answer"
        assert re.search(who, text), text


def test_nobody_is_there() -> None:
    """Say whom a rank has not seen: rank 1 that did not come, or rank 0 at its port."""
    awaited = ["rank 1: .*:{}: rank 1 did not arrive", "rank 0: .* at 127.0.0.1:{}: .*Connection refused"]
    ports = [unused_port(), unused_port()]
    for rank, process in enumerate([comes_in_vain(*place) for place in enumerate(ports)]):
        code, said = ended(process)
        assert code == 1, said
        where = awaited[rank].format(ports[rank])
        assert re.search(rf"rank {rank}: init: not done after 1 s waiting for {where}", said), said


OTHER_VERSION = """
import sys
import gradwire as hvd

if sys.argv[1:] == ["other"]:
    hvd.__version__ = "99.0"
hvd.init(timeout_s=30)
"""


def test_ranks_that_do_not_fit_together_say_so_at_once() -> None:
    """Of another version of gradwire, and of a world of another size: on all ranks, and not by the deadline."""
    begun: dict[str, list[subprocess.Popen[str]]] = {}
    for what in ("version", "size"):
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
        for rank in range(2):
            size = "3" if what == "size" and rank == 1 else "2"
            other = ["other"] if what == "version" and rank == 1 else []
            place = {"RANK": str(rank), "WORLD_SIZE": size}
            begun.setdefault(what, []).append(start([python(), "-c", OTHER_VERSION, *other], ROOT, **meeting, **place))
    said = {what: [ended(process) for process in processes] for what, processes in begun.items()}
    for code, text in said["version"]:
        assert code == 1, text
        assert "CollectiveError: " in text
        assert re.search(
            r"rank 1 runs gradwire 99\.0, .*, and rank 0 gradwire |rank 0 runs gradwire .*, and rank 1 gradwire 99\.0",
            text,
        ), text
    for code, text in said["size"]:
        assert code == 1, text
        assert re.search(r"CollectiveError: .*rank 0 expects 2 ranks, and rank 1 on host \S+ 3: ", text), text


WORKERS = """
import multiprocessing
import gradwire as hvd

hvd.init(timeout_s=60)


def work():
    print("worked", flush=True)


if __name__ == "__main__":
    worker = multiprocessing.get_context("{method}").Process(target=work)
    worker.start()
    worker.join()
    assert worker.exitcode == 1
    print("rank done", flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.wide)])
def test_init_in_a_worker_that_imports_the_script_is_an_error(tmp_path: Path, method: str) -> None:
    """It has the environment of a rank, whose place it could take in a world that other ranks' workers join."""
    said = launch_text(WORKERS.format(method=method), tmp_path, processes=1)
    assert said.count("rank done") == 1
    assert "worked" not in said
