"""Memory that ranks of a host share: buffers that they allreduce in place, and tensors that all of them read and write."""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.errors import CollectiveError, ranks_text
from gradwire.collectives.reduction import check_dtype
from gradwire.collectives.transports.shared_memory.segment import Segment, memory_left
from gradwire.collectives.verbs import Verbs


class SharedTensors(Verbs):
    """The ways to make tensors in memory that ranks share."""

    @property
    def shares_memory(self) -> bool:
        """Return whether this rank exchanges CPU tensors with other ranks of its host through shared memory."""
        return self._engine.can.shares_memory

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised CPU tensor that ranks of one host allreduce without a copy, from its second allreduce on.

        Make the tensor once and reuse it. The shape is given as for torch.empty. Not a collective call, but every rank
        should pass a tensor that it made with empty() to the allreduce. The memory is reserved at once, and freed with the
        tensor. After a fork, parent and child share its contents. The result is an ordinary tensor if the ranks are on
        several hosts or cannot share memory, or if the group also has NCCL. It is also an ordinary tensor if 256 such tensors
        exist already, or if too little memory is left.

        Raises TypeError for a dtype that is not supported.
        """
        return self._engine.empty(self._shape(shape, dtype), dtype)

    def shared_empty(self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a CPU tensor of zeros that is the same memory on all ranks of one host. A collective call.

        All ranks see what one writes; only barriers order their accesses. The shape is given as for torch.empty. Each rank has
        the memory for as long as it keeps the tensor, even if other ranks end or the Communicator is closed.

        Raises, on all ranks, ValueError if they are on several hosts, share no memory, or give different arguments, and
        CollectiveError if there is too little memory. Raises TypeError for a dtype that is not supported.
        """
        size = self._shape(shape, dtype)
        self._check_one_host()
        nbytes = math.prod(size) * dtype.itemsize
        card: dict[str, Any] = {"wanted": [list(size), str(dtype)]}
        segment: Segment | None = None
        try:
            if self.rank == 0 and nbytes:
                segment, offer = Segment.offer(nbytes, _reserve)
                card |= offer
            first = self._card_of_rank_0(card)
            if nbytes == 0:
                return torch.empty(size, dtype=dtype, device="cpu")
            problem: str | None = None
            try:
                segment = segment or Segment.take(first, nbytes)
            except OSError as error:
                problem = str(error)
            problems = {rank: why for rank, why in enumerate(self.allgather_record(problem)) if why is not None}
            if problems or segment is None:
                rank, why = next(iter(problems.items()))
                raise CollectiveError(
                    f"no memory can be shared by all ranks: rank {rank}: {why}",
                    rank=self.rank,
                    operation="shared_empty",
                )
        except BaseException:
            if segment is not None:
                segment.close()
            raise
        segment.seal_off()
        return segment.tensor(size, dtype, segment.close)

    def _shape(self, shape: Any, dtype: torch.dtype) -> tuple[int, ...]:
        """Return a shape as torch.empty takes it. Raises TypeError for a dtype that is not carried."""
        check_dtype(self.rank, dtype)
        return tuple(torch.empty(*shape, device="meta", dtype=dtype).shape)

    def _card_of_rank_0(self, card: dict[str, Any]) -> dict[str, Any]:
        """Return rank 0's description of the memory. Raises ValueError, on all ranks, if their shapes or dtypes differ.
        Collective."""
        cards: list[dict[str, Any]] = self.allgather_record(card)
        for rank, theirs in enumerate(cards):
            if theirs["wanted"] != cards[0]["wanted"]:
                raise ValueError(
                    f"rank {self.rank}: shared_empty needs the same shape and dtype on all ranks: rank 0 gave "
                    f"{cards[0]['wanted']}, rank {rank} {theirs['wanted']}"
                )
        return cards[0]

    def _check_one_host(self) -> None:
        """Raise ValueError, on all ranks, if they cannot all share memory."""
        hosts = self._engine.plans.topology.hosts
        if len(hosts) > 1:
            raise ValueError(
                f"rank {self.rank}: memory can be shared by the ranks of one host only; these are on {len(hosts)} hosts: "
                f"{'; '.join(map(ranks_text, hosts))}"
            )
        if self.size > 1 and not self.shares_memory:
            raise ValueError(
                f"rank {self.rank}: {ranks_text(hosts[0])} are on one host but share no memory: it is turned off "
                "(COLLECTIVES_SHARED_MEMORY=0 on a rank, or another link than 'auto'), or the log of the first rank says why"
            )


def _reserve(name: str, nbytes: int) -> Segment:
    """Make a segment. Raises OSError if there is too little memory."""
    if nbytes > (left := memory_left()):
        raise OSError(errno.ENOMEM, f"{nbytes} bytes of shared memory are wanted, and {left} bytes of memory are left")
    return Segment.create(name, nbytes)
