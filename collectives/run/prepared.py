"""Operations whose arguments are checked, and whose plan is made, once for many runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from gradwire.collectives.link.base import Whole
from gradwire.collectives.run.operations import Turn, digest
from gradwire.collectives.run.work import Work

if TYPE_CHECKING:
    from gradwire.collectives.run.engine import Engine


class PreparedOperation:
    """Runs an operation on a tensor that keeps its memory, as often as it is called. Communicator.prepare_allreduce returns
    it.

    A call runs it, in place. start() starts it in the background, and wait() waits for it, as does the Work that start()
    returns; until then the tensor belongs to the operation. Every run counts as a call of the verb: all ranks run the same
    operations in the same order, prepared or not, and the errors are those of the verb. (MPI 4.0, 2021, section 6.12:
    persistent collectives.)

    whole: what the link has made ready, if that is the whole operation.
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
        self._work: Work | None = None

    def __call__(self) -> None:
        """Run it, and return when it is done. Raises RuntimeError while it runs already, and what the verb raises."""
        tensor = self._tensor
        self._check()
        if self._whole is not None and self._engine.run_now(self._call, self._digest, self._whole, tensor, tensor):
            return
        self._engine.submit(self._call, self._body, async_op=False)

    def start(self) -> Work:
        """Begin it in the background. Raises RuntimeError while it runs."""
        self._check()
        self._work = self._engine.submit(self._call, self._body, async_op=True)
        assert self._work is not None
        return self._work

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Return when what start() began is done. timeout: as of Work.wait, and raises the same; RuntimeError before start()."""
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
