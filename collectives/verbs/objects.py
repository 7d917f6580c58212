"""Verbs for objects: they send lengths, then bytes, by the verbs for tensors. Records are sent as JSON, other objects
pickled."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.verbs.movement import Movement


class Objects(Movement):
    """The verbs for objects that are no tensors."""

    def allgather_record(self, record: Any) -> list[Any]:
        """Return every rank's record, in rank order.

        A record consists of numbers, strings, booleans, None, and lists and dicts of these. It is sent as JSON, so a tuple
        comes back as a list, and a record cannot run code on another rank.
        """
        return [json.loads(data) for data in self._allgather(json.dumps(record).encode())]

    def allgather_object(self, obj: Any) -> list[Any]:
        """Return every rank's picklable object, in rank order. Use it only among processes that you trust."""
        return [pickle.loads(data) for data in self._allgather(pickle.dumps(obj))]

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Return rank src's picklable object on every rank. The argument of the other ranks is ignored."""
        arguments.check_root(self._engine, "src", src)
        mine = self._tensor(pickle.dumps(obj if self.rank == src else None))
        length = torch.tensor([mine.numel()], device=mine.device, dtype=torch.int64)
        self.broadcast(length, src)
        if self.rank != src:
            mine = torch.empty(int(length), dtype=torch.uint8, device=mine.device)
        self.broadcast(mine, src)
        return obj if self.rank == src else pickle.loads(_bytes(mine))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return every rank's picklable object, in rank order, on rank dst, which alone unpickles them; None elsewhere."""
        arguments.check_root(self._engine, "dst", dst)
        mine = self._tensor(pickle.dumps(obj))
        lengths = self._lengths(mine)
        padded = _padded(mine, max(lengths))
        parts = [torch.empty_like(padded) for _ in lengths] if self.rank == dst else None
        self.gather(padded, parts, dst)
        if parts is None:
            return None
        return [pickle.loads(_bytes(part[:length])) for part, length in zip(parts, lengths, strict=True)]

    def scatter_object(self, objs: Sequence[Any] | None = None, src: int = 0) -> Any:
        """Return, on rank r, the r-th of rank src's picklable objects. The argument of the other ranks is ignored."""
        arguments.check_root(self._engine, "src", src)
        if self.rank != src:
            objs = ()
        elif objs is None or len(objs) != self.size:
            raise ValueError(
                f"rank {self.rank}: scatter_object needs {self.size} objects on rank src={src}, not {objs!r}"
            )
        pieces = [self._tensor(pickle.dumps(obj)) for obj in objs]
        longest = max((piece.numel() for piece in pieces), default=0)
        heads = [torch.tensor([piece.numel(), longest], device=piece.device, dtype=torch.int64) for piece in pieces]
        head = torch.empty(2, device=self._engine.control_device, dtype=torch.int64)
        self.scatter(head, heads, src)
        length, longest = head.tolist()
        mine = torch.empty(longest, device=head.device, dtype=torch.uint8)
        self.scatter(mine, [_padded(piece, longest) for piece in pieces], src)
        return pickle.loads(_bytes(mine[:length]))

    def _lengths(self, mine: Tensor) -> list[int]:
        """Return the number of elements of every rank's tensor, in rank order."""
        lengths = torch.zeros(self.size, device=mine.device, dtype=torch.int64)
        self.allgather(lengths, torch.tensor([mine.numel()], device=mine.device, dtype=torch.int64))
        numbers: list[int] = lengths.tolist()
        return numbers

    def _allgather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""
        mine = self._tensor(data)
        parts = [torch.empty(length, device=mine.device, dtype=torch.uint8) for length in self._lengths(mine)]
        self.allgather(parts, mine)
        return [_bytes(part) for part in parts]

    def _tensor(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._engine.control_device)


def _padded(payload: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(payload, (0, length - payload.numel()))


def _bytes(payload: Tensor) -> bytes:
    return payload.cpu().numpy().tobytes()
