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
        """Return every rank's picklable object, in rank order, on rank dst; None elsewhere."""
        arguments.check_root(self._engine, "dst", dst)
        received = self._exchanged([obj if rank == dst else None for rank in range(self.size)])
        return received if self.rank == dst else None

    def scatter_object(self, objs: Sequence[Any] | None = None, src: int = 0) -> Any:
        """Return, on rank r, the r-th of rank src's picklable objects. The argument of the other ranks is ignored."""
        arguments.check_root(self._engine, "src", src)
        if self.rank == src and (objs is None or len(objs) != self.size):
            raise ValueError(
                f"rank {self.rank}: scatter_object needs {self.size} objects on rank src={src}, not {objs!r}"
            )
        outgoing = list(objs) if self.rank == src and objs is not None else [None] * self.size
        return self._exchanged(outgoing)[src]

    def _exchanged(self, outgoing: Sequence[Any]) -> list[Any]:
        """Send object r to rank r. Return the object received from each rank, by rank."""
        pieces = [self._tensor(pickle.dumps(obj)) for obj in outgoing]
        sent = torch.tensor([piece.numel() for piece in pieces], device=pieces[0].device, dtype=torch.int64)
        landed = torch.empty_like(sent)
        self.alltoall(landed, sent)
        output = torch.empty(int(landed.sum()), dtype=torch.uint8, device=sent.device)
        self.alltoall(output, torch.cat(pieces), landed.tolist(), sent.tolist())
        return [pickle.loads(_bytes(part)) for part in output.split(landed.tolist())]

    def _allgather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""
        mine = self._tensor(data)
        lengths = torch.zeros(self.size, dtype=torch.int64, device=mine.device)
        self.allgather(lengths, torch.tensor([mine.numel()], device=mine.device, dtype=torch.int64))
        parts = [torch.empty(int(n), dtype=torch.uint8, device=mine.device) for n in lengths]
        self.allgather(parts, mine)
        return [_bytes(part) for part in parts]

    def _tensor(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._engine.control_device)


def _bytes(payload: Tensor) -> bytes:
    return payload.cpu().numpy().tobytes()
