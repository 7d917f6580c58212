"""Adasum: adds what ranks have in common once, and what they have not in full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from collectives import Communicator


def adasum(communicator: Communicator, tensors: Sequence[Tensor]) -> None:
    """Combine the tensors of all ranks, in place, each tensor by itself, with the same bits on all ranks.

    Two are combined to (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b: their sum where they are orthogonal, their mean where
    they are parallel (Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation", equation 3). More
    ranks are combined in a binary tree of neighbours: (0 with 1) with (2 with 3), and so on, for any number of them.
    The dot products are computed in float64. Rank 0 has the result, and broadcasts it.

    tensors: of floating point, alike on all ranks in number, shape, dtype and device.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.dtype, tensor.device].append(tensor)
    for members in alike.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in members])
        lengths = [tensor.numel() for tensor in members]
        _to_rank_zero(communicator, flat, lengths)
        communicator.broadcast(flat)
        for tensor, part in zip(members, flat.split(lengths), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _to_rank_zero(communicator: Communicator, flat: Tensor, lengths: Sequence[int]) -> None:
    """Have rank 0's `flat` become the result; the others' are left somewhere on the way."""
    rank, size, distance = communicator.rank, communicator.size, 1
    theirs = torch.empty_like(flat)
    while distance < size:
        if rank % (2 * distance):
            communicator.send(flat, rank - distance)
            return
        if rank + distance < size:
            communicator.recv(theirs, rank + distance)
            for mine, other in zip(flat.split(list(lengths)), theirs.split(list(lengths)), strict=True):
                _combine(mine, other)
        distance *= 2


def _combine(a: Tensor, b: Tensor) -> None:
    """Overwrite a with the adaptive sum of a and b."""
    x, y = a.double(), b.double()
    common, of_a, of_b = torch.dot(x, y), torch.dot(x, x), torch.dot(y, y)
    share_a = torch.where(of_a > 0, 1 - common / (2 * of_a), 1.0)
    share_b = torch.where(of_b > 0, 1 - common / (2 * of_b), 1.0)
    a.copy_(share_a * x + share_b * y)
