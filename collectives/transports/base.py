"""The protocol that links implement: a Transport moves contiguous 1-D tensors between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from gradwire.collectives.kernels.layout import KIND_BITS as KIND_BITS  # links and messages import both from here
from gradwire.collectives.kernels.layout import Coding as Coding
from gradwire.collectives.schedules.coded import CodedProgram
from gradwire.collectives.schedules.program import Program

#: Seconds between two checks whether a message is done, where nothing wakes the thread that waits for it.
DONE_POLL_S = 0.0005

#: One message: the other rank, and the contiguous 1-D tensor that is sent or filled.
Message = tuple[int, torch.Tensor]


class Pending(Protocol):
    """A posted message."""

    def wait(self, deadline: float) -> None:
        """Wait until the tensor is filled (received), or may be changed (sent). deadline: time.monotonic() seconds.

        Raises LinkError when the connection breaks or the deadline passes.
        """

    def is_done(self) -> bool:
        """Move messages as far as possible without waiting; return whether wait() would return, or raise, at once."""


#: One Pending for each send, and one for each receive.
Posted = tuple[list[Pending], list[Pending]]


@dataclass(frozen=True, slots=True)
class Request:
    """A verb that a transport is to run by itself, for buffers of one dtype and device.

    verb, algorithm: as the transport offers them. dtype, device_type: those of both buffers; bool is sent as uint8.
    numel: that of the source. op: 'sum', 'average', 'min', 'max' or 'product'. root: for broadcast, reduce, gather and
    scatter. source_lengths, destination_lengths: for alltoall, the elements sent to and received from each rank.
    """

    verb: str
    algorithm: str
    dtype: torch.dtype
    device_type: str
    numel: int
    op: str = "sum"
    root: int = 0
    source_lengths: tuple[int, ...] = ()
    destination_lengths: tuple[int, ...] = ()


#: Records a run of a program: its instructions, the bytes of a message of so many elements, the time at which the run began, and
#: the times at which the instructions ended, in nanoseconds of time.perf_counter_ns().
Trace = Callable[[Iterable[Sequence[int]], Callable[[int], int], int, Sequence[int]], None]


class CodedWork(Protocol):
    """The numbers of a CodedProgram, other ones in each run, and how they are encoded. compiles: whether a compiled loop can do
    the work."""

    compiles: bool

    def coding(self) -> Coding:
        """Return what a compiled loop needs for the numbers of this run, if it can do the work. The addresses are valid until the
        run ends."""

    def wire_bytes(self, numel: int) -> int:
        """Return the bytes of the code of so many numbers."""


#: (tag, deadline) -> None
CodesRun = Callable[[int, float], None]

#: (source, destination, tag, deadline) -> None
WholeRun = Callable[[torch.Tensor, torch.Tensor, int, float], None]


class Whole(NamedTuple):
    """A verb that a transport has prepared, and executes at each call of `run`.

    run: (source, destination, tag, deadline), with contiguous tensors as in the Request. A CPU tensor is the user's
    own: it may have any shape, and may require gradients. allreduce, broadcast and reduce get the same tensor twice
    (reduce may overwrite it on any rank); gather and scatter get an empty tensor for the parts on ranks other than the
    root, and barrier gets empty tensors; allgather's source may be this rank's part of its destination. tag: 30 bits,
    equal on ranks that call the same operation, and different otherwise. deadline: time.monotonic() seconds. Raises
    LinkError. needs_meeting: whether ranks must first pass a barrier with this tag, because run does harm if they call
    different operations. algorithm: its name, for timelines.
    """

    run: WholeRun
    needs_meeting: bool
    algorithm: str = ""


class Transport(ABC):
    """Connects the ranks of one Communicator.

    Messages from one rank to another with the same tag arrive in the order sent. A message is never received under another tag
    (except by NCCL, which has no tags).

    Attributes: device_types, the device types whose tensors it moves (without "cuda", CUDA tensors are copied through
    pinned memory); posts_together, the device types for which both ends of a message must be posted in the same round,
    as NCCL requires; quick, whether a message costs microseconds, without the thread wake-ups of a backend; eager,
    whether a send may finish before its receiver has posted the receive, so that programs must end with an answer;
    interruptible, whether Ctrl-C ends a wait of the main thread before its deadline; receives_from_any, whether
    next_sender() is implemented; waits_again, whether wait() may be called again after its
    deadline has passed; shares_memory, whether this rank shares memory with others of its host; algorithms, by verb,
    those that collective() takes; preferred, by verb, the one of these that 'auto' selects for every size;
    preferred_on_gpu, the same for CUDA tensors, if the transport moves these itself;
    share_alignment_bytes, for each allreduce algorithm that it also runs in halves (the verbs reduce_shares and
    gather_shares, in place): the buffer is cut at multiples of this into one share per rank, in rank order and of
    near-equal length, as by plan.spans.split_aligned; routes, lines of text: which ranks this rank reaches by which
    connection, and why; trace, see record().
    """

    rank: int
    size: int
    device_types: tuple[str, ...] = ("cpu",)
    posts_together: tuple[str, ...] = ()
    shares_memory: bool = False
    quick: bool = False
    eager: bool = False
    interruptible: bool = False
    receives_from_any: bool = False
    waits_again: bool = False
    algorithms: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    preferred: Mapping[str, str] = MappingProxyType({})
    preferred_on_gpu: Mapping[str, str] = MappingProxyType({})
    share_alignment_bytes: Mapping[str, int] = MappingProxyType({})
    routes: tuple[str, ...] = ()
    trace: Trace | None = None

    @abstractmethod
    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        """Start all messages of one round; return one Pending for each send and each receive. Never blocks for a peer.

        While this rank is in any wait, all its posted messages move. Raises LinkError if a peer is known to be lost.

        tag: 31 bits that match sends to receives. The bits above the lowest KIND_BITS may hold the kind of numbers: a link that
        can compare raises LinkError with `found` if the two ends of a message differ in kind or length.
        """

    @abstractmethod
    def abort(self) -> None:
        """Break every connection now, so that all waits, here and at the peers, end with a LinkError. Does not wait for peers,
        but up to a few seconds for kernels of this rank."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources. Does not wait for peers, but up to a few seconds for kernels of this rank."""

    def next_sender(self, tag: int, deadline: float) -> int | None:
        """Wait until the next message of some rank has this tag, and return that rank; None when the deadline passes. The
        message is not received yet. The rank that was returned last is checked last. Raises LinkError."""
        raise NotImplementedError(f"{type(self).__name__} cannot receive from any rank: name the sender")

    def has_unfinished_send(self) -> bool:
        """Return whether a posted send is unfinished, and moves only while this rank calls its transport."""
        return False

    def is_busy(self) -> bool:
        """Return whether a posted send or receive is unfinished, and moves only while this rank calls its transport."""
        return False

    def progress(self) -> None:  # noqa: B027
        """Move posted messages as far as possible without waiting. Raises LinkError."""

    def collective(self, request: Request) -> Whole:
        """Prepare a verb that `algorithms` lists. Not a collective call; no deadline runs yet."""
        raise NotImplementedError(f"{type(self).__name__} offers messages only")

    def follow(self, program: Program, dtype: torch.dtype, op: str) -> WholeRun | None:
        """Prepare to run a program of CPU tensors in one call, without Python between messages; return None if this transport
        cannot. op: the reduction: 'sum', 'min', 'max' or 'product'. Not a collective call; no deadline runs yet."""
        return None

    def follow_codes(self, program: CodedProgram, work: CodedWork) -> CodesRun | None:
        """Prepare to run a program of codes in one call, without Python between messages; return None if this transport cannot,
        or if the work does not compile. What is returned raises LinkError; ValueError if a code is invalid."""
        return None

    def lossy_paths(self) -> Mapping[int, str]:
        """Return, by rank, an error text for each connection on which the other host no longer acknowledges what this rank sends.
        Does not wait."""
        return MappingProxyType({})

    def disown(self) -> None:  # noqa: B027
        """Close a forked child's copies of the descriptors that must close when the rank itself ends."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised CPU tensor in the memory that this transport moves fastest."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def record(self, trace: Trace | None) -> None:
        """Call `trace` after each later run of a program; None for no longer."""
        self.trace = trace

    def wait_beside_work(self, beside_work: bool) -> None:  # noqa: B027
        """Set whether later waits leave the cores to other threads of this process."""
