"""The door to a transport: a Transport prepares operations, and moves messages between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import torch

from gradwire.collectives.kernels.layout import KIND_BITS as KIND_BITS  # links and messages import both from here
from gradwire.collectives.kernels.layout import Coding as Coding
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.transports import loop
from gradwire.collectives.transports.crossing import Crossed, SideStreams

#: Seconds between two checks whether a message is done, where nothing wakes the thread that waits for it.
DONE_POLL_S = 0.0005

#: One message: the other rank, and the contiguous 1-D tensor that is sent or filled. A receive from None takes the first message
#: of any rank.
Message = tuple[int | None, torch.Tensor]


class Pending(Protocol):
    """A posted message. One that was received from any rank has an attribute `sender`."""

    def wait(self, deadline: float) -> None:
        """Wait until the tensor is filled (received), or may be changed (sent). deadline: time.monotonic() seconds.

        Raises LinkError when the connection breaks or the deadline passes.
        """

    def is_done(self) -> bool:
        """Move messages as far as possible without waiting; return whether wait() would return, or raise, at once."""


#: One Pending for each send, and one for each receive.
Posted = tuple[list[Pending], list[Pending]]

#: (source, destination, tag, deadline) -> None: runs a prepared operation. tag: 30 bits, equal on ranks that run the same
#: operation, and different otherwise. deadline: time.monotonic() seconds. Raises LinkError. With CUDA tensors that the transport
#: moves itself, the run enqueues everything on the current streams, and the host waits for nothing but connections.
Run = Callable[[Any, Any, int, float], None]

#: (tensors, tag, deadline) -> None: runs a prepared operation on each tensor in place, as one group. tag, deadline: see Run.
GroupRun = Callable[[Sequence[torch.Tensor], int, float], None]


#: Records a run of a program: its instructions, the bytes of a message of so many elements, the time at which the run began, and
#: the times at which the instructions ended, in nanoseconds of time.perf_counter_ns().
Trace = Callable[[Iterable[Sequence[int]], Callable[[int], int], int, Sequence[int]], None]


class CodedWork(Protocol):
    """How the codes of a CodedProgram are made. compiles: whether a compiled loop can make them. wire_bytes: the length of the
    code of so many numbers."""

    compiles: bool
    wire_bytes: Callable[[int], int]


class CodedNumbers(Protocol):
    """The numbers of one run of a CodedProgram, which also are a loop.Payload."""

    def coding(self) -> Coding:
        """Return what a compiled loop needs, if it can do the work. The addresses are valid until the run ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A collective operation on buffers of one dtype and device, for Transport.prepare.

    A *source* and a *destination* are contiguous. The user may own them, so a CPU tensor may have any shape, and may require
    gradients. allreduce, broadcast and reduce get the same tensor twice; reduce may overwrite it on any rank. gather and scatter
    get an empty tensor for the parts on ranks other than the root. barrier gets an empty tensor, or on a GPU a zero. allgather's
    source may be this rank's part of its destination. An operation with a program gets what the program reads and writes,
    usually one buffer; with codes, it gets the CodedNumbers of the run as both.
    """

    verb: str
    #: Of a schedule, or one of Capabilities.algorithms.
    algorithm: str
    #: Of both buffers; bool travels as uint8.
    dtype: torch.dtype
    device_type: str
    #: Elements of the source.
    numel: int
    #: 'sum', 'average', 'min', 'max' or 'product'. A program does not divide: its op is never 'average'.
    op: str = "sum"
    #: Of broadcast, reduce, gather and scatter.
    root: int = 0
    #: For alltoall, reduce_scatter (only outgoing) and allgather (only incoming): the elements sent to, and received from, each
    #: rank. Without them, the parts of all ranks have equal lengths.
    outgoing: tuple[int, ...] = ()
    incoming: tuple[int, ...] = ()
    #: What all ranks follow; None for an algorithm that the transport runs by itself.
    program: Program | None = None
    #: How the codes are made that the program moves; None for plain numbers.
    codes: CodedWork | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do."""

    #: The device types whose tensors it moves. Without "cuda", CUDA tensors are copied through pinned memory.
    device_types: tuple[str, ...] = ("cpu",)
    #: The device types for which both ends of a message must be posted in the same round, as NCCL requires.
    posts_together: tuple[str, ...] = ()
    #: Whether this rank shares memory with others of its host.
    shares_memory: bool = False
    #: Whether a message costs microseconds, without the thread wake-ups of a backend.
    quick: bool = False
    #: Whether a send may finish before its receiver has posted the receive, so that programs must end with an answer.
    eager: bool = False
    #: Whether Ctrl-C ends a wait of the main thread before its deadline.
    interruptible: bool = False
    #: Whether a receive from None is possible.
    receives_from_any: bool = False
    #: Whether wait() may be called again after its deadline has passed.
    waits_again: bool = False
    #: By verb, the algorithms that prepare() takes without a program.
    algorithms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: By verb, the one of these that 'auto' selects for every size.
    preferred: Mapping[str, str] = field(default_factory=dict)
    #: The same for CUDA tensors, if the transport moves these itself. Such an algorithm takes parts of different lengths.
    #: For an allreduce, it also runs the verbs reduce_shares and gather_shares in place, on shares of equal lengths, except that
    #: of the last rank, which also has the rest of a division by the number of ranks.
    preferred_on_gpu: Mapping[str, str] = field(default_factory=dict)
    #: The allreduce algorithms that the verbs reduce_shares and gather_shares run in halves, in place: the buffer is cut at
    #: multiples of so many bytes into one share per rank, in rank order and of near-equal length, as by spans.split_aligned.
    share_alignment_bytes: Mapping[str, int] = field(default_factory=dict)


class Transport(ABC):
    """Connects the ranks of one Communicator.

    Messages from one rank to another with the same tag arrive in the order sent. A message is never received under another tag
    (except by NCCL, which has no tags).

    routes: lines of text: which ranks this rank reaches by which connection, and why. trace: called after each run of a program;
    None while nothing is recorded.
    """

    rank: int
    size: int
    capabilities: Capabilities = Capabilities()
    routes: tuple[str, ...] = ()
    trace: Trace | None = None

    def prepare(self, operation: Operation) -> Run:
        """Return a function that runs an operation, any number of times. Not a collective call; no deadline runs yet, so
        what must be compiled is compiled here.

        A transport that can run an operation better than by one message after the other overrides this."""
        if operation.program is None:
            verb, name = operation.verb, operation.algorithm
            raise NotImplementedError(f"{type(self).__name__} has no {verb} algorithm {name!r} of its own")
        return loop.prepare(self, operation)

    def prepare_group(self, operation: Operation) -> GroupRun | None:
        """Return a function that runs an allreduce without a program on several tensors as one group; None if the transport runs
        it only on all the numbers in one buffer. operation: with the elements of all tensors."""
        return None

    @abstractmethod
    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        """Start all messages of one round; return one Pending for each send and each receive. Never blocks for a peer.

        While this rank is in any wait, all its posted messages move. Raises LinkError if a peer is known to be lost.

        tag: 31 bits that match sends to receives. The bits above the lowest KIND_BITS may hold the kind of numbers: a transport
        that can compare raises LinkError with `found` if the two ends of a message differ in kind or length.
        """

    @abstractmethod
    def abort(self) -> None:
        """Break every connection now, so that all waits, here and at the peers, end with a LinkError. Does not wait for peers.
        CUDA kernels end later, with incomplete results. Later calls do nothing."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources. Does not wait for peers, but up to a few seconds for kernels of this rank. In a forked child,
        release only the child's copies of the descriptors that must close when the rank itself ends."""

    def lossy_paths(self) -> Mapping[int, str]:
        """Return, by rank, an error text for each connection on which the other host no longer acknowledges what this rank sends.
        Does not wait."""
        return MappingProxyType({})

    def trouble(self) -> str | None:
        """Return the text of an error that the transport has found by itself, and that no call has raised, because operations go
        on after the call that began them; None if there is none. Does not wait."""
        return None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised CPU tensor in the memory that this transport moves fastest."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def crossed(self, payload: loop.Payload) -> loop.Payload:
        """Return a payload on a GPU as one whose messages are CPU tensors."""
        return Crossed(payload, self.copy_streams)

    @cached_property
    def copy_streams(self) -> SideStreams:
        """The streams on which tensors of GPUs are copied to the host's memory."""
        return SideStreams()

    @cached_property
    def scratch(self) -> loop.Scratch:
        """The memory in which loop.prepare's programs keep what they receive."""
        return loop.Scratch()
