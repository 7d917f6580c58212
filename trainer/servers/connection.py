"""The means of exchange between servers and workers: Communicators of two ranks, flat buffers of tensors, records as JSON, and
errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, PeerLost
from gradwire.collectives.communicator import close_all
from gradwire.collectives.errors import ranks_text
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
    """Return by worker the Communicators of this rank that join the server, which is rank 1 in each, with workers on other ranks.

    name: the same on all ranks, and used for nothing else. rank: this one. world_ranks: by rank, its rank in the world.
    timeout_s: of each wait; None for that of init(). Collective: call it for one server after the other, in the same order on
    all ranks, or ranks deadlock.
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


def to_bytes(record: Any, default: Callable[[Any], Any] | None = None) -> Tensor:
    """Return a record as a tensor of uint8. default: converts other values, as of json.dumps."""
    return torch.frombuffer(bytearray(json.dumps(record, default=default).encode()), dtype=torch.uint8)


def receive(communicator: Communicator, nbytes: int, sender: int) -> Any:
    """Return a record of nbytes that a rank sends. After JSON, tuples are lists and keys are text."""
    text = torch.empty(nbytes, dtype=torch.uint8)
    communicator.recv(text, sender)
    return json.loads(text.numpy().tobytes())


class Flat:
    """A layout of tensors one after the other, on the CPU, in one buffer for each dtype. Attribute numel: the number of
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
        """Return new buffers."""
        return [torch.empty(size, dtype=dtype) for dtype, size in self._sizes.items()]

    def pack(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return new buffers with these tensors, zeros for None."""
        buffers = self.empty()
        for view, tensor in zip(self.views(buffers), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach())
        return buffers

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that lie in buffers."""
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
    """Return an error of a Communicator of two ranks with the ranks' numbers among all. rank: this one."""
    if isinstance(error, PeerLost):
        reasons = {pair[lost]: reason for lost, reason in error.reasons.items()}
        lost = [pair[lost] for lost in error.ranks]
        return PeerLost(lost, rank=rank, operation=operation, has_left=error.has_left, reasons=reasons)
    if isinstance(error, CollectiveTimeout):
        awaited = [pair[awaited] for awaited in error.waiting_for]
        return CollectiveTimeout(error.seconds, awaited, rank=rank, operation=operation)
    return CollectiveError(f"ranks {pair[0]} and {pair[1]}: {error}", rank=rank, operation=operation)


def text_of(error: BaseException) -> str:
    """Return the text of an error, or its name if that is empty, as of KeyboardInterrupt."""
    return str(error) or type(error).__name__


def to_record(error: BaseException) -> dict[str, Any]:
    """Return a record of an error for other ranks, which JSON can hold."""
    record: dict[str, Any] = {"text": text_of(error)}
    if isinstance(error, QuorumLost):
        return {**record, "lost": error.ranks, "quorum": error.quorum}
    if isinstance(error, PeerLost):
        return {**record, "lost": error.ranks, "has_left": error.has_left, "reasons": list(error.reasons.items())}
    if isinstance(error, CollectiveTimeout):
        return {**record, "awaited": error.waiting_for, "seconds": error.seconds}
    return record


def from_record(record: dict[str, Any], rank: int, operation: str) -> CollectiveError:
    """Return the error of a record from to_record(): a QuorumLost, PeerLost or CollectiveTimeout as it was, any other as a
    CollectiveError with its text. rank, operation: where it is raised."""
    if "quorum" in record:
        return QuorumLost(record["lost"], record["quorum"], rank=rank, operation=operation)
    if "lost" in record:
        how = {"has_left": record["has_left"], "reasons": dict(record["reasons"])}
        return PeerLost(record["lost"], rank=rank, operation=operation, **how)
    if "awaited" in record:
        return CollectiveTimeout(record["seconds"], record["awaited"], rank=rank, operation=operation)
    return CollectiveError(record["text"], rank=rank, operation=operation)
