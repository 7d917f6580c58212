"""The verbs for objects: they send lengths, then bytes, by the verbs for tensors. Records are sent as JSON, other objects
pickled."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import arguments
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.verbs import movement


def allgather_record(engine: Engine, record: Any) -> list[Any]:
    """Run Communicator.allgather_record."""
    return [json.loads(data) for data in _allgather(engine, json.dumps(record).encode())]


def allgather_object(engine: Engine, obj: Any) -> list[Any]:
    """Run Communicator.allgather_object."""
    return [pickle.loads(data) for data in _allgather(engine, pickle.dumps(obj))]


def broadcast_object(engine: Engine, obj: Any, src: int) -> Any:
    """Run Communicator.broadcast_object."""
    arguments.check_root(engine, "src", src)
    is_root = engine.rank == src
    mine = _tensor(engine, pickle.dumps(obj if is_root else None))
    length = _numbers(engine, mine.numel())
    _read(engine, movement.broadcast, length, length, src, "auto")
    if not is_root:
        mine = mine.new_empty(int(length))
    _read(engine, movement.broadcast, mine, mine, src, "auto")
    return obj if is_root else pickle.loads(_bytes(mine))


def gather_object(engine: Engine, obj: Any, dst: int) -> list[Any] | None:
    """Run Communicator.gather_object."""
    arguments.check_root(engine, "dst", dst)
    mine = _tensor(engine, pickle.dumps(obj))
    lengths = _lengths(engine, mine)
    padded = _padded(mine, max(lengths))
    parts = [torch.empty_like(padded) for _ in lengths] if engine.rank == dst else []
    _read(engine, movement.gather, padded, parts, dst, "auto")
    if engine.rank != dst:
        return None
    return [pickle.loads(_bytes(part[:length])) for part, length in zip(parts, lengths, strict=True)]


def scatter_object(engine: Engine, objs: Sequence[Any] | None, src: int) -> Any:
    """Run Communicator.scatter_object."""
    arguments.check_root(engine, "src", src)
    if engine.rank != src:
        objs = ()
    elif objs is None or len(objs) != engine.size:
        raise ValueError(
            f"rank {engine.rank}: scatter_object needs {engine.size} objects on rank src={src}, not {objs!r}"
        )
    pieces = [_tensor(engine, pickle.dumps(obj)) for obj in objs]
    longest = max((piece.numel() for piece in pieces), default=0)
    head = _numbers(engine, 0, 0)
    _read(engine, movement.scatter, [_numbers(engine, piece.numel(), longest) for piece in pieces], head, src, "auto")
    length, longest = head.tolist()
    mine = torch.empty(longest, dtype=torch.uint8, device=head.device)
    _read(engine, movement.scatter, [_padded(piece, longest) for piece in pieces], mine, src, "auto")
    return pickle.loads(_bytes(mine[:length]))


def _read(engine: Engine, *call: Any) -> None:
    """Run a call of a verb whose result the host reads. On a GPU, it waits for the call itself, which may fail there."""
    work = engine.call(*call)
    if engine.control_device != "cpu":
        work.wait(math.inf)  # until the call's own deadline


def _allgather(engine: Engine, data: bytes) -> list[bytes]:
    """Return every rank's bytes, in rank order."""
    mine = _tensor(engine, data)
    parts = [mine.new_empty(length) for length in _lengths(engine, mine)]
    _read(engine, movement.allgather, mine, parts, "auto")
    return [_bytes(part) for part in parts]


def _lengths(engine: Engine, mine: Tensor) -> list[int]:
    """Return the number of elements of every rank's tensor, in rank order."""
    lengths = _numbers(engine, *[0] * engine.size)
    _read(engine, movement.allgather, _numbers(engine, mine.numel()), lengths, "auto")
    numbers: list[int] = lengths.tolist()
    return numbers


def _numbers(engine: Engine, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=engine.control_device)


def _tensor(engine: Engine, data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(engine.control_device)


def _padded(payload: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(payload, (0, length - payload.numel()))


def _bytes(payload: Tensor) -> bytes:
    return payload.cpu().numpy().tobytes()
