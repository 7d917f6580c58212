"""A table of posted messages, which kernels move, and handles that wait for messages and keep their tensors alive."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.collectives.link.base import Message, Pending, Posted, Transport


@dataclass(eq=False, slots=True)
class RowPending:
    """A message of a Table, by its number. tensor: a kernel may read or write it until the message is done."""

    table: Table
    number: int
    tensor: torch.Tensor

    def wait(self, deadline: float) -> None:
        self.table.finish(self.number, deadline)
        self.table.pending.pop(self.number, None)

    def is_done(self) -> bool:
        self.table.progress()
        return self.table.is_done(self.number)


class Table(Transport):
    """A Transport whose posted messages have one row each in a table. From time to time, unfinished messages get new
    numbers, greater than all earlier ones, so that the rows of finished messages become free. pending: the messages
    that may be unfinished, by number."""

    def __init__(self) -> None:
        self.pending: dict[int, RowPending] = {}

    @abstractmethod
    def finish(self, number: int, deadline: float) -> None:
        """Wait until a message is done; all other messages move meanwhile. Raises as Pending.wait."""

    @abstractmethod
    def is_done(self, number: int) -> bool:
        """Return whether a message is done."""

    @abstractmethod
    def _add(self, sends: int, peer: int, tensor: torch.Tensor, tag: int) -> int:
        """Add a message to the table; return its number. sends: 1 for a send, 0 for a receive."""

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        received = [self._hold(0, peer, tensor, tag) for peer, tensor in receives]
        sent = [self._hold(1, peer, tensor, tag) for peer, tensor in sends]
        if sent:
            self.progress()
        return sent, received

    def _hold(self, sends: int, peer: int, tensor: torch.Tensor, tag: int) -> Pending:
        number = self._add(sends, peer, tensor, tag)
        self.pending[number] = made = RowPending(self, number, tensor)
        return made

    def _renumber(self, new: dict[int, int]) -> None:
        """Change the numbers of messages. new: by old number, without the messages that are done, which are dropped."""
        self.pending = {new[number]: each for number, each in self.pending.items() if number in new}
        for number, each in self.pending.items():
            each.number = number
