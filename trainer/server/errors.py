"""Errors of workers and servers: told to each other as records, and with the numbers that ranks have among all, not in a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives import CollectiveError, CollectiveTimeout, PeerLost
from collectives.errors import ranks_text


class QuorumLost(CollectiveError):
    """Tells that too many ranks are lost for another update. Attributes: ranks (those that are lost), quorum."""

    def __init__(self, ranks: Sequence[int], quorum: int, *, rank: int, operation: str) -> None:
        self.quorum = quorum
        message = f"lost {ranks_text(ranks)}: those that are left are fewer than the quorum of {quorum}"
        super().__init__(message, rank=rank, operation=operation, ranks=ranks)


def of_pair(error: CollectiveError, pair: tuple[int, int], rank: int, operation: str) -> CollectiveError:
    """Return an error of a Communicator of two, by the numbers that its ranks have among all. rank: this one."""
    if isinstance(error, PeerLost):
        reasons = {pair[lost]: reason for lost, reason in error.reasons.items()}
        lost = [pair[lost] for lost in error.ranks]
        return PeerLost(lost, rank=rank, operation=operation, has_left=error.has_left, reasons=reasons)
    if isinstance(error, CollectiveTimeout):
        awaited = [pair[awaited] for awaited in error.waiting_for]
        return CollectiveTimeout(error.seconds, awaited, rank=rank, operation=operation)
    return CollectiveError(f"ranks {pair[0]} and {pair[1]}: {error}", rank=rank, operation=operation)


def text_of(error: BaseException) -> str:
    """Return what an error says; its name where it says nothing, as KeyboardInterrupt does."""
    return str(error) or type(error).__name__


def to_record(error: BaseException) -> dict[str, Any]:
    """Return what is told of an error to other ranks, as JSON can have it."""
    said: dict[str, Any] = {"text": text_of(error)}
    if isinstance(error, QuorumLost):
        return {**said, "lost": error.ranks, "quorum": error.quorum}
    if isinstance(error, PeerLost):
        return {**said, "lost": error.ranks, "has_left": error.has_left, "reasons": list(error.reasons.items())}
    if isinstance(error, CollectiveTimeout):
        return {**said, "awaited": error.waiting_for, "seconds": error.seconds}
    return said


def from_record(record: dict[str, Any], rank: int, operation: str) -> CollectiveError:
    """Return the error that was told to this rank: QuorumLost, PeerLost and CollectiveTimeout as such, any other with its
    text."""
    if "quorum" in record:
        return QuorumLost(record["lost"], record["quorum"], rank=rank, operation=operation)
    if "lost" in record:
        how = {"has_left": record["has_left"], "reasons": dict(record["reasons"])}
        return PeerLost(record["lost"], rank=rank, operation=operation, **how)
    if "awaited" in record:
        return CollectiveTimeout(record["seconds"], record["awaited"], rank=rank, operation=operation)
    return CollectiveError(record["text"], rank=rank, operation=operation)
