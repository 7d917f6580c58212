"""A message that stands in a table of rows, which a kernel moves: what its sender or receiver waits for."""

from __future__ import annotations

from typing import Protocol

import torch


class Table(Protocol):
    """What has posted messages, and counts them."""

    def finish(self, number: int, deadline: float) -> None:
        """Return when message `number` of those posted is done; the others move along. Raises as Pending.wait."""

    def is_done(self, number: int) -> bool:
        """Return whether message `number` of those posted is done, after all have been moved as far as can be at once."""


class RowPending:
    """A Pending of a Table."""

    __slots__ = ("_number", "_table", "_tensor")

    def __init__(self, table: Table, number: int, tensor: torch.Tensor) -> None:
        self._table = table
        self._number = number
        self._tensor = tensor  # read or written until the wait is over

    def wait(self, deadline: float) -> None:
        """See Pending."""
        self._table.finish(self._number, deadline)

    def is_done(self) -> bool:
        """See Pending."""
        return self._table.is_done(self._number)
