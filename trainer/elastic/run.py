"""elastic.run: a training function that goes on after a failure, where the launcher starts its ranks again."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from gradwire.collectives import CollectiveError
from gradwire.trainer.elastic.failures import Failures, FailuresOfJob, GaveUp
from gradwire.trainer.elastic.in_place import train_in_place
from gradwire.trainer.elastic.memory import NamedMemory, find_agent
from gradwire.trainer.elastic.resuming import begin
from gradwire.trainer.elastic.state import HostsUpdatedInterrupt, ObjectState
from gradwire.trainer.world.world import elastic_worker, here

S = TypeVar("S", bound=ObjectState)
P = ParamSpec("P")
R = TypeVar("R")
Training = Callable[Concatenate[S, P], R]

#: What a rank has to leave once another is lost: its launcher waits for it to start all again.
_LEAVE_S = 1.0

#: Of training functions that this process has run, which on all ranks come in the same order.
_numbers = itertools.count(1)


@overload
def run(func: Training[S, P, R]) -> Training[S, P, R]: ...


@overload
def run(*, max_failures: int = ...) -> Callable[[Training[S, P, R]], Training[S, P, R]]: ...


def run(func: Any = None, *, max_failures: int = 3) -> Any:
    """Decorate a training function, whose first argument is a state, so that training goes on from the state's last commit.

    When the function is called, all ranks restore the newest commit of which every part is still held, in the memory of a host
    or of the next one, and call the state's reset callbacks; where there is none, they get the state of rank 0.

    Started by gradwire run --min-np, ranks that lose another one go on in the same processes: the function is left by the
    error of that, or by HostsUpdatedInterrupt, all restore the newest commit with the ranks of then, and call the function
    again. A process that comes later runs the script alone, as rank 0 of a world of one, until it calls the function.

    Started by torchrun --max-restarts N, a rank that loses another one raises the error of that, and is gone within a second.
    torchrun then starts all of them again, which come here, and go on. HostsUpdatedInterrupt ends the rank like that, too.

    max_failures: after how many failures with no commit between them the ranks raise GaveUp, with the reason of the last one, and
    the job is ended, whatever the launcher allows. Where the ranks were started by neither, nobody would start them again:
    commits lie in memory that ends with the process, and errors are raised as they are.

    Collective. Raises what the function raises, and RuntimeError where what was committed cannot be loaded. Where processes stay,
    raises ValueError for what cannot go on with other ranks: a DistributedDataParallel in the state, servers, and optimizers of
    some of the ranks or of a Communicator.
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
            return train_in_place(train, state, worker, functools.partial(next, _numbers), max_failures)
        if state.has_begun:
            state.sync()
            return _completed(func, state, *args, **kwargs)
        agent = find_agent()
        failures = None
        if agent is not None:
            failures = FailuresOfJob(agent, NamedMemory(agent, next(_numbers)), max_failures)
        try:
            begin(state, failures, time.perf_counter())
            return _completed(func, state, *args, **kwargs)
        except HostsUpdatedInterrupt as interrupt:
            _leave_soon(failures)
            raise SystemExit(str(interrupt)) from interrupt
        except Exception as error:
            if failures is not None and not isinstance(error, GaveUp):
                failures.note(error)
            if isinstance(error, CollectiveError):
                _leave_soon(failures)
            raise

    return trained


def _completed(func: Training[S, P, R], state: S, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a training function, and return when its last commit is complete on all hosts: the process may end then."""
    returned = func(state, *args, **kwargs)
    state.commits.settle()
    return returned


def _leave_soon(failures: Failures | None) -> None:
    """Have this process end within a second, whatever else would keep it, where it is going to be started again."""
    if failures is not None:
        timer = threading.Timer(_LEAVE_S, os._exit, [1])
        timer.daemon = True
        timer.start()
