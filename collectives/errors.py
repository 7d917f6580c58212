"""The errors of collective operations that cannot finish, for example because a rank is lost.

A wrong argument raises a ValueError or TypeError instead, before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed import DistBackendError

_Value = TypeVar("_Value")
_Raised = TypeVar("_Raised", bound=BaseException)

_NAMES_RANK = re.compile(r"rank \d+: ")


def ranks_text(ranks: Iterable[int]) -> str:
    """'rank 3' or 'ranks 1, 4'."""
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) != 1 else ''} {', '.join(map(str, listed))}"


def by_value(values: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """Return the ranks that have a value, by value."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def add_rank(error: BaseException, rank: int) -> None:
    """Begin the message of a ValueError, TypeError or RuntimeError with the rank that raised it, unless it does so already."""
    if type(error) in (ValueError, TypeError, RuntimeError) and not _NAMES_RANK.match(message := str(error)):
        error.args = (f"rank {rank}: {message}", *error.args[1:])


class _Portable(Exception):
    """The base class of exceptions whose constructors need more than a message: they can be pickled and copied, as process
    pools do with an exception of a worker."""

    def __reduce__(self) -> tuple[Callable[..., BaseException], tuple[object, ...], dict[str, Any]]:
        return _remade, (type(self), *self.args), vars(self)


def _remade(kind: type[_Raised], *args: object) -> _Raised:
    """Return an exception with these args and no attributes, without a call of its constructor."""
    error = (OSError if issubclass(kind, OSError) else BaseException).__new__(kind)  # CollectiveTimeout is an OSError
    error.args = args
    return error


class CollectiveError(_Portable, DistBackendError):
    """A collective operation failed. Its Communicator is usually broken from then on. This error is a RuntimeError and
    torch's DistBackendError.

    Attributes: rank (that of this process in the Communicator; -1 if unknown), operation (the operation that was running),
    ranks (the ranks at fault, as far as they are known).
    """

    def __init__(self, message: str = "", *, rank: int = -1, operation: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(message if rank < 0 else f"rank {rank}: {operation}: {message}")
        self.rank = rank
        self.operation = operation
        self.ranks = tuple(sorted(ranks))

    def again(self, message: str, operation: str) -> CollectiveError:
        """Return an error of the same kind, with the same attributes, for another operation that fails as a result."""
        error = _remade(type(self), f"rank {self.rank}: {operation}: {message}")
        error.__dict__.update(vars(self))
        error.operation = operation
        return error


class PeerLost(CollectiveError):
    """The process of a peer ended, or the peer left before the operation was done.

    Attributes: ranks (the lost ranks), has_left (True if they announced that they leave, as when a script ends or raises an
    exception; False if their processes ended without an announcement, or cannot be reached), reasons (by rank, the exception
    with which a rank left).
    """

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        rank: int,
        operation: str,
        has_left: bool,
        reasons: Mapping[int, str] | None = None,
    ) -> None:
        lost = sorted(ranks)
        self.has_left = has_left
        self.reasons = dict(reasons or {})
        how = (
            "left at or before this operation, by an exception or at the end of its script: see the output of that rank (if it "
            "had fewer batches: join())"
            if has_left
            else "its process was ended, or its host cannot be reached"
        )
        if self.reasons:
            how = "; ".join(f"rank {each} {reason}" for each, reason in self.reasons.items())
        super().__init__(f"lost {ranks_text(lost)}: {how}", rank=rank, operation=operation, ranks=lost)


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A deadline passed.

    Attributes: seconds (the deadline), waiting_for and ranks (the ranks that did not answer; empty if this rank was late, or
    if two ranks cannot reach each other: the message then says so).
    """

    def __init__(
        self, seconds: float, waiting_for: Iterable[int], *, rank: int, operation: str, detail: str = ""
    ) -> None:
        self.seconds = seconds
        self.waiting_for = tuple(sorted(waiting_for))
        waited = f" waiting for {ranks_text(self.waiting_for)}" if self.waiting_for else ""
        message = f"not done after {seconds:g} s{waited}" + (f": {detail}" if detail else "")
        super().__init__(message, rank=rank, operation=operation, ranks=self.waiting_for)


class Mismatch(CollectiveError):
    """Ranks called different operations, or the same one with different arguments.

    Attributes: calls (by rank, what it called), places (by rank, the 'file:line' of the call in the user's code, as far as it
    is known). If each rank made its call for the first time on this Communicator, no data has moved, and the Communicator
    remains usable.
    """

    def __init__(
        self,
        calls: Mapping[int, str],
        *,
        rank: int,
        operation: str,
        places: Mapping[int, str] | None = None,
        differing: Sequence[str] = (),
    ) -> None:
        """differing: the names of what differs between the calls."""
        self.calls = dict(sorted(calls.items()))
        self.places = dict(sorted((places or {}).items()))
        by_call = by_value(self.calls).items()
        said = "; ".join(f"{ranks_text(callers)} called {call}{self._where(callers)}" for call, callers in by_call)
        if differing:
            said += f"; they differ in {' and '.join(filter(None, [', '.join(differing[:-1]), differing[-1]]))}"
        super().__init__(f"the ranks do not agree: {said}", rank=rank, operation=operation)

    def _where(self, callers: Iterable[int]) -> str:
        """' at train.py:12', or several places if these ranks called it at several."""
        places = dict.fromkeys(self.places[caller] for caller in callers if caller in self.places)
        return f" at {' and '.join(places)}" if places else ""


class PeerJoined(CollectiveError):
    """An operation is not supported while some ranks wait in join(): they only contribute zeros to sums and averages, and take
    part in barriers.

    The Communicator is not broken, but the output of the operation is undefined. Attribute: ranks (the ranks in join()).
    """

    def __init__(self, ranks: Iterable[int], *, rank: int, operation: str) -> None:
        joined = sorted(ranks)
        super().__init__(
            f"not supported while {ranks_text(joined)} {'has' if len(joined) == 1 else 'have'} joined: until all have, "
            "only allreduce (sum or average), barrier, and steps of optimizers with the synchronous rule can run",
            rank=rank,
            operation=operation,
            ranks=joined,
        )


class ReplicasDiffer(CollectiveError):
    """Ranks that train one model no longer hold the same values. The Communicator remains usable.

    Attributes: tensor (the name of the first value that differs), ranks (the ranks that do not hold the most frequent value; if
    several values are equally frequent, the one on the lowest rank counts as the most frequent), count (how many values
    differ).
    """

    def __init__(
        self, tensor: str, hashes: Sequence[int | None], count: int, *, rank: int, operation: str, detail: str = ""
    ) -> None:
        """hashes: of the value, by rank; None for a rank without such a value."""
        by_hash = by_value(dict(enumerate(hashes)))
        most = max(by_hash.values(), key=len)
        self.tensor = tensor
        odd = sorted(holder for holders in by_hash.values() if holders is not most for holder in holders)
        self.count = count
        held = "; ".join(
            f"{ranks_text(holders)} {'have' if len(holders) > 1 else 'has'} {_hash_text(hashed)}"
            for hashed, holders in by_hash.items()
        )
        others = f", the first of {count} values that differ" if count > 1 else ""
        super().__init__(
            f"{ranks_text(odd)}: {tensor} is not that of {ranks_text(most)}{others} ({held})" + detail,
            rank=rank,
            operation=operation,
            ranks=odd,
        )


def _hash_text(hashed: int | None) -> str:
    return "none" if hashed is None else f"one with hash {hashed:016x}"


class LinkError(_Portable):
    """An error of a transport, which diagnostics.postmortem turns into one of the errors above.

    peer: the rank at the other end; None if the transport does not know. timed_out: a deadline passed (False: the connection is
    gone). awaited: all awaited ranks, if there were several. ended: whether their processes are known to have ended. found: for
    a message that does not match the posted receive, the kind and the bytes of its numbers, as far as known (kind 0: unknown).
    """

    def __init__(
        self,
        peer: int | None,
        *,
        timed_out: bool,
        detail: str,
        awaited: Iterable[int] = (),
        ended: bool = False,
        found: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(detail)
        self.peer = peer
        self.awaited = frozenset(awaited) | (frozenset() if peer is None else {peer})
        self.timed_out = timed_out
        self.ended = ended
        self.found = found


class ForgedMessage(LinkError):
    """What has arrived is not what the rank `peer` has sent: its tag or its checksum does not fit."""

    def __init__(self, peer: int, rank: int) -> None:
        detail = f"what rank {peer} has sent to rank {rank} was changed on the way"
        super().__init__(peer, timed_out=False, detail=detail, awaited={peer, rank})
