"""The general loop, which runs a Program by one message after the other."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gradwire.collectives.reduction import COMBINE, Combine
from gradwire.collectives.schedules.program import Instruction, Kind, Program
from gradwire.collectives.torch_internals import plain

if TYPE_CHECKING:
    from gradwire.collectives.transports.base import Message, Operation, Pending, Run, Transport


def prepare(transport: Transport, operation: Operation) -> Run:
    """Return what runs an operation's program on any transport; see Transport.prepare."""
    program, combine = operation.program, COMBINE[operation.op]
    assert program is not None
    crosses = operation.device_type not in transport.capabilities.device_types

    def run(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
        landing = flat(destination)
        given = landing if source is destination else flat(source)
        payload: Payload = Numbers(program, given, landing, combine, transport.rank, transport.scratch)
        if crosses:
            payload = transport.crossed(payload)
        execute(program, payload, transport, tag=tag, deadline=deadline)

    def run_codes(source: Any, _: Any, tag: int, deadline: float) -> None:
        execute(program, source, transport, tag=tag, deadline=deadline)

    return run if operation.codes is None else run_codes


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
    arriving: dict[int, Instruction] = {}
    trace, traced, ends = transport.trace, list[Instruction](), list[int]()
    began_ns = time.perf_counter_ns()
    for instruction in program:
        kind, peer, offset, length, place, number, segment, _ = instruction
        if kind == Kind.WAIT:
            in_flight.pop(number).wait(deadline)
            if number in arriving:
                payload.arrived(arriving.pop(number))
        elif kind == Kind.SEND:
            sends.append((peer, payload.outgoing(offset, length, place)))
            sent_numbers.append(number)
        elif kind == Kind.RECEIVE:
            receives.append((peer, payload.landing(offset, length, place)))
            received_numbers.append(number)
            arriving[number] = instruction
        elif kind == Kind.POST:
            payload.before_post(deadline)
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
    """Memory that is kept between calls: a growing tensor per device. That of a GPU belongs to the communication stream, on which
    all operations of a Communicator use it one after the other."""

    def __init__(self) -> None:
        self._held: dict[torch.device, torch.Tensor] = {}

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return a uint8 tensor of nbytes on a device, valid until the next call."""
        held = self._held.get(device)
        if held is None or held.numel() < nbytes:
            held = self._held[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return held[:nbytes]


class Payload(ABC):
    """The numbers on which a Program works. offset, length and scratch are those of an Instruction. wire_bytes: the bytes of a
    message of so many elements."""

    wire_bytes: Callable[[int], int]

    @abstractmethod
    def outgoing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        """Return the tensor that a message sends, once before_post() has returned."""

    @abstractmethod
    def landing(self, offset: int, length: int, scratch: int) -> torch.Tensor:
        """Return the tensor that a message fills."""

    @abstractmethod
    def work(self, instruction: Instruction) -> None:
        """Execute an instruction that moves no message."""

    def before_post(self, deadline: float) -> None:  # noqa: B027  # most have nothing to do here
        """Make the tensors of outgoing() ready: messages are about to be posted. Raises LinkError at the deadline."""

    def arrived(self, receive: Instruction) -> None:  # noqa: B027
        """Note that the tensor of landing() is filled."""


class Numbers(Payload):
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
