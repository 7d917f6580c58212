"""Memory that ranks of a host share: tensors that all of them read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.errors import CollectiveError, ranks_text
from gradwire.collectives.reduction import check_dtype
from gradwire.collectives.transports.shared_memory.segment import Segment, memory_left
from gradwire.collectives.verbs.objects import allgather_record


def shape_of(engine: Engine, shape: Sequence[int | Sequence[int]], dtype: torch.dtype) -> tuple[int, ...]:
    """Return a shape that is given as for torch.empty. Raises TypeError for a dtype that is not carried."""
    check_dtype(engine.rank, dtype)
    made: Any = torch.empty
    return tuple(made(*shape, device="meta", dtype=dtype).shape)


def shared_empty(engine: Engine, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Run Communicator.shared_empty."""
    _check_one_host(engine)
    nbytes = math.prod(shape) * dtype.itemsize
    card: dict[str, Any] = {"wanted": [list(shape), str(dtype)]}
    with ExitStack() as offers, ExitStack() as made:
        if engine.rank == 0 and nbytes:
            card |= {"why": why} if (why := _lack(nbytes)) else offers.enter_context(Segment.offered(nbytes))
        cards: list[dict[str, Any]] = allgather_record(engine, card)
        for rank, theirs in enumerate(cards):
            if theirs["wanted"] != cards[0]["wanted"]:
                raise ValueError(
                    f"rank {engine.rank}: shared_empty needs the same shape and dtype on all ranks: rank 0 gave "
                    f"{cards[0]['wanted']}, rank {rank} {theirs['wanted']}"
                )
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        problem: str | None = None
        try:
            segment = Segment.take(cards[0], nbytes)
            made.callback(segment.close)
        except OSError as error:
            problem = str(error)
        problems = {rank: why for rank, why in enumerate(allgather_record(engine, problem)) if why is not None}
        if problems:
            rank, why = next(iter(problems.items()))
            raise CollectiveError(
                f"no memory can be shared by all ranks: rank {rank}: {why}", rank=engine.rank, operation="shared_empty"
            )
        made.pop_all()
    return segment.tensor(shape, dtype, segment.close)


def _check_one_host(engine: Engine) -> None:
    """Raise ValueError, on all ranks, if they cannot all share memory."""
    hosts = engine.schedules.topology.hosts
    if len(hosts) > 1:
        raise ValueError(
            f"rank {engine.rank}: memory can be shared by the ranks of one host only; these are on {len(hosts)} hosts: "
            f"{'; '.join(map(ranks_text, hosts))}"
        )
    if engine.size > 1 and not engine.can.shares_memory:
        raise ValueError(
            f"rank {engine.rank}: {ranks_text(hosts[0])} are on one host but share no memory: it is turned off "
            "(COLLECTIVES_SHARED_MEMORY=0 on a rank, or another link than 'auto'), or the log of the first rank says why"
        )


def _lack(nbytes: int) -> str:
    """Return why this host has too little memory for a segment; empty if it has enough."""
    try:
        left = memory_left()
    except OSError as error:
        return str(error)
    both = f"{nbytes} bytes of shared memory are wanted, and {left} bytes of memory are left"
    return both if nbytes > left else ""
