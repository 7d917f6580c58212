"""Memory that ranks of a host share: tensors that all of them read and write."""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
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
    segment: Segment | None = None
    try:
        if engine.rank == 0 and nbytes:
            segment, offer = Segment.offer(nbytes, _reserve)
            card |= offer
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
            segment = segment or Segment.take(cards[0], nbytes)
        except OSError as error:
            problem = str(error)
        problems = {rank: why for rank, why in enumerate(allgather_record(engine, problem)) if why is not None}
        if problems or segment is None:
            rank, why = next(iter(problems.items()))
            raise CollectiveError(
                f"no memory can be shared by all ranks: rank {rank}: {why}", rank=engine.rank, operation="shared_empty"
            )
    except BaseException:
        if segment is not None:
            segment.close()
        raise
    segment.seal_off()
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


def _reserve(name: str, nbytes: int) -> Segment:
    """Make a segment. Raises OSError if there is too little memory."""
    if nbytes > (left := memory_left()):
        raise OSError(errno.ENOMEM, f"{nbytes} bytes of shared memory are wanted, and {left} bytes of memory are left")
    return Segment.create(name, nbytes)
