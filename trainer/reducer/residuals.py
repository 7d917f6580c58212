"""The residuals of error feedback, while no buffer holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from gradwire.trainer.reducer.buffers import CodedBuffer, Exported


class Residuals:
    """Keeps the residuals of parameters while buffers are replaced, and of parameters whose buffer has no error feedback.
    Parameters are identified by their index.

    exported: by parameter, what CodedBuffer.export() has returned, the same on all ranks. A buffer with error feedback imports
    it; the gradients of a buffer without add it. The residuals that only this rank keeps, of export_local(), are added to the
    next gradients of this rank.
    """

    def __init__(self) -> None:
        self.exported: dict[int, Exported] = {}
        self._local: dict[int, Tensor] = {}

    def export(self, buffer: CodedBuffer) -> None:
        """Keep the residuals and the codec's states of a buffer that will be replaced. Collective."""
        self.exported |= {index: each for index, each in zip(buffer.items, buffer.export(), strict=True) if each}

    def export_local(self, buffer: CodedBuffer) -> None:
        """Keep this rank's residuals of a buffer that will be replaced. Sends nothing."""
        if buffer.with_feedback:
            residual = buffer.residual() * buffer.combination.predivide
            self._local |= {index: residual[span] for index, span in zip(buffer.items, buffer.spans, strict=True)}

    def import_into(self, buffer: CodedBuffer) -> None:
        """Add the exported residuals of a buffer's parameters to the buffer, if it has error feedback. Sends nothing."""
        for slot, index in enumerate(buffer.items):
            if index in self.exported and buffer.add_exported(slot, self.exported[index]):
                del self.exported[index]

    def add_to(self, gradients: Mapping[int, Tensor], share: float) -> bool:
        """Add all residuals of these parameters to this rank's gradients, of any shape. Return whether there were any. share:
        Combination.share."""
        found = False
        for index in gradients.keys() & (self.exported.keys() | self._local.keys()):
            gradient, found = gradients[index], True
            if index in self.exported:
                residual = self.exported.pop(index)["residual"]
                gradient.add_(residual.to(gradient.device).view(gradient.shape), alpha=share)
            if index in self._local:
                gradient.add_(self._local.pop(index).to(gradient.device).view(gradient.shape))
        return found

    def discard(self, parameters: Iterable[int]) -> None:
        """Discard the residuals of these parameters."""
        for index in parameters:
            self.exported.pop(index, None)
            self._local.pop(index, None)

    def replace(self, exported: Mapping[int, Exported]) -> None:
        """Discard all residuals, and keep these."""
        self.exported, self._local = dict(exported), {}

    @property
    def has_local(self) -> bool:
        """Return whether there are residuals that only this rank keeps, which no state_dict() contains."""
        return bool(self._local)

    def __bool__(self) -> bool:
        return bool(self.exported or self._local)
