"""Refuses calls in a process that only imports the script, such as a DataLoader's worker: no rank may begin there."""

from __future__ import annotations

import traceback


def check_not_importing(function: str) -> None:
    """Raise RuntimeError if the script calls this while another process imports it: as the module __mp_main__, by which the
    processes of multiprocessing ('spawn', 'forkserver') and the ranks of horovod.run() find its functions. function: for the
    message."""
    callers = traceback.walk_stack(None)
    if any(f.f_code.co_name == "<module>" and f.f_globals.get("__name__") == "__mp_main__" for f, _ in callers):
        raise RuntimeError(
            f"{function} was called by a process that imports the script, such as a DataLoader's worker or a rank of "
            f"horovod.run(): call {function}, and all that starts processes, under if __name__ == '__main__':"
        )
