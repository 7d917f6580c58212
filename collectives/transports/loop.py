"""The general loop, which runs a Program by one message after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from gradwire.collectives.reduction import COMBINE, Combine
from gradwire.collectives.schedules.program import Instruction, Kind, Program
from gradwire.collectives.torch_internals import plain

if TYPE_CHECKING:
    from gradwire.collectives.transports.base import Message, Operation, Pending, Run, Transport


def prepare(transport: Transport, operation: Operation) -> Run:
    """Return what runs an operation's program on any transport; see Transport.prepare."""
    program, codes, combine = operation.program, operation.codes, COMBINE[operation.op]
    assert program is not None

    def run(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
        payload: Payload
        if codes is None:
            landing = flat(destination)
            given = landing if source is destination else flat(source)
            payload = Numbers(program, given, landing, combine, transport.rank, transport.scratch)
        else:
            payload = codes
        execute(program, payload, transport, tag=tag, deadline=deadline)

    return run


def execute(program: Program, payload: Payload, transport: Transport, *, tag: int, deadline: float) -> None:
    """Run a program: the transport moves the messages, and the payload supplies the tensors that they send and fill.

    Segment i uses the tag `tag + i`, so that its receives can be posted early. deadline: time.monotonic() seconds. Raises
    LinkError.
    """
    in_flight: dict[int, Pending] = {}
    sends: list[Message] = []
    receives: list[Message] = []
    sent_numbers: list[int] = []
    received_numbers: list[int] = []
    trace, traced, ends = transport.trace, list[Instruction](), list[int]()
    began_ns = time.perf_counter_ns()
    for instruction in program:
        kind, peer, offset, length, place, number, segment, _ = instruction
        if kind == Kind.WAIT:
            in_flight.pop(number).wait(deadline)
        elif kind == Kind.SEND:
            sends.append((peer, payload.outgoing(offset, length, place)))
            sent_numbers.append(number)
        elif kind == Kind.RECEIVE:
            receives.append((peer, payload.landing(offset, length, place)))
            received_numbers.append(number)
        elif kind == Kind.POST:
            sent, received = transport.post(sends, receives, tag + segment)
            in_flight.update(zip(sent_numbers, sent, strict=True))
            in_flight.update(zip(received_numbers, received, strict=True))
            sends, receives, sent_numbers, received_numbers = [], [], [], []
        else:
            payload.work(instruction)
        if trace is not None:
            traced.append(instruction)
            ends.append(time.perf_counter_ns())
    if trace is not None:
        trace(traced, payload.wire_bytes, began_ns, ends)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a 1-D tensor without autograd history."""
    return plain(tensor).as_strided((tensor.numel(),), (1,))  # view(-1) would keep the stride of a single element


class Scratch:
    """Memory that is kept between calls: a growing tensor per device."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, bool], torch.Tensor] = {}

    def take(self, nbytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
        """Return a uint8 tensor of nbytes on a device, or with pinned=True in pinned host memory; valid until the next
        call."""
        held = self._held.get((device, pinned))
        if held is None or held.numel() < nbytes:
            where = torch.device("cpu") if pinned else device
            held = torch.empty(nbytes, dtype=torch.uint8, device=where, pin_memory=pinned)
            self._held[device, pinned] = held
        return held[:nbytes]


class Payload(Protocol):
    """The numbers on which a Program works. offset, length and scratch are those of an Instruction. wire_bytes: the bytes of a
    message of so many elements."""

    wire_bytes: Callable[[int], int]

    def outgoing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        """Return the tensor that a message sends."""

    def landing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        """Return the tensor that a message fills."""

    def work(self, instruction: Instruction) -> None:
        """Execute an instruction that moves no message."""


class Numbers:
    """Plain numbers: sends read `source`, receives and reductions write `destination`, usually the same 1-D tensor."""

    def __init__(
        self,
        program: Program,
        source: torch.Tensor,
        destination: torch.Tensor,
        combine: Combine,
        rank: int,
        scratch: Scratch,
    ) -> None:
        self._source, self._destination, self._combine, self._rank = source, destination, combine, rank
        memory = scratch.take(program.scratch * destination.element_size(), destination.device)
        self._memory = memory.view(destination.dtype)
        self.wire_bytes = destination.element_size().__mul__

    def outgoing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        return self._source[offset : offset + length]

    def landing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        if scratch < 0:
            return self._destination[offset : offset + length]
        return self._memory[scratch : scratch + length]

    def work(self, instruction: Instruction) -> None:
        """Reduce with the numbers of the lower rank first, so that both ranks of a pair get the same bits."""
        _, peer, offset, length, scratch, _, _, _ = instruction
        mine, theirs = self._destination[offset : offset + length], self._memory[scratch : scratch + length]
        first, second = (mine, theirs) if self._rank < peer else (theirs, mine)
        self._combine(first, second, out=mine)
