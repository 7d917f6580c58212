"""Messages that stand in a table of rows, which kernels move: their tensors, and what their senders and receivers wait for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.collectives.link.base import Message, Pending, Posted, Transport

#: After how many messages at least a table is looked through.
FIRST_LOOK = 256


@dataclass(eq=False, slots=True)
class RowPending:
    """A message of a Table, by the number that it had when it was posted."""

    table: Table
    number: int

    def wait(self, deadline: float) -> None:
        self.table.finish(self.number, deadline)

    def is_done(self) -> bool:
        self.table.nudge()
        return self.table.is_done(self.number)


class Table(Transport):
    """A Transport whose messages have a row each. It keeps their tensors for as long as a kernel may read or write them, and lets
    no message that stays for long keep the rows of others: now and then all that are not done are posted anew, and have new
    numbers from then on."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._renumbered: dict[int, int] = {}

    @abstractmethod
    def finish(self, number: int, deadline: float) -> None:
        """Return when a message is done; the others move along. Raises as Pending.wait."""

    @abstractmethod
    def is_done(self, number: int) -> bool:
        """Return whether a message is done."""

    @abstractmethod
    def _add(self, sends: int, peer: int, tensor: torch.Tensor, tag: int) -> RowPending:
        """Put a message into the table, and hold() its tensor. sends: 1 where it is sent, 0 where it is received."""

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        received: list[Pending] = [self._add(0, peer, tensor, tag) for peer, tensor in receives]
        sent: list[Pending] = [self._add(1, peer, tensor, tag) for peer, tensor in sends]
        if sent:
            self.nudge()
        return sent, received

    def hold(self, number: int, tensor: torch.Tensor) -> RowPending:
        """Keep the tensor of a message that has been posted; return its Pending."""
        self._tensors[number] = tensor
        return RowPending(self, number)

    def _renumber(self, new: dict[int, int]) -> None:
        """Note that messages have new numbers, and that all others are done."""
        self._renumbered = {old: new[now] for old in self._renumbered if (now := self._now(old)) in new} | new
        self._tensors = {new[old]: tensor for old, tensor in self._tensors.items() if old in new}

    def _now(self, number: int) -> int:
        """Return the present number of a message."""
        while number in self._renumbered:
            number = self._renumbered[number]
        return number

    def _release(self, number: int) -> None:
        """Let go of a message that is done."""
        while number in self._renumbered:
            number = self._renumbered.pop(number)
        self._tensors.pop(number, None)
