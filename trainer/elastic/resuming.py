"""How ranks begin to train: from the newest commit, or from the state of one rank if there is none."""

from __future__ import annotations

import logging
import time

from gradwire.trainer.elastic.failures import Failures
from gradwire.trainer.elastic.memory import Memory
from gradwire.trainer.elastic.state import ObjectState
from gradwire.trainer.world.process_sets import global_process_set
from gradwire.trainer.world.world import communicator_of, elastic_worker, here, rank, size

_log = logging.getLogger("gradwire")


def begin(state: ObjectState, failures: Failures | None, since_s: float, *, is_reset: bool = False) -> None:
    """Restore the newest commit on all ranks. If there is none, set the state of all to that of the lowest rank that has trained,
    or of rank 0 if none has.

    since_s: the time.perf_counter() from which the logged duration counts. is_reset: whether reset callbacks are called in both
    cases, since this process has trained in another world. Collective. Raises GaveUp on all ranks, and RuntimeError if a commit
    cannot be loaded.
    """
    worker = elastic_worker()
    wanted = None if worker is None else lambda: rank() == 0 and worker.is_update_wanted()
    state.begin(Memory() if failures is None else failures.memory, wanted)
    restored, faults = state.commits.restore()
    for fault in faults if rank() == 0 else ():
        _log.warning("gradwire: %s", fault)
    if failures is not None:
        failures.begin(state.commits.host, 0 if restored is None else restored.number)
    if restored is None:
        have_trained = communicator_of(global_process_set).allgather_record(state.has_trained)
        root_rank = have_trained.index(True) if any(have_trained) else 0
        if any(have_trained) and rank() == 0:
            _log.warning("gradwire: no commit is complete: training continues from the state of rank %d", root_rank)
        state.sync(root_rank)
        state.note_training()
        if is_reset:
            state.on_reset()
        return
    try:
        state.take(restored)
    except (LookupError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"{here()}cannot resume from commit {restored.number}: {type(error).__name__}: {error}"
        ) from error
    state.note_training()
    state.on_reset()
    if rank() == 0:
        ranks = f"{size()} ranks" if restored.size == size() else f"{size()} instead of {restored.size} ranks"
        seconds = time.perf_counter() - since_s
        said = "gradwire: training resumes from commit %d on %s, from %s, after %.2f s"
        _log.warning(said, restored.number, ranks, restored.source, seconds)
