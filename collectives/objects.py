"""Picklable objects between ranks: lengths first, then bytes, both by the verbs for tensors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from collectives import arguments, verbs
from collectives.run.engine import Engine


def allgather_object(engine: Engine, obj: Any) -> list[Any]:
    mine = _pickled(engine, obj)
    lengths = torch.zeros(engine.size, dtype=torch.int64, device=mine.device)
    verbs.allgather(engine, lengths, torch.tensor([mine.numel()], device=mine.device))
    parts = [torch.empty(int(n), dtype=torch.uint8, device=mine.device) for n in lengths]
    verbs.allgather(engine, parts, mine)
    return [_unpickled(part) for part in parts]


def broadcast_object(engine: Engine, obj: Any, src: int) -> Any:
    arguments.check_root(engine, "src", src)
    mine = _pickled(engine, obj if engine.rank == src else None)
    length = torch.tensor([mine.numel()], device=mine.device)
    verbs.broadcast(engine, length, src)
    if engine.rank != src:
        mine = torch.empty(int(length), dtype=torch.uint8, device=mine.device)
    verbs.broadcast(engine, mine, src)
    return obj if engine.rank == src else _unpickled(mine)


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
    pieces = [_pickled(engine, obj) for obj in outgoing]
    sent = torch.tensor([piece.numel() for piece in pieces], device=pieces[0].device)
    landed = torch.empty_like(sent)
    verbs.alltoall(engine, landed, sent)
    output = torch.empty(int(landed.sum()), dtype=torch.uint8, device=sent.device)
    verbs.alltoall(engine, output, torch.cat(pieces), landed.tolist(), sent.tolist())
    return [_unpickled(part) for part in output.split(landed.tolist())]


def _pickled(engine: Engine, obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(engine.control_device)


def _unpickled(payload: torch.Tensor) -> Any:
    return pickle.loads(payload.cpu().numpy().tobytes())
