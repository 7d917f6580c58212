"""Training that goes on in the same processes: where a rank is lost, the others leave its world, and join the next."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from gradwire.collectives import CollectiveError
from gradwire.collectives.kernels import cpu_kernels, cpu_sockets
from gradwire.trainer.elastic.failures import FailuresOfEpochs
from gradwire.trainer.elastic.memory import NamedMemory, find_agent, load_kernels
from gradwire.trainer.elastic.resuming import begin
from gradwire.trainer.elastic.state import HostsUpdatedInterrupt, ObjectState
from gradwire.trainer.optimizer import DistributedOptimizer
from gradwire.trainer.world.worker import Worker
from gradwire.trainer.world.world import current_world, here, join_next_epoch, leave_epoch

R = TypeVar("R")


def train_in_place(
    train: Callable[[], R], state: ObjectState, worker: Worker, number: Callable[[], int], max_failures: int
) -> R:
    """Call a training function until it returns, in one epoch after the other.

    Before each call but perhaps the first, this process leaves its world and joins the next, with the optimizers that it has made
    by now, and all ranks go on from the newest commit. number: draws that of the function, among those that the process calls.

    Collective. Raises GaveUp, what the function raises, ValueError for what cannot go on in another world, and RuntimeError where
    the launcher has ended the job.
    """
    world = current_world()
    settings, enrolled = world.settings, world.optimizers
    optimizers = [optimizer for optimizer in enrolled if isinstance(optimizer, DistributedOptimizer)]
    _check(state, optimizers)
    failures = _failures(state, worker, number, max_failures)
    since_s = time.perf_counter()
    is_first = True
    if worker.is_late:
        for load in (
            cpu_kernels,
            cpu_sockets,
            load_kernels,
        ):  # which a world of one does without, and the others would wait for
            load()
        _leave(state, optimizers, None)
        is_first = False
    while True:
        error: CollectiveError | None = None
        try:
            if is_first and state.has_begun:
                state.sync()
            else:
                if not is_first:
                    join_next_epoch(settings)
                    for optimizer in optimizers:
                        optimizer.rebind()
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
            if isinstance(failure, ValueError):  # a caller's mistake, which would come again
                raise
            since_s = time.perf_counter()
            error = failure
        is_first = False
        if error is not None:
            failures.note(error)
        _leave(state, optimizers, error)


def _leave(state: ObjectState, optimizers: Sequence[DistributedOptimizer], error: CollectiveError | None) -> None:
    """Leave the epoch, by an error or because an update is wanted, and let go of all that belongs to its world."""
    if error is not None:
        traceback.clear_frames(error.__traceback__)  # or what they hold on to would lie in memory beside what comes
    leave_epoch(error)
    if state.has_begun:
        state.commits.end()
    for optimizer in optimizers:
        optimizer.release()


def _failures(state: ObjectState, worker: Worker, number: Callable[[], int], max_failures: int) -> FailuresOfEpochs:
    """Return what counts failures, with the memory of a state's commits."""
    agent = find_agent()
    if agent is None:
        raise RuntimeError(
            f"{here()}the process that has started this one cannot be found in /proc, and commits are named after it"
        )
    kept = state.commits.memory if state.has_begun else None
    memory = kept if isinstance(kept, NamedMemory) else NamedMemory(agent, number())
    return FailuresOfEpochs(agent, memory, max_failures, worker)


def _check(state: ObjectState, optimizers: Sequence[DistributedOptimizer]) -> None:
    """Raise ValueError for what cannot go on in another world."""
    found = state.unmovable()
    bound = [type(each).__name__ for each in optimizers if not each.can_rebind]
    if bound and not found:
        found = [f"there is a {bound[0]} of some of the ranks, or of a Communicator"]
    if found:
        raise ValueError(
            f"{here()}{'; '.join(found)}, and this job keeps its processes when ranks are lost: only a DistributedOptimizer "
            "of all ranks can go on with others. Start the job by torchrun --max-restarts, which starts all processes again"
        )
