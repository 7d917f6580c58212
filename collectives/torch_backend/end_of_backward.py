"""The end of backward(), at which DDP waits for the exchanges of its buckets."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import suppress
from types import FrameType

import torch

from gradwire.collectives import cores
from gradwire.collectives.communicator import Communicator
from gradwire.collectives.torch_backend.work import GradwireWork
from gradwire.collectives.torch_internals import (
    OUTSIDE_BACKWARD,
    called_by_accumulation,
    graph_task,
    when_backward_ends,
)


class EndOfBackward:
    """Runs the exchanges of DDP's buckets at the end of backward(), in the thread that called it, if no core is free for a
    thread that runs them beside backward().

    Only calls of C++ code that runs when a gradient is accumulated are delayed: those of DDP's reducer. Python code inside
    backward(), such as a hook, may wait for a future before backward() ends. DDP waits in a function that the engine calls at the
    end, which DDP registers after its last call of an exchange: so the functions of this object, which are registered in the
    calls, come before. In the first step with static_graph=True, DDP calls the exchanges at the end, and waits at once.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._latest: weakref.ref[_Waits] | None = None  # the engine keeps it until backward() ends or fails

    def concerns(self, verb: FrameType) -> bool:
        """Return whether to delay an exchange until backward() ends. verb: the frame of the method that torch has called."""
        communicator = self._communicator
        return (
            communicator.shares_memory
            and len(communicator.topology.hosts) == 1
            and called_by_accumulation(verb)
            and threading.current_thread() is threading.main_thread()  # others do not run what they wait for
            and cores.available() < communicator.size * (torch.get_num_threads() + 1)
        )

    def add(self, work: GradwireWork) -> None:
        """Wait for an operation when the running backward() ends. Let it begin in the background if backward() fails."""
        task = graph_task()
        waits = self._waits()
        if waits is None or waits.task != task:
            self.begin()
            waits = _Waits(task)
            when_backward_ends(waits)
            self._latest = weakref.ref(waits)
        waits.works.append(work)

    def begin(self) -> None:
        """Let the operations that wait for the end of backward() begin in the background. DDP may wait for them in a backward()
        inside of the one in which it called them, as reentrant checkpoints do."""
        if (waits := self._waits()) is not None:
            waits.begin()

    def _waits(self) -> _Waits | None:
        return None if self._latest is None else self._latest()


class _Waits:
    """Waits for the operations of one backward(), when the engine calls this object. If backward() fails, the engine only drops
    it."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.works: deque[GradwireWork] = deque()

    def __call__(self) -> None:
        self.task = OUTSIDE_BACKWARD  # what is called from now on needs another object
        while self.works:
            work = self.works.popleft()
            try:
                with suppress(Exception):  # DDP raises it
                    work.wait()
            finally:
                work.settle()

    def begin(self) -> None:
        """Let the operations begin in the background."""
        while self.works:
            self.works.popleft().settle()

    def __del__(self) -> None:
        self.begin()
