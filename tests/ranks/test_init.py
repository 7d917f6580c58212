"""Joining and leaving the world as a user's script does: again and again, and where nobody answers."""

import os
import random
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

DEADLINE_S = 60.0
SIZE = 3
ROOT = str(Path(__file__).parents[2])

AGAIN_AND_AGAIN = """
    import torch
    import gradwire as hvd

    for _ in range(3):
        hvd.init(timeout_s=30)
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(hvd.size())] * 3
        hvd.shutdown()
    print("rank done", flush=True)
"""

IN_VAIN = """
    import gradwire as hvd

    hvd.init(timeout_s=1)
"""


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def by_torchrun(script: Path) -> list[subprocess.Popen[str]]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE)]
    return [start([sys.executable, *torchrun, str(script)], {})]


def by_open_mpi(script: Path) -> list[subprocess.Popen[str]]:
    """The ranks as its mpirun starts them on one host, where they derive the port at which rank 0 keeps the store."""
    together = {
        "OMPI_COMM_WORLD_SIZE": str(SIZE),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(SIZE),
        "PMIX_NAMESPACE": f"test-{os.getpid()}@1",
    }
    return [
        start(
            [sys.executable, str(script)],
            together | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)},
        )
        for rank in range(SIZE)
    ]


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each process printed until its end. Nothing is left running."""
    try:
        return [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("launch", [by_torchrun, by_open_mpi])
def test_a_world_follows_the_other_without_a_barrier(
    tmp_path: Path, launch: Callable[[Path], list[subprocess.Popen[str]]]
) -> None:
    """Some ranks still leave when others have come for the next one: each world has a store to itself."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(AGAIN_AND_AGAIN))
    processes = launch(script)
    output = "".join(outputs(processes))
    assert [process.returncode for process in processes] == [0] * len(processes), output
    assert output.count("rank done") == SIZE, output


@contextmanager
def listener() -> Iterator[socket.socket]:
    """A program at a port of its own that accepts every connection, and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


def unused_port() -> int:
    """Return a port at which nobody listens, below those that the system deals out, or another test might get it."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_listener_that_says_nothing(hangs_up: bool) -> None:
    """An error says where and who, and the process ends by it, whether or not the other then hangs up."""
    with listener() as silent:
        port = silent.getsockname()[1]
        launch = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        process = start([sys.executable, "-c", textwrap.dedent(IN_VAIN)], launch)
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if hangs_up and "CollectiveError" in line:
                silent.close()  # while the interpreter ends
        process.wait()
    assert process.returncode == 1, said
    pattern = rf"CollectiveTimeout: rank 1: init: not done after 1 s waiting for rank 0: .*:{port}: .*does not answer"
    assert re.search(pattern, said), said


def test_nobody_listens() -> None:
    port = unused_port()
    launch = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = start([sys.executable, "-c", textwrap.dedent(IN_VAIN)], launch)
    said = outputs([process])[0]
    assert process.returncode == 1, said
    assert re.search(
        rf"rank 1: init: not done after 1 s waiting for rank 0: .* at 127.0.0.1:{port}: .*Connection refused", said
    ), said


def test_nobody_comes() -> None:
    """Rank 0 alone: whom it has not seen."""
    port = unused_port()
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = start([sys.executable, "-c", textwrap.dedent(IN_VAIN)], launch)
    said = outputs([process])[0]
    assert process.returncode == 1, said
    assert re.search(rf"rank 0: init: not done after 1 s waiting for rank 1: .*:{port}: rank 1 did not arrive", said), (
        said
    )
