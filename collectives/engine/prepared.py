"""Calls that are checked and planned once, and run any number of times."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from gradwire.collectives.engine.buffers import kept
from gradwire.collectives.engine.work import Work
from gradwire.collectives.torch_internals import uncompiled

if TYPE_CHECKING:
    from gradwire.collectives.engine.engine import Engine


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """A call of a verb, ready to run: the first call, later ones, synchronous or not, run this object.

    text: what must be equal on all ranks. signature: the part of the text that decides whether the call is known to the other
    ranks. run: (source, destination, tag, deadline), with what the verb gives to Engine.run as source and destination; tag and
    deadline as in transports.base.Run. direct: the same for tensors that need neither a check nor a copy, see Engine.call().
    notes: what a timeline shows of the call, by name. digest: a hash of the text.

    devices: the GPUs of the call's tensors. begin: for a call that computes on them what a transport of CPU tensors moves: it
    enqueues what precedes the first message, and returns what runs the rest, (tag, deadline) -> None. None if such a transport
    moves copies of the tensors.
    """

    text: str
    signature: str
    run: Callable[[Any, Any, int, float], None]
    direct: Callable[[Any, Any, int, float], None] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    digest: int = -1
    devices: tuple[torch.device, ...] = ()
    begin: Callable[[Any, Any], Callable[[int, float], None]] | None = None

    def __post_init__(self) -> None:
        if self.digest < 0:
            object.__setattr__(self, "digest", zlib.crc32(self.text.encode()))


class PreparedOperation:
    """Runs one operation repeatedly on a tensor that keeps its memory. Communicator.prepare_allreduce returns this object.

    Calling the object runs the operation in place. start() runs it in the background; wait() of this object, or of the Work
    that start() returns, waits for it. Do not use the tensor until wait() has returned. Every run counts as a call of the verb:
    all ranks must run the same operations in the same order, prepared or not, and the errors are those of the verb. (MPI 4.0,
    2021, section 6.12: persistent collectives.)
    """

    @uncompiled
    def __init__(self, engine: Engine, tensor: torch.Tensor, call: PreparedCall) -> None:
        self._engine = engine
        self._tensor = tensor
        self._place = tensor.data_ptr(), tensor.numel()
        self._call = call
        self._own = kept(tensor)
        self._direct = engine.likes(tensor) is not None
        self._work: Work | None = None

    @uncompiled
    def __call__(self) -> None:
        """Run the operation, and wait for it. Raises RuntimeError if it is running already or the tensor has moved to
        other memory, and otherwise the errors of the verb."""
        self._check()
        self._engine.run(self._call, self._own, self._own, direct=self._direct)

    @uncompiled
    def start(self, *, awaited: bool = False) -> Work:
        """Run the operation in the background. awaited: whether the caller waits for it next, so no thread wakes up for it: the
        wait() then runs it, unless begin() of the Work is called before. Raises RuntimeError if the operation is running
        already, or if the tensor has moved to other memory."""
        self._check()
        self._work = self._engine.run(
            self._call, self._own, self._own, direct=self._direct, async_op=True, awaited=awaited
        )
        return self._work

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Wait for the operation that start() began. timeout and errors: see Work.wait. Raises RuntimeError before start()."""
        if self._work is None:
            raise RuntimeError(f"rank {self._engine.rank}: {self._call.text}: wait() before start()")
        self._work.wait(timeout)
        self._work = None

    def _check(self) -> None:
        if self._work is not None and not self._work.is_over:  # on a GPU, runs follow each other on one stream
            raise RuntimeError(f"rank {self._engine.rank}: {self._call.text}: it is still running: call wait() first")
        if (self._tensor.data_ptr(), self._tensor.numel()) != self._place:
            raise RuntimeError(
                f"rank {self._engine.rank}: {self._call.text}: the tensor has other memory than when it was prepared"
            )
