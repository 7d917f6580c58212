"""Training that continues in the same processes: when a rank is lost, the others leave the world, and join the next one."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from gradwire.collectives import CollectiveError, ReplicasDiffer
from gradwire.collectives.kernels import cpu_kernels, cpu_sockets
from gradwire.trainer.attachment import Attachment
from gradwire.trainer.elastic.failures import FailuresOfGenerations
from gradwire.trainer.elastic.memory import NamedMemory, find_agent, load_kernels
from gradwire.trainer.elastic.resuming import begin
from gradwire.trainer.elastic.state import HostsUpdatedInterrupt, ObjectState
from gradwire.trainer.world.worker import Worker
from gradwire.trainer.world.world import current_world, here, join_next_generation, leave_generation

R = TypeVar("R")


def train_in_place(train: Callable[[], R], state: ObjectState, worker: Worker, max_failures: int) -> R:
    """Call a training function until it returns, in one world after another.

    Before each further call, this process leaves its world, joins the next one, and connects its optimizers to it. All ranks
    then restore the newest commit. A process that joins the job late also does this before the first call.

    Collective. Raises GaveUp, the function's errors, ValueError if the state or an optimizer cannot move to another world, and
    RuntimeError if the launcher has ended the job.
    """
    world = current_world()
    settings, enrolled = world.settings, world.optimizers
    optimizers = [each for each in enrolled if isinstance(each, Attachment)]
    _check(state, optimizers)
    failures = _failures(state, worker, max_failures)
    since_s = time.perf_counter()
    is_first = not worker.is_late
    if worker.is_late:
        # A world of one has not loaded them; in the next world, the other ranks would wait for that.
        for load in (cpu_kernels, cpu_sockets, load_kernels):
            load()
        _leave(state, optimizers, None)
    while True:
        error: CollectiveError | None = None
        try:
            if is_first and state.has_begun:
                state.sync()
            else:
                if not is_first:
                    join_next_generation(settings)
                    for optimizer in optimizers:
                        optimizer.attach_again()
                failures.memory = failures.memory.reopened()
                begin(state, failures, since_s, is_reset=not is_first)
                for optimizer in optimizers if not is_first else ():
                    optimizer.check_passes_agree()
            is_first = False
            returned = train()
            state.commits.settle()
            return returned
        except HostsUpdatedInterrupt:
            since_s = time.perf_counter()
            try:
                state.commits.settle()
            except CollectiveError as failure:
                error = failure
        except CollectiveError as failure:
            if isinstance(failure, ValueError):  # a caller's mistake, which would happen again
                raise
            if isinstance(failure, ReplicasDiffer):  # another world would not make them equal
                failures.end_job(str(failure))
                raise
            since_s = time.perf_counter()
            error = failure
        is_first = False
        if error is not None:
            failures.note(error)
        _leave(state, optimizers, error)


def _leave(state: ObjectState, optimizers: Sequence[Attachment], error: CollectiveError | None) -> None:
    """Leave the world because of an error, or for an update if error is None, and release all objects that belong to it."""
    if error is not None:
        traceback.clear_frames(error.__traceback__)  # or their local variables would stay in memory in the next world
    leave_generation(error)
    if state.has_begun:
        state.commits.end()
    for optimizer in optimizers:
        optimizer.detach()


def _failures(state: ObjectState, worker: Worker, max_failures: int) -> FailuresOfGenerations:
    """Return the FailuresOfGenerations that uses the memory of a state's commits, or new memory if the state has not begun."""
    agent = find_agent()
    if agent is None:
        raise RuntimeError(
            f"{here()}the process that has started this one cannot be found in /proc, and commits are named after it"
        )
    return FailuresOfGenerations(agent, NamedMemory.after(state.memory, agent), max_failures, worker)


def _check(state: ObjectState, optimizers: Sequence[Attachment]) -> None:
    """Raise ValueError unless the state and the optimizers can move to another world."""
    found = state.unmovable()
    if not found and not all(each.can_move for each in optimizers):
        found = ["there is a DistributedOptimizer of some of the ranks, or of a Communicator"]
    if found:
        raise ValueError(
            f"{here()}{'; '.join(found)}, and this job keeps its processes when ranks are lost: only a DistributedOptimizer "
            "of all ranks can go on with others. Start the job by torchrun --max-restarts, which starts all processes again"
        )
