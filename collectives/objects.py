"""Objects between ranks: lengths first, then bytes, both by the verbs for tensors. Records travel as JSON, all else pickled."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from gradwire.collectives import arguments, verbs
from gradwire.collectives.run.engine import Engine


def allgather_record(engine: Engine, record: Any) -> list[Any]:
    return [json.loads(data) for data in _allgather(engine, json.dumps(record).encode())]


def allgather_object(engine: Engine, obj: Any) -> list[Any]:
    return [pickle.loads(data) for data in _allgather(engine, pickle.dumps(obj))]


def broadcast_object(engine: Engine, obj: Any, src: int) -> Any:
    arguments.check_root(engine, "src", src)
    mine = _tensor(engine, pickle.dumps(obj if engine.rank == src else None))
    length = torch.tensor([mine.numel()], device=mine.device)
    verbs.broadcast(engine, length, src)
    if engine.rank != src:
        mine = torch.empty(int(length), dtype=torch.uint8, device=mine.device)
    verbs.broadcast(engine, mine, src)
    return obj if engine.rank == src else pickle.loads(_bytes(mine))


def gather_object(engine: Engine, obj: Any, dst: int) -> list[Any] | None:
    arguments.check_root(engine, "dst", dst)
    received = _exchanged(engine, [obj if rank == dst else None for rank in range(engine.size)])
    return received if engine.rank == dst else None


def scatter_object(engine: Engine, objs: Sequence[Any] | None, src: int) -> Any:
    arguments.check_root(engine, "src", src)
    if engine.rank == src and (objs is None or len(objs) != engine.size):
        raise ValueError(
            f"rank {engine.rank}: scatter_object needs {engine.size} objects on rank src={src}, not {objs!r}"
        )
    outgoing = list(objs) if engine.rank == src and objs is not None else [None] * engine.size
    return _exchanged(engine, outgoing)[src]


def _exchanged(engine: Engine, outgoing: Sequence[Any]) -> list[Any]:
    """Send object r to rank r; return what came from each rank."""
    pieces = [_tensor(engine, pickle.dumps(obj)) for obj in outgoing]
    sent = torch.tensor([piece.numel() for piece in pieces], device=pieces[0].device)
    landed = torch.empty_like(sent)
    verbs.alltoall(engine, landed, sent)
    output = torch.empty(int(landed.sum()), dtype=torch.uint8, device=sent.device)
    verbs.alltoall(engine, output, torch.cat(pieces), landed.tolist(), sent.tolist())
    return [pickle.loads(_bytes(part)) for part in output.split(landed.tolist())]


def _allgather(engine: Engine, data: bytes) -> list[bytes]:
    """Return every rank's bytes, in rank order."""
    mine = _tensor(engine, data)
    lengths = torch.zeros(engine.size, dtype=torch.int64, device=mine.device)
    verbs.allgather(engine, lengths, torch.tensor([mine.numel()], device=mine.device))
    parts = [torch.empty(int(n), dtype=torch.uint8, device=mine.device) for n in lengths]
    verbs.allgather(engine, parts, mine)
    return [_bytes(part) for part in parts]


def _tensor(engine: Engine, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(engine.control_device)


def _bytes(payload: torch.Tensor) -> bytes:
    return payload.cpu().numpy().tobytes()
