"""Tools for messages between servers and workers: Communicators of two ranks, flat buffers of tensors, records as JSON, and
errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, PeerLost
from gradwire.collectives.communicator import close_all
from gradwire.collectives.errors import ranks_text
from gradwire.trainer.trees import decode
from gradwire.trainer.world.world import current_world


def open_pairs(
    name: str,
    server: int,
    workers: Iterable[int],
    *,
    rank: int,
    world_ranks: Sequence[int],
    timeout_s: float | None = None,
) -> dict[int, Communicator]:
    """Return this rank's Communicators that join a worker (rank 0) and the server (rank 1) on different ranks, by worker.

    name: the same on all ranks, and not used for anything else. rank: this rank. world_ranks: the rank in the world of each
    rank. timeout_s: the limit of each wait; None for that of init(). Collective: call it for one server after the other, in
    the same order on all ranks, or ranks deadlock.
    """
    pairs: dict[int, Communicator] = {}
    try:
        for worker in workers:
            if worker != server and rank in (worker, server):
                of_two = f"{name}/{worker}/{server}"
                pairs[worker] = current_world().open_pair(world_ranks[worker], world_ranks[server], of_two, timeout_s)
    except BaseException:
        close_all(pairs.values())
        raise
    return pairs


def receive(communicator: Communicator, nbytes: int, sender: int) -> Any:
    """Receive a record of nbytes from a rank, and return it. JSON turns tuples into lists and keys into strings."""
    text = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    communicator.recv(text, sender)
    return decode(text)


class Flat:
    """Lays out tensors one after another in CPU buffers, one buffer for each dtype. Attribute numel: the number of
    elements."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._sizes: dict[torch.dtype, int] = {}
        for dtype, shape in self._shapes:
            self._sizes[dtype] = self._sizes.get(dtype, 0) + shape.numel()
        self.numel = sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def empty(self) -> list[Tensor]:
        """Return new buffers, not initialized."""
        return [torch.empty(size, dtype=dtype, device="cpu") for dtype, size in self._sizes.items()]

    def pack(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return new buffers with copies of these tensors, and zeros for None."""
        buffers = self.empty()
        for view, tensor in zip(self.views(buffers), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach())
        return buffers

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors as views of the buffers."""
        rests = dict(zip(self._sizes, buffers, strict=True))
        views = []
        for dtype, shape in self._shapes:
            view, rests[dtype] = rests[dtype].tensor_split([shape.numel()])
            views.append(view.view(shape))
        return views


class QuorumLost(CollectiveError):
    """Too many ranks are lost for another update. Attributes: ranks (the lost ranks), quorum."""

    def __init__(self, ranks: Sequence[int], quorum: int, *, rank: int, operation: str) -> None:
        self.quorum = quorum
        message = f"lost {ranks_text(ranks)}: the remaining ranks are fewer than the quorum of {quorum}"
        super().__init__(message, rank=rank, operation=operation, ranks=ranks)


def of_pair(error: CollectiveError, pair: tuple[int, int], rank: int, operation: str) -> CollectiveError:
    """Return an error of a Communicator of two ranks, with its ranks 0 and 1 replaced by those in pair. rank: this rank."""
    if isinstance(error, PeerLost):
        reasons = {pair[lost]: reason for lost, reason in error.reasons.items()}
        lost = [pair[lost] for lost in error.ranks]
        return PeerLost(lost, rank=rank, operation=operation, has_left=error.has_left, reasons=reasons)
    if isinstance(error, CollectiveTimeout):
        awaited = [pair[awaited] for awaited in error.waiting_for]
        return CollectiveTimeout(error.seconds, awaited, rank=rank, operation=operation)
    return CollectiveError(f"ranks {pair[0]} and {pair[1]}: {error}", rank=rank, operation=operation)


def text_of(error: BaseException) -> str:
    """Return the text of an error, or its class name if the text is empty, as for KeyboardInterrupt."""
    return str(error) or type(error).__name__


def to_record(error: BaseException) -> dict[str, Any]:
    """Return a record of an error, to be sent to other ranks as JSON."""
    record: dict[str, Any] = {"text": text_of(error)}
    if isinstance(error, QuorumLost):
        return {**record, "lost": error.ranks, "quorum": error.quorum}
    if isinstance(error, PeerLost):
        return {**record, "lost": error.ranks, "has_left": error.has_left, "reasons": list(error.reasons.items())}
    if isinstance(error, CollectiveTimeout):
        return {**record, "awaited": error.waiting_for, "seconds": error.seconds}
    return record


def from_record(record: dict[str, Any], rank: int, operation: str) -> CollectiveError:
    """Return the error from a record of to_record(). QuorumLost, PeerLost and CollectiveTimeout keep their class; any other
    error becomes a CollectiveError with its text. rank, operation: this rank and its operation, for the error."""
    if "quorum" in record:
        return QuorumLost(record["lost"], record["quorum"], rank=rank, operation=operation)
    if "lost" in record:
        how = {"has_left": record["has_left"], "reasons": dict(record["reasons"])}
        return PeerLost(record["lost"], rank=rank, operation=operation, **how)
    if "awaited" in record:
        return CollectiveTimeout(record["seconds"], record["awaited"], rank=rank, operation=operation)
    return CollectiveError(record["text"], rank=rank, operation=operation)
