"""Operations that are checked and planned once, and run many times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from gradwire.collectives.engine.buffers import kept
from gradwire.collectives.engine.operations import Turn, digest
from gradwire.collectives.engine.work import Work
from gradwire.collectives.transports.base import Whole

if TYPE_CHECKING:
    from gradwire.collectives.engine.engine import Engine


class PreparedOperation:
    """Runs one operation repeatedly on a tensor that keeps its memory. Communicator.prepare_allreduce returns this object.

    Calling the object runs the operation in place. start() runs it in the background; wait() of this object, or of the Work
    that start() returns, waits for it. Do not use the tensor until wait() has returned. Every run counts as a call of the verb:
    all ranks must run the same operations in the same order, prepared or not, and the errors are those of the verb. (MPI 4.0,
    2021, section 6.12: persistent collectives.)
    """

    def __init__(
        self, engine: Engine, tensor: torch.Tensor, call: str, body: Callable[[Turn], None], whole: Whole | None
    ) -> None:
        self._engine = engine
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self._numel = tensor.numel()
        self._call = call
        self._digest = digest(call)
        self._body = body
        self._whole = whole.run if whole is not None and engine.takes_as_is(tensor, whole) else None
        self._own = kept(tensor)
        self._work: Work | None = None

    def __call__(self) -> None:
        """Run the operation, and wait for it. Raises RuntimeError if it is running already or the tensor has moved to
        other memory, and otherwise the errors of the verb."""
        tensor = self._tensor
        self._check()
        if self._whole is not None and self._engine.run_now(self._call, self._digest, self._whole, tensor, tensor):
            return
        self._engine.submit(self._call, self._body, async_op=False)

    def start(self) -> Work:
        """Run the operation in the background. Raises RuntimeError if it is running already, or if the tensor has
        moved to other memory."""
        self._check()
        body = self._body if self._whole is None or self._engine.lane is not None else self._run
        self._work = self._engine.submit(self._call, body, async_op=True)
        return self._work

    def _run(self, turn: Turn) -> None:
        assert self._whole is not None
        self._whole(self._own, self._own, turn.tag, turn.deadline)

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Wait for the operation that start() began. timeout and errors: see Work.wait. Raises RuntimeError before start()."""
        if self._work is None:
            raise RuntimeError(f"rank {self._engine.rank}: {self._call}: wait() before start()")
        self._work.wait(timeout)
        self._work = None

    def _check(self) -> None:
        if self._work is not None and not self._work.is_completed():
            raise RuntimeError(f"rank {self._engine.rank}: {self._call}: it is still running: call wait() first")
        if self._tensor.data_ptr() != self._address or self._tensor.numel() != self._numel:
            raise RuntimeError(
                f"rank {self._engine.rank}: {self._call}: the tensor has other memory than when it was prepared"
            )
