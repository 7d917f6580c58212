"""What a link makes: a transport, which moves spans of 1-D tensors between ranks. Small on purpose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from gradwire.collectives.plan.program import Program

#: One message: the other rank, and the contiguous 1-D tensor that is sent or filled.
Message = tuple[int, torch.Tensor]


class Pending(Protocol):
    """A message on its way."""

    def wait(self, deadline: float) -> None:
        """Return when the tensor is free (sent) or filled (received). deadline: time.monotonic() seconds.

        Raises LinkError when the connection breaks or the deadline passes.
        """

    def is_done(self) -> bool:
        """Move what can be moved at once; return whether wait() would return, or raise, at once."""


#: One Pending for each send, and one for each receive.
Posted = tuple[list[Pending], list[Pending]]


@dataclass(frozen=True, slots=True)
class Request:
    """A verb that a transport is to do by itself, for buffers of one kind.

    verb, algorithm: as the transport offers them. dtype, device_type: of both buffers; bool travels as uint8. numel: of the
    source. op: 'sum', 'average', 'min', 'max' or 'product'. root: of broadcast, reduce, gather and scatter. source_lengths,
    destination_lengths: how many elements go to each rank and come from each rank in alltoall.
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


#: (source, destination, tag, deadline) -> None
WholeRun = Callable[[torch.Tensor, torch.Tensor, int, float], None]


class Whole(NamedTuple):
    """A verb that a transport has made ready to do by itself, as often as it is called.

    run: (source, destination, tag, deadline), with contiguous tensors as the Request says; a CPU tensor comes as its user made
    it, so of any shape, and it may require gradients. allreduce, broadcast and reduce get one tensor twice (reduce may overwrite
    it anywhere), gather and scatter an empty one in place of all parts on ranks other than the root, barrier empty ones;
    allgather's source may be this rank's part of its destination. tag: of 30 bits, alike on ranks that call the same operation
    and on no others. deadline: time.monotonic() seconds. Raises LinkError. needs_meeting: whether ranks that call different
    things would come to harm in it, so that they must meet under the tag before. algorithm: its name, for timelines.
    """

    run: WholeRun
    needs_meeting: bool
    algorithm: str = ""


#: Of a tag: below, what a message is found by; above, what kind of numbers it carries.
KIND_BITS = 32


class Transport(ABC):
    """Connects the ranks of one Communicator.

    Messages from one rank to another with one tag arrive in the order sent; a tag that the other end does not use is never
    taken for one that it does.

    Attributes: device_types, the kinds of device whose tensors it moves (CUDA tensors go through pinned memory where it moves
    none); posts_together, those of them for which both ends of a message must be posted in the same round, as NCCL wants it;
    quick, whether a message costs microseconds, and not the wake-ups of a backend's threads; eager, whether a send may be over
    before its receiver has asked for the message, so that programs are to end with an answer; hears_anyone, whether
    next_sender() is offered; waits_again, whether a wait whose deadline has passed harms nothing; shares_memory, whether this
    rank shares memory with others of its host; algorithms, the names under which it does whole verbs by itself, by verb;
    preferred, which of these 'auto' is to take whatever the size, by verb; share_alignment_bytes, for its allreduces that
    it does by halves too, as the verbs reduce_shares and gather_shares, in place like the whole: at multiples of how many bytes
    it cuts a buffer into shares, one a rank, in order of the ranks and of near-equal length, as plan.spans.split_aligned does;
    routes, lines for people: what joins this rank with which others, and why.
    """

    rank: int
    size: int
    device_types: tuple[str, ...] = ("cpu",)
    posts_together: tuple[str, ...] = ()
    shares_memory: bool = False
    quick: bool = False
    eager: bool = False
    hears_anyone: bool = False
    waits_again: bool = False
    algorithms: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    preferred: Mapping[str, str] = MappingProxyType({})
    share_alignment_bytes: Mapping[str, int] = MappingProxyType({})
    routes: tuple[str, ...] = ()

    @abstractmethod
    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        """Start all messages of one round; return one Pending for each send and each receive. Never blocks for a peer.

        While any wait of this rank lasts, all that it has posted moves on. Raises LinkError when a peer is known to be gone.

        tag: of 31 bits, by which messages are found. Above its lowest KIND_BITS may stand what kind of numbers a message carries:
        a link that can tell raises LinkError with `found` where the ends of one message differ in it, or in length.
        """

    @abstractmethod
    def abort(self) -> None:
        """Break every connection now, so that all waits, here and at the peers, end with a LinkError. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Give the resources back. Never blocks."""

    def next_sender(self, tag: int, deadline: float) -> int | None:
        """Wait until the next message of some rank has a tag, and return that rank; None when the deadline passes. The message
        stays where it is. Ranks take turns: the one that was found last comes last. Raises LinkError."""
        raise NotImplementedError(f"{type(self).__name__} cannot receive from any rank: name the sender")

    def sends(self) -> bool:
        """Return whether something that was posted to be sent stays where it is unless this rank calls its transport."""
        return False

    def is_busy(self) -> bool:
        """Return whether anything that was posted, to be sent or received, does so."""
        return False

    def nudge(self) -> None:  # noqa: B027
        """Move what can be moved at once. Raises LinkError."""

    def collective(self, request: Request) -> Whole:
        """Make a verb ready that `algorithms` offers. Not a collective call; no deadline runs yet."""
        raise NotImplementedError(f"{type(self).__name__} offers messages only")

    def follow(self, program: Program, dtype: torch.dtype, op: str) -> WholeRun | None:
        """Make ready to run a program of CPU tensors in one call, without Python between messages; None where this transport
        cannot. op: 'sum', 'min', 'max' or 'product', by which it reduces. Not a collective call; no deadline runs yet."""
        return None

    def disown(self) -> None:  # noqa: B027
        """Give up the copies that a forked child has of what must end with the rank itself."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised CPU tensor where this transport handles it best."""
        return torch.empty(shape, dtype=dtype)

    def wait_beside_work(self, beside_work: bool) -> None:  # noqa: B027
        """Leave the cores to other threads of this process in waits from now on, or not."""
