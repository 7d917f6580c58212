"""Tensors that are the same memory on all ranks of a host: what one of them writes, the others read."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import objects
from gradwire.collectives.errors import CollectiveError, ranks_text
from gradwire.collectives.link.shared_memory.segment import Segment, memory_left
from gradwire.collectives.run.engine import Engine


def shared_empty(engine: Engine, hosts: Sequence[Sequence[int]], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Do as Communicator.shared_empty, for ranks that are on these hosts. Collective."""
    _check_one_host(engine, hosts)
    nbytes = math.prod(shape) * dtype.itemsize
    card: dict[str, Any] = {"wanted": [list(shape), str(dtype)]}
    segment: Segment | None = None
    try:
        if engine.rank == 0 and nbytes:
            name = f"gradwire-{secrets.token_hex(16)}"
            try:
                segment = _reserve(name, nbytes)
                card |= {"pid": os.getpid(), "descriptor": segment.descriptor, "name": name}
            except OSError as error:
                card |= {"why": str(error)}
        first = _card_of_rank_0(engine, card)
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        problem = first.get("why")
        if segment is None and problem is None:
            try:
                segment = Segment.open(first["pid"], first["descriptor"], first["name"], nbytes)
            except OSError as error:
                problem = str(error)
        problems = {rank: why for rank, why in enumerate(objects.allgather_record(engine, problem)) if why is not None}
        if problems or segment is None:
            rank, why = next(iter(problems.items()))
            raise CollectiveError(
                f"there is no memory for all ranks: rank {rank}: {why}", rank=engine.rank, operation="shared_empty"
            )
    except BaseException:
        if segment is not None:
            segment.close()
        raise
    segment.seal_off()
    return _tensor_in(segment, shape, dtype)


def _card_of_rank_0(engine: Engine, card: dict[str, Any]) -> dict[str, Any]:
    """Return what rank 0 says of the memory. Raises ValueError, on all ranks, where these want different ones. Collective."""
    cards: list[dict[str, Any]] = objects.allgather_record(engine, card)
    for rank, theirs in enumerate(cards):
        if theirs["wanted"] != cards[0]["wanted"]:
            raise ValueError(
                f"rank {engine.rank}: shared_empty needs the same shape and dtype on all ranks: rank 0 gave "
                f"{cards[0]['wanted']}, rank {rank} {theirs['wanted']}"
            )
    return cards[0]


def _check_one_host(engine: Engine, hosts: Sequence[Sequence[int]]) -> None:
    """Raise ValueError where there is no memory that all ranks could share; on all ranks alike."""
    if len(hosts) > 1:
        raise ValueError(
            f"rank {engine.rank}: memory can be shared by the ranks of one host only; these are on {len(hosts)} hosts: "
            f"{'; '.join(map(ranks_text, hosts))}"
        )
    if engine.size > 1 and not engine.shares_memory:
        raise ValueError(
            f"rank {engine.rank}: {ranks_text(hosts[0])} are on one host and share no memory: it is switched off "
            "(COLLECTIVES_SHARED_MEMORY=0 on a rank, or another link than 'auto'), or the log of the first rank says why not"
        )


def _reserve(name: str, nbytes: int) -> Segment:
    """Make a segment. Raises OSError where there is too little memory for it."""
    if nbytes > (left := memory_left()):
        raise OSError(errno.ENOMEM, f"{nbytes} bytes of shared memory are wanted, and {left} bytes of memory are left")
    return Segment.create(name, nbytes)


def _tensor_in(segment: Segment, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return all of a segment as a tensor, with which it goes."""
    assert segment.address is not None
    memory = (ctypes.c_uint8 * segment.nbytes).from_address(segment.address)
    weakref.finalize(memory, segment.close).atexit = False
    return torch.frombuffer(memory, dtype=dtype).view(shape)
