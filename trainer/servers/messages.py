"""Messages between a server and a worker: a record with tensors, errors as records, and tensors laid out in few buffers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, PeerLost
from gradwire.collectives.errors import ranks_text

_HEAD_BYTES = 512
"""The size of the first part of a message, which is all of most records."""

_LENGTH_BYTES = 8


def send(communicator: Communicator, rank: int, record: Any, tensors: Sequence[Tensor] = ()) -> None:
    """Send a record that JSON can hold, and tensors on the CPU, to a rank, which calls receive()."""
    listed = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps([record, listed]).encode()
    data = (b"%*d" % (_LENGTH_BYTES, len(text)) + text).ljust(_HEAD_BYTES)
    head = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    communicator.send(head[:_HEAD_BYTES], rank)
    for tensor in (head[_HEAD_BYTES:], *tensors):
        if tensor.numel():
            communicator.send(tensor, rank)


def receive(communicator: Communicator, rank: int, into: Sequence[Tensor] = ()) -> tuple[Any, list[Tensor]]:
    """Return the record and the tensors that a rank has sent. JSON turns tuples into lists and keys into strings.

    into: memory for the tensors. It is used if it has their dtypes and shapes; else, or without it, the tensors are new.
    """
    head = torch.empty(_HEAD_BYTES, dtype=torch.uint8, device="cpu")
    communicator.recv(head, rank)
    data = head.numpy().tobytes()
    length = int(data[:_LENGTH_BYTES])
    if (beyond := _LENGTH_BYTES + length - _HEAD_BYTES) > 0:
        rest = torch.empty(beyond, dtype=torch.uint8, device="cpu")
        communicator.recv(rest, rank)
        data += rest.numpy().tobytes()
    record, listed = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    kinds = [(getattr(torch, name), tuple(shape)) for name, shape in listed]
    tensors = list(into)
    if [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] != kinds:
        tensors = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in kinds]
    for tensor in tensors:
        if tensor.numel():
            communicator.recv(tensor, rank)
    return record, tensors


class Flat:
    """Lays out tensors one after another in CPU buffers, one buffer for each dtype. Attribute numel: the number of
    elements."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._sizes: dict[torch.dtype, list[int]] = {}
        for dtype, shape in self._shapes:
            self._sizes.setdefault(dtype, []).append(shape.numel())
        self.numel = sum(map(sum, self._sizes.values()))

    def __len__(self) -> int:
        return len(self._sizes)

    def empty(self) -> list[Tensor]:
        """Return new buffers, not initialized."""
        return [torch.empty(sum(sizes), dtype=dtype, device="cpu") for dtype, sizes in self._sizes.items()]

    def pack(self, tensors: Sequence[Tensor | None], buffers: list[Tensor] | None = None) -> list[Tensor]:
        """Copy these tensors, and zeros for None, into buffers, by default new ones. Return the buffers."""
        buffers = self.empty() if buffers is None else buffers
        for view, tensor in zip(self.views(buffers), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach())
        return buffers

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors as views of the buffers."""
        parts = {
            dtype: iter(buffer.split(sizes))
            for (dtype, sizes), buffer in zip(self._sizes.items(), buffers, strict=True)
        }
        return [next(parts[dtype]).view(shape) for dtype, shape in self._shapes]


class QuorumLost(CollectiveError):
    """Too many ranks are lost for another update. Attributes: ranks (the lost ranks), quorum."""

    def __init__(self, ranks: Sequence[int], quorum: int, *, rank: int, operation: str) -> None:
        self.quorum = quorum
        message = f"lost {ranks_text(ranks)}: the remaining ranks are fewer than the quorum of {quorum}"
        super().__init__(message, rank=rank, operation=operation, ranks=ranks)


def text_of(error: BaseException) -> str:
    """Return the text of an error, or its class name if the text is empty, as for KeyboardInterrupt."""
    return str(error) or type(error).__name__


def to_record(error: BaseException) -> dict[str, Any]:
    """Return a record of an error, to be sent to other ranks as JSON."""
    record: dict[str, Any] = {"text": text_of(error)}
    if isinstance(error, QuorumLost):
        record |= {"lost": error.ranks, "quorum": error.quorum}
    elif isinstance(error, PeerLost):
        record |= {"lost": error.ranks, "has_left": error.has_left, "reasons": list(error.reasons.items())}
    elif isinstance(error, CollectiveTimeout):
        record |= {"awaited": error.waiting_for, "seconds": error.seconds}
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


def of_pair(error: CollectiveError, pair: tuple[int, int], rank: int, operation: str) -> CollectiveError:
    """Return an error of a Communicator of two ranks, with its ranks 0 and 1 replaced by those in pair. rank: this rank."""
    record = to_record(error)
    for ranks in record.keys() & {"lost", "awaited"}:
        record[ranks] = [pair[each] for each in record[ranks]]
    if "reasons" in record:
        record["reasons"] = [(pair[lost], reason) for lost, reason in record["reasons"]]
    return from_record({**record, "text": f"ranks {pair[0]} and {pair[1]}: {error}"}, rank, operation)
