"""elastic.run: decorate a training function so that it continues after a failure, in the same processes or in new ones."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from gradwire.collectives import CollectiveError, ReplicasDiffer
from gradwire.collectives.kernels import cpu_kernels, cpu_sockets
from gradwire.trainer.attachment import Attachment
from gradwire.trainer.elastic.failures import Failures, GaveUp
from gradwire.trainer.elastic.memory import Memory, NamedMemory, find_agent, load_kernels
from gradwire.trainer.elastic.state import HostsUpdatedInterrupt, ObjectState
from gradwire.trainer.world.generations import Worker, can_restart
from gradwire.trainer.world.process_sets import global_process_set
from gradwire.trainer.world.world import (
    communicator_of,
    current_world,
    elastic_worker,
    join_next_generation,
    leave_generation,
    names_rank,
)

_log = logging.getLogger("gradwire")

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
    Hogwild; anywhere, a DistributedOptimizer of some of the ranks, or of a Communicator.
    """
    if func is None:
        return functools.partial(run, max_failures=max_failures)
    if not isinstance(max_failures, int) or max_failures < 1:
        raise ValueError(f"max_failures must be a whole number >= 1, not {max_failures!r}")

    @functools.wraps(func)
    def trained(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        with names_rank:
            if not isinstance(state, ObjectState):
                raise TypeError(f"the first argument of {func.__name__}() must be a TorchState or an ObjectState")
        return _train(functools.partial(func, state, *args, **kwargs), state, max_failures)

    return trained


def _train(train: Callable[[], R], state: ObjectState, max_failures: int) -> R:
    """Call a training function until it returns.

    In a job that keeps its processes, the function may be called several times, in one world after another: before each further
    call, this process leaves its world, joins the next one, and connects its optimizers to it. All ranks then restore the newest
    commit. A process that joins the job late also does this before the first call. In other jobs, an error ends the process.
    """
    worker, world = elastic_worker(), current_world()
    optimizers = [each for each in world.optimizers if isinstance(each, Attachment)]
    since_s = time.perf_counter()
    is_first = worker is None or not worker.is_late
    with names_rank:
        failures = _failures(state, worker, max_failures)
        if worker is not None:
            _check(state, optimizers)
    if not is_first:
        # A world of one has not loaded them; in the next world, the other ranks would wait for that.
        for load in (cpu_kernels, cpu_sockets, load_kernels):
            load()
        _leave(state, optimizers, None)
    while True:
        error: CollectiveError | None = None  # why this process leaves its world; None for an update
        try:
            if is_first and state.has_begun:
                state.sync()
            else:
                if not is_first:
                    join_next_generation(world.settings)
                    for optimizer in optimizers:
                        optimizer.attach_again()
                _begin(state, failures, since_s, is_reset=not is_first)
                for optimizer in optimizers if not is_first else ():
                    optimizer.check_passes_agree()
            returned = train()
            state.commits.settle()  # this process may end now
            return returned
        except Exception as failure:
            since_s = time.perf_counter()
            if worker is None or failures is None:
                _end(state, failures, failure)
                raise
            if isinstance(failure, HostsUpdatedInterrupt):
                try:
                    state.commits.settle()  # or the copy of the last commit may be incomplete
                except CollectiveError as unsettled:
                    error = unsettled
            elif isinstance(failure, ReplicasDiffer):  # another world would not make them equal
                failures.end_job(str(failure))
                raise
            elif isinstance(failure, ValueError) or not isinstance(failure, CollectiveError):  # it would happen again
                raise
            else:
                error = failure
            if error is not None:
                failures.note(error)
        is_first = False
        _leave(state, optimizers, error)


def _end(state: ObjectState, failures: Failures | None, failure: Exception) -> None:
    """Prepare the end of a process that does not go on after a failure: note the reason for the process that replaces it, and end
    within a second if there will be one. Raises SystemExit for an update."""
    if isinstance(failure, HostsUpdatedInterrupt):
        with suppress(CollectiveError, OSError):
            state.commits.settle()  # or the copy of the last commit may be incomplete
    elif failures is not None and isinstance(failure, ReplicasDiffer):  # another world would not make them equal
        failures.end_job(str(failure))
    elif failures is not None and not isinstance(failure, GaveUp):
        failures.note(failure)
    if failures is not None and isinstance(failure, HostsUpdatedInterrupt | CollectiveError):
        _leave_soon()
    if isinstance(failure, HostsUpdatedInterrupt):
        raise SystemExit(str(failure)) from failure


def _begin(state: ObjectState, failures: Failures | None, since_s: float, *, is_reset: bool) -> None:
    """Restore the newest commit on all ranks. If there is none, set the state of all to that of the lowest rank that has trained,
    or of rank 0 if none has.

    since_s: the time.perf_counter() from which the logged duration counts. is_reset: whether reset callbacks are called in both
    cases, since this process has trained in another world. Collective. Raises GaveUp on all ranks, and RuntimeError if a commit
    cannot be loaded.
    """
    worker, world = elastic_worker(), current_world()
    wanted = None if worker is None else lambda: world.rank == 0 and worker.is_update_wanted()
    if failures is not None:
        failures.memory = failures.memory.reopened()
    state.begin(Memory() if failures is None else failures.memory, wanted)
    restored, faults = state.commits.restore()
    for fault in faults if world.rank == 0 else ():
        _log.warning("gradwire: %s", fault)
    if failures is not None:
        failures.begin(state.commits.host, 0 if restored is None else restored.number)
    if restored is None:
        have_trained = communicator_of(global_process_set).allgather_record(state.has_trained)
        root_rank = have_trained.index(True) if any(have_trained) else 0
        if any(have_trained) and world.rank == 0:
            _log.warning("gradwire: no commit is complete: training continues from the state of rank %d", root_rank)
        state.sync(root_rank)
    else:
        try:
            state.take(restored)
        except (LookupError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"rank {world.rank}: cannot resume from commit {restored.number}: {why}") from error
    state.has_trained = True
    if is_reset or restored is not None:
        state.on_reset()
    if restored is not None and world.rank == 0:
        ranks = (
            f"{world.size} ranks" if restored.size == world.size else f"{world.size} instead of {restored.size} ranks"
        )
        said = "gradwire: training resumes from commit %d on %s, from %s, after %.2f s"
        _log.warning(said, restored.number, ranks, restored.source, time.perf_counter() - since_s)


def _leave(state: ObjectState, optimizers: Sequence[Attachment], error: CollectiveError | None) -> None:
    """Leave the world because of an error, or for an update if error is None, and release all objects that belong to it."""
    if error is not None:
        traceback.clear_frames(error.__traceback__)  # or their local variables would stay in memory in the next world
    leave_generation(error)
    if state.has_begun:
        state.commits.end()
    for optimizer in optimizers:
        optimizer.detach()


def _failures(state: ObjectState, worker: Worker | None, max_failures: int) -> Failures | None:
    """Return the Failures that use the memory of a state's commits, or new memory if the state has not begun; None if nothing
    restarts a rank."""
    agent = find_agent()
    if agent is None and worker is not None:
        raise RuntimeError(
            "the process that has started this one cannot be found in /proc, and commits are named after it"
        )
    return None if agent is None else Failures(agent, NamedMemory.after(state.memory, agent), max_failures, worker)


def _check(state: ObjectState, optimizers: Sequence[Attachment]) -> None:
    """Raise ValueError unless the state and the optimizers can move to another world."""
    found = state.unmovable()
    if not found and not all(each.can_move for each in optimizers):
        found = ["there is a DistributedOptimizer of some of the ranks, or of a Communicator"]
    if found:
        raise ValueError(
            f"{'; '.join(found)}, and this job keeps its processes when ranks are lost: only a DistributedOptimizer "
            "of all ranks can go on with others. Start the job by torchrun --max-restarts, which starts all processes again"
        )


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
