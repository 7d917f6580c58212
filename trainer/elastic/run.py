"""elastic.run: decorate a training function so that it continues after a failure, in the same processes or in new ones."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from gradwire.collectives import CollectiveError, ReplicasDiffer
from gradwire.trainer.elastic.failures import FailuresOfJob, GaveUp
from gradwire.trainer.elastic.in_place import train_in_place
from gradwire.trainer.elastic.memory import NamedMemory, find_agent
from gradwire.trainer.elastic.resuming import begin
from gradwire.trainer.elastic.state import HostsUpdatedInterrupt, ObjectState
from gradwire.trainer.world.generations import can_restart
from gradwire.trainer.world.world import elastic_worker, here

S = TypeVar("S", bound=ObjectState)
P = ParamSpec("P")
R = TypeVar("R")
Training = Callable[Concatenate[S, P], R]

#: How long a rank may take to end once another is lost. The launcher waits for that before it restarts all ranks.
_LEAVE_S = 1.0


@overload
def run(func: Training[S, P, R]) -> Training[S, P, R]: ...


@overload
def run(*, max_failures: int = ...) -> Callable[[Training[S, P, R]], Training[S, P, R]]: ...


def run(func: Any = None, *, max_failures: int = 3) -> Any:
    """Decorate a training function, whose first argument is a state, so that training continues from the state's last commit.

    When the function is called, all ranks restore the newest commit of which no part is lost, and call the state's reset
    callbacks. If there are several hosts, two of them hold the state of each rank. If there is no such commit, all ranks get
    the state of the lowest rank that has trained, or of rank 0 if none has. If a process calls a function with the same state
    again, after the first call has ended, all ranks get rank 0's values instead.

    Under gradwire run --min-np, the other ranks continue in the same processes when a rank is lost. The function ends with
    CollectiveError, or with HostsUpdatedInterrupt if ranks are to be added or removed. The ranks of the new world then restore
    the newest commit and call the function again. A process that joins later runs the script alone, as rank 0 of a world of
    one, until it calls the function.

    Under torchrun --max-restarts N, the other ranks raise CollectiveError when a rank is lost. If torchrun may restart them
    again, they end within a second, with exit status 1 whatever the script does. torchrun then restarts all ranks, which
    continue when they call the function. HostsUpdatedInterrupt ends a rank in the same way.

    Under other launchers, nothing restarts a rank: commits are in memory that ends with the process. Errors are raised
    unchanged, except that HostsUpdatedInterrupt becomes SystemExit.

    ReplicasDiffer ends the job: the replicas may have been different already at the newest commit, so training cannot continue
    from it.

    max_failures: the number of failures without a new commit at which all ranks raise GaveUp, with the reason of the last
    failure, and end the job, whatever the launcher allows.

    Collective. Raises the function's errors, and RuntimeError if a commit cannot be loaded. Under gradwire run --min-np, raises
    ValueError for objects that cannot move to another world: in the state, a DistributedDataParallel, ParameterServer or
    Hogwild; anywhere, a DistributedOptimizer whose can_rebind is False.
    """
    if func is None:
        return functools.partial(run, max_failures=max_failures)
    if not isinstance(max_failures, int) or max_failures < 1:
        raise ValueError(f"max_failures must be a whole number >= 1, not {max_failures!r}")

    @functools.wraps(func)
    def trained(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, ObjectState):
            raise TypeError(f"{here()}the first argument of {func.__name__}() must be a TorchState or an ObjectState")
        if (worker := elastic_worker()) is not None:
            train = functools.partial(func, state, *args, **kwargs)
            return train_in_place(train, state, worker, max_failures)
        agent = find_agent()
        failures = None
        if agent is not None:
            failures = FailuresOfJob(agent, NamedMemory.after(state.memory, agent), max_failures)
        try:
            if state.has_begun:
                state.sync()
            else:
                begin(state, failures, time.perf_counter())
            returned = func(state, *args, **kwargs)
            state.commits.settle()  # this process may end now
            return returned
        except HostsUpdatedInterrupt as interrupt:
            with suppress(CollectiveError, OSError):
                state.commits.settle()  # or the copy of the last commit may be incomplete
            if failures is not None:
                _leave_soon()
            raise SystemExit(str(interrupt)) from interrupt
        except Exception as error:
            if failures is not None:
                if isinstance(error, ReplicasDiffer):  # a restart would not make them equal
                    failures.end_job(str(error))
                elif not isinstance(error, GaveUp):
                    failures.note(error)
                if isinstance(error, CollectiveError):
                    _leave_soon()
            raise

    return trained


def _leave_soon() -> None:
    """End this process within a second, whatever else it waits for, if torchrun will restart it. Return at once."""
    if can_restart(os.environ):
        timer = threading.Timer(_LEAVE_S, os._exit, [1])
        timer.daemon = True
        timer.start()
        atexit.register(_EndAfterHandlers())


class _EndAfterHandlers:
    """An exit handler that ends this process when Python deletes its exit handlers, which is after all of them have run. The
    interpreter would take 0.6 s more to free torch's modules."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def __call__(self) -> None:
        """Do nothing."""

    def __del__(self) -> None:
        if os.getpid() == self._process:  # not in a forked child
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # it is closed, or nobody reads it
                    stream.flush()
            os._exit(1)
