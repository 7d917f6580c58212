"""elastic.run: a training function that goes on after a failure, where the launcher starts its ranks again."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from gradwire.collectives import CollectiveError
from gradwire.trainer.elastic.memory import Agent, Memory, NamedMemory, find_agent, open_own
from gradwire.trainer.elastic.state import HostsUpdatedInterrupt, ObjectState
from gradwire.trainer.world.process_sets import global_process_set
from gradwire.trainer.world.world import communicator_of, here, rank, size

_log = logging.getLogger("gradwire")

S = TypeVar("S", bound=ObjectState)
P = ParamSpec("P")
R = TypeVar("R")
Training = Callable[Concatenate[S, P], R]

#: Which of torchrun's variables says how often its agent has started these ranks again because one of them had failed.
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"

#: What a rank has to leave once another is lost: its launcher waits for it to start all again.
_LEAVE_S = 1.0

_LONGEST_REASON = 2000

#: Of training functions that this process has run, which on all ranks come in the same order.
_numbers = itertools.count(1)


class GaveUp(RuntimeError):
    """Is raised where ranks have failed as often as allowed without getting any further."""


@overload
def run(func: Training[S, P, R]) -> Training[S, P, R]: ...


@overload
def run(*, max_failures: int = ...) -> Callable[[Training[S, P, R]], Training[S, P, R]]: ...


def run(func: Any = None, *, max_failures: int = 3) -> Any:
    """Decorate a training function, whose first argument is a state, so that training goes on from the state's last commit.

    When the function is called, all ranks restore the newest commit of which every part is still held, in the memory of a host
    or of the next one, and call the state's reset callbacks; where there is none, they get the state of rank 0. A rank that
    loses another one raises the error of that, and is gone within a second. The launcher, torchrun --max-restarts N, then starts
    all of them again, which come here, and go on. HostsUpdatedInterrupt ends the rank like that, too.

    max_failures: after how many failures with no commit between them the ranks raise GaveUp, with the reason of the last one, and
    torchrun is ended, whatever --max-restarts allows. Where the ranks were not started by torchrun's agent, nobody would start
    them again: commits lie in memory that ends with the process, and errors are raised as they are.

    Collective. Raises what the function raises, and RuntimeError where what was committed cannot be loaded.
    """
    if func is None:
        return functools.partial(run, max_failures=max_failures)
    if not isinstance(max_failures, int) or max_failures < 1:
        raise ValueError(f"max_failures must be a whole number >= 1, not {max_failures!r}")

    @functools.wraps(func)
    def trained(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, ObjectState):
            raise TypeError(f"{here()}the first argument of {func.__name__}() must be a TorchState or an ObjectState")
        if state.has_begun:
            state.sync()
            return _completed(func, state, *args, **kwargs)
        agent = find_agent()
        history = None if agent is None else _History(agent, next(_numbers), max_failures)
        try:
            _begin(state, history)
            return _completed(func, state, *args, **kwargs)
        except HostsUpdatedInterrupt as interrupt:
            _leave_soon(history)
            raise SystemExit(str(interrupt)) from interrupt
        except Exception as error:
            if history is not None and not isinstance(error, GaveUp):
                history.note(error)
            if isinstance(error, CollectiveError):
                _leave_soon(history)
            raise

    return trained


def _completed(func: Training[S, P, R], state: S, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a training function, and return when its last commit is complete on all hosts: the process may end then."""
    returned = func(state, *args, **kwargs)
    state.commits.settle()
    return returned


def _begin(state: ObjectState, history: _History | None) -> None:
    """Have all ranks go on from the newest commit, or else from rank 0's state."""
    begin = time.perf_counter()
    state.begin(Memory() if history is None else history.memory)
    restored, faults = state.commits.restore()
    for fault in faults if rank() == 0 else ():
        _log.warning("gradwire: %s", fault)
    if history is not None:
        history.begin(state.commits.host, 0 if restored is None else restored.number)
    if restored is None:
        state.sync()
        return
    try:
        state.take(restored)
    except (LookupError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"{here()}cannot resume from commit {restored.number}: {type(error).__name__}: {error}"
        ) from error
    state.on_reset()
    if rank() == 0:
        ranks = f"{size()} ranks" if restored.size == size() else f"{size()} instead of {restored.size} ranks"
        seconds = time.perf_counter() - begin
        said = "gradwire: training resumes from commit %d on %s, from %s, after %.2f s"
        _log.warning(said, restored.number, ranks, restored.source, seconds)


def _leave_soon(history: _History | None) -> None:
    """Have this process end within a second, whatever else would keep it, where it is going to be started again."""
    if history is not None:
        timer = threading.Timer(_LEAVE_S, os._exit, [1])
        timer.daemon = True
        timer.start()


class _History:
    """Counts how often ranks have failed at one commit, and keeps why, in files beside the commits of this host.

    number: tells apart what one job trains one after the other.
    """

    def __init__(self, agent: Agent, number: int, max_failures: int) -> None:
        self.memory = NamedMemory(agent, number)
        self._agent = agent
        self._max_failures = max_failures
        self._counts, self._reason = self.memory.path("failures"), self.memory.path("reason")

    def begin(self, host: tuple[int, ...], commit: int) -> None:
        """Note that ranks go on from a commit; host: those of this agent. Raises GaveUp on all ranks alike. Collective."""
        communicator = communicator_of(global_process_set)
        restarts = int(os.environ.get(_RESTARTS, "0"))
        before = json.loads(_read(self._counts) or '{"commit": 0, "restarts": 0, "failures": 0}')
        everyones = communicator.allgather_record([before, restarts, _read(self._reason)])
        has_failed = any(restarts > before["restarts"] for before, restarts, _ in everyones)
        failures = has_failed + max(before["failures"] * (before["commit"] == commit) for before, *_ in everyones)
        if rank() == host[0]:
            self._agent.watch()
            _write(self._counts, json.dumps({"commit": commit, "restarts": restarts, "failures": failures}))
            _write(self._reason, "")
        if failures >= self._max_failures:
            reasons = "; ".join(dict.fromkeys(reason for *_, reason in everyones if reason))
            since = f"since commit {commit}" if commit else "before the first commit"
            said = f"ranks have failed {failures} times {since}, and are not started again: {reasons or 'no rank reported why'}"
            if rank() == 0:
                _log.error("gradwire: %s", said)
            communicator.barrier()
            if rank() == host[0]:
                os.kill(self._agent.pid, signal.SIGTERM)
            raise GaveUp(here() + said)

    def note(self, error: Exception) -> None:
        """Keep why this rank has failed."""
        with suppress(OSError):
            _write(self._reason, f"{type(error).__name__}: {error}"[:_LONGEST_REASON])


def _read(path: Path) -> str:
    """Return the text of a file of this user; nothing where there is none."""
    with os.fdopen(open_own(path), encoding="utf-8") as file:
        return file.read()


def _write(path: Path, text: str) -> None:
    with os.fdopen(open_own(path), "w", encoding="utf-8") as file:
        file.write(text)
        file.truncate()
