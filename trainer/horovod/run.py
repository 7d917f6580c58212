"""horovod.run(): calls a function on new processes of this host, which are ranks of one world."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch

from gradwire.trainer.launcher.hosts import Host
from gradwire.trainer.launcher.job import run_job
from gradwire.trainer.launcher.options import Job
from gradwire.trainer.world.importing import check_not_importing

LOCAL_HOST = "localhost"

#: What a rank runs. Its argument is the folder of the call and of the results.
_RANK = "import sys; from gradwire.trainer.horovod.run import call_in; call_in(sys.argv[1])"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    **others: Any,
) -> list[Any]:
    """Call func(*args, **kwargs) on num_proc new processes of this host, and return the results, by rank.

    The function calls init() itself. It, its arguments and its results are pickled. The result of a rank is None if the
    function ends its process, as by sys.exit(0). `import horovod.torch` finds gradwire in the new processes, which have as many
    compute threads as this one. A script calls this inside `if __name__ == "__main__":`, since the processes import it.
    np: the older name of num_proc. hosts: None, or this host as "localhost:N" with N = num_proc.

    Raises ValueError for further arguments of Horovod's that are not None, which `gradwire run` has; RuntimeError in a process
    that imports the script, or if the function raises on a rank, whose traceback is then on stderr, and ends the others;
    KeyboardInterrupt after Ctrl-C.
    """
    count = num_proc if np is None else np
    others |= {} if hosts in (None, f"{LOCAL_HOST}:{count}") else {"hosts": hosts}
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(
            f"horovod.run() starts processes of this host, without {', '.join(given)}: start the script with `gradwire run` "
            "or torchrun instead"
        )
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"num_proc must be a whole number >= 1, not {count!r}")
    check_not_importing("horovod.run()")
    main = spawn.get_preparation_data("horovod.run")  # how to import the main module, whose functions func may need
    main.pop("authkey", None)  # which is not pickled
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        call = pickle.dumps((func, tuple(args), dict(kwargs or {})))
        (Path(folder) / "call").write_bytes(pickle.dumps((main, call)))
        threads = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
        settings = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": threads}
        host = Host(LOCAL_HOST, count, is_here=True)
        status = run_job(Job([sys.executable, "-c", _RANK, folder], [host], settings))
        if status == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if status:
            raise RuntimeError(
                f"horovod.run(): not all ranks have returned; exit status {status}, see the errors above"
            )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(count)]


def call_in(folder: str) -> None:
    """Call the function in a folder with its arguments, which may be of modules that import Horovod, and write what it
    returns, or None if it does not return and ends the process without a failure."""
    from gradwire.trainer.horovod.alias import alias_horovod

    main, call = pickle.loads((Path(folder) / "call").read_bytes())
    spawn.prepare(main)
    alias_horovod()
    func, args, kwargs = pickle.loads(call)
    returned = Path(folder) / os.environ["RANK"]
    returned.write_bytes(pickle.dumps(None))
    returned.write_bytes(pickle.dumps(func(*args, **kwargs)))
