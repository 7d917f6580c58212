"""A table of requests, the posted messages that kernels move, and handles that wait for them and keep their tensors alive."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import Protocol

import numpy as np
import torch

from gradwire.collectives.errors import LinkError
from gradwire.collectives.transports.base import Message, Pending, Posted, Transport

_FIRST_ROWS = 256

#: After how many messages, at the earliest, the unfinished ones are renumbered.
FIRST_LOOK = 256


class Unfinished(IntEnum):
    """What is unfinished of the messages that move only while this rank calls its transport."""

    NOTHING = 0
    RECEIVES = 1
    SENDS = 2


class Listening(Protocol):
    """The part of a Transport that a receive from any rank needs."""

    def next_sender(self, tag: int, deadline: float) -> int | None:
        """Wait until the next message of some rank has this tag, and return that rank; None when the deadline passes. The
        message is not received yet. The rank that was returned last is checked last. Raises LinkError."""

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        """See Transport."""


class FromAny:
    """A receive from any rank. sender: the rank whose message fills the tensor; None until it is known."""

    def __init__(self, transport: Listening, tensor: torch.Tensor, tag: int) -> None:
        self._transport, self._tensor, self._tag = transport, tensor, tag
        self.sender: int | None = None
        self._pending: Pending | None = None

    def wait(self, deadline: float) -> None:
        if not self._look(deadline):
            raise LinkError(None, timed_out=True, detail="received nothing from any rank")
        assert self._pending is not None
        self._pending.wait(deadline)

    def is_done(self) -> bool:
        return self._look(time.monotonic()) and self._pending is not None and self._pending.is_done()

    def _look(self, deadline: float) -> bool:
        """Return whether the sender is known by the deadline."""
        if self._pending is None and (peer := self._transport.next_sender(self._tag, deadline)) is not None:
            (self._pending,) = self._transport.post([], [(peer, self._tensor)], self._tag)[1]
            self.sender = peer
        return self._pending is not None


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
        self.table.move()
        if is_done := self.table.is_done(self.number):
            self.table.pending.pop(self.number, None)
        return is_done


class Table(Transport):
    """A Transport whose posted messages have one row each in a table. From time to time, unfinished messages get new
    numbers, greater than all earlier ones, so that kernels do not scan the rows of finished ones.

    kernels: the module of the kernels. context: the fields that they share with this process. running: a thread holds it
    while it calls kernels. pending: the messages that may be unfinished, by number.
    """

    def __init__(self, kernels: ModuleType, context: np.ndarray, running: threading.Lock) -> None:
        self.kernels = kernels
        self.running = running
        self.context = context
        self.context_address: int = context.ctypes.data
        self.pending: dict[int, RowPending] = {}
        self._rows = np.zeros((_FIRST_ROWS, kernels.ROW_FIELDS), dtype=np.int64)
        self._tidy_at = FIRST_LOOK  # number of the message before which tidy() renumbers
        context[kernels.ROWS], context[kernels.CAPACITY] = self._rows.ctypes.data, _FIRST_ROWS

    @abstractmethod
    def begin(self) -> None:
        """Prepare the table for calls of kernels, while this thread holds `running`. Raises LinkError if the link is closed."""

    @abstractmethod
    def check(self, status: int, deadline: float, lost: set[int]) -> set[int]:
        """Raise LinkError if the result of a kernel is an error, or if the deadline has passed. Otherwise return what to pass
        as `lost` after the next call of the kernel."""

    @abstractmethod
    def finish(self, number: int, deadline: float) -> None:
        """Wait until a message is done; all other messages move meanwhile. Raises as Pending.wait."""

    @abstractmethod
    def place(self, peer: int) -> int:
        """Return the number that a rank has in the link."""

    @abstractmethod
    def move(self) -> None:
        """Move posted messages as far as possible without waiting. Raises LinkError."""

    @abstractmethod
    def next_sender(self, tag: int, deadline: float) -> int | None:
        """See Listening."""

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        received = [self._received(peer, tensor, tag) for peer, tensor in receives]
        sent = [self._hold(1, peer, tensor, tag) for peer, tensor in sends if peer is not None]
        if sent:
            self.move()
        return sent, received

    def progress(self) -> Unfinished:
        """Move posted messages as far as possible without waiting, and return what is unfinished then. Raises LinkError."""
        self.move()
        kernels, rows = self.kernels, self._rows[self._unfinished() % len(self._rows)]
        if not len(rows):
            return Unfinished.NOTHING
        unsent = rows[:, kernels.ROW_MOVED] < rows[:, kernels.ROW_NBYTES]
        is_sending = np.any((rows[:, kernels.ROW_SENDS] == 1) & unsent)
        return Unfinished.SENDS if is_sending else Unfinished.RECEIVES

    def is_done(self, number: int) -> bool:
        """Return whether a message is done."""
        kernels = self.kernels
        return number < self.context[kernels.FIRST] or bool(self._rows[number % len(self._rows), kernels.ROW_DONE])

    def tidy(self) -> None:
        """Give unfinished messages new numbers, from time to time. The calling thread must hold `running`."""
        if self.context[self.kernels.COUNT] >= self._tidy_at:
            self._move_up()

    def _move_up(self) -> None:
        """Give unfinished messages new numbers, and their rows the places of these."""
        kernels, context, rows = self.kernels, self.context, self._rows
        count = int(context[kernels.COUNT])
        stay = self._unfinished()
        numbers = np.arange(count, count + len(stay))
        rows[numbers % len(rows)] = rows[stay % len(rows)]
        context[kernels.FIRST], context[kernels.COUNT] = count, count + len(stay)
        self._renumber(dict(zip(stay.tolist(), numbers.tolist(), strict=True)))
        self._tidy_at = count + len(stay) + max(FIRST_LOOK, 2 * len(stay))

    def grow(self) -> None:
        """Double the number of rows in the table. This thread holds `running`."""
        kernels, context = self.kernels, self.context
        old, numbers = self._rows, np.arange(context[kernels.FIRST], context[kernels.COUNT])
        self._rows = np.zeros((2 * len(old), kernels.ROW_FIELDS), dtype=np.int64)
        self._rows[numbers % len(self._rows)] = old[numbers % len(old)]
        context[kernels.ROWS], context[kernels.CAPACITY] = self._rows.ctypes.data, len(self._rows)

    def _received(self, peer: int | None, tensor: torch.Tensor, tag: int) -> Pending:
        return FromAny(self, tensor, tag) if peer is None else self._hold(0, peer, tensor, tag)

    def _hold(self, sends: int, peer: int, tensor: torch.Tensor, tag: int) -> Pending:
        kernels, nbytes = self.kernels, tensor.numel() * tensor.element_size()
        with self.running:
            self.begin()
            arguments = (self.context_address, sends, self.place(peer), tag, tensor.data_ptr(), nbytes)
            while kernels.add(*arguments) == kernels.FULL:
                if len(self._unfinished()) > len(self._rows) // 2:
                    self.grow()
                else:
                    self._move_up()
            number = int(self.context[kernels.COUNT]) - 1
            self.pending[number] = made = RowPending(self, number, tensor)
        return made

    def _unfinished(self) -> np.ndarray:
        """Return the numbers of messages that are not done."""
        kernels, context = self.kernels, self.context
        numbers = np.arange(context[kernels.FIRST], context[kernels.COUNT])
        unfinished: np.ndarray = numbers[self._rows[numbers % len(self._rows), kernels.ROW_DONE] == 0]
        return unfinished

    def _renumber(self, new: dict[int, int]) -> None:
        """Change the numbers of messages. new: by old number, without the messages that are done, which are dropped."""
        self.pending = {new[number]: each for number, each in self.pending.items() if number in new}
        for number, each in self.pending.items():
            each.number = number
