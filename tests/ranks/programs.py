"""Programs as a user runs them: on ranks with the environment and the store that torchrun gives them.

The ranks come from the harness's server, so that they need not import torch: seconds for each, which were most of such a test.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.harness import forked

DEADLINE_S = 100.0

#: What the other ranks have to end, when one has failed.
GRACE_S = 15.0


def launch(program: Path | str, folder: Path, *arguments: str, processes: int = 2) -> str:
    """Run a script, or a module by its name, on several ranks in a folder; return what they print. Raises AssertionError, with
    that, where one fails or does not end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S))
    environment = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{store.port}",
    }
    with tempfile.NamedTemporaryFile() as output:
        ranks = [
            forked(
                _run,
                program,
                folder,
                arguments,
                output.name,
                environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(processes)
        ]
        deadline = time.monotonic() + DEADLINE_S
        try:
            running = {rank.sentinel: rank for rank in ranks}
            while running and (ended := wait(running, max(0.0, deadline - time.monotonic()))):
                for sentinel in ended:
                    rank = running.pop(sentinel)  # type: ignore[call-overload]
                    rank.join()
                    if rank.exitcode != 0:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        said = Path(output.name).read_text()
    assert [rank.exitcode for rank in ranks] == [0] * processes, said
    return said


def launch_text(script: str, folder: Path, processes: int = 2) -> str:
    """Run the text of a script, as launch() does."""
    path = folder / "train.py"
    path.write_text(script)
    return launch(path, folder, processes=processes)


def _run(program: Path | str, folder: Path, arguments: Sequence[str], output: str, environment: dict[str, str]) -> None:
    """Be a rank, to the end of its process."""
    gc.freeze()
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = [str(program), *arguments]
    status = 0
    try:
        if isinstance(program, Path):
            sys.path.insert(0, str(program.parent))
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    # As the interpreter ends, which a process of multiprocessing does not.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
