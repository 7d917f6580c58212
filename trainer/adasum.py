"""Adasum: a sum that adds less of what the gradients of several ranks have in common.

Two gradients that are orthogonal are added, two that are equal are averaged, and all between is between:

    adasum(a, b) = (1 - a.b / (2 a.a)) a  +  (1 - a.b / (2 b.b)) b

(Maleki et al. 2020, "Scaling distributed training with adaptive summation"). More ranks go up a binary tree, ranks 0 and
1, 2 and 3, and so on, then the results of these; where their number is no power of two, the last ones are added to those
before them first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from collectives import Communicator
from trainer.ops import Adasum
from trainer.world import here

Pair = tuple[int, int]


def check_adasum(tensors: Sequence[Tensor]) -> None:
    """Raise TypeError unless all tensors are of floating point."""
    for tensor in tensors:
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{here()}op={Adasum!r} needs floating-point tensors, not {tensor.dtype}")


def adasum_(communicator: Communicator, tensors: Sequence[Tensor], prescale: float, postscale: float) -> None:
    """Replace each tensor by its Adasum over the ranks, times postscale, of what they have times prescale.

    The tensors are of floating point. All that is computed is computed in float64, and rounded once, at the end; every
    rank gets the same bits. A rank sends about as much as in an allreduce, and needs some 24 bytes an element meanwhile.
    """
    fused: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        fused.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in fused.values():
        _adasum_fused(communicator, group, prescale, postscale)


def _adasum_fused(communicator: Communicator, tensors: Sequence[Tensor], prescale: float, postscale: float) -> None:
    """Do so with tensors of one dtype on one device.

    A rank gets its chunk of all ranks' tensors, end to end, and goes up the tree with that; only the dot products, of
    which it has the chunk's share, are added over the ranks on the way.
    """
    size = communicator.size
    numels = [tensor.numel() for tensor in tensors]
    chunk = -(-sum(numels) // size)
    flat = tensors[0].new_zeros(size * chunk)
    torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=flat[: sum(numels)])
    chunks = torch.empty_like(flat)
    communicator.alltoall(chunks, flat)
    vectors = chunks.view(size, chunk).double() * prescale
    parts = _parts(numels, communicator.rank * chunk, chunk)
    for pairs in tree(size):
        _add_pairs(communicator, vectors, parts, pairs)
    communicator.allgather(flat, (vectors[0] * postscale).to(flat.dtype))
    for tensor, values in zip(tensors, flat[: sum(numels)].split(numels), strict=True):
        tensor.detach().copy_(values.view(tensor.shape))


def _add_pairs(communicator: Communicator, vectors: Tensor, parts: list[int], pairs: Sequence[Pair]) -> None:
    """Replace the first vector of each pair by the Adasum of both. parts: the elements of every tensor in a vector."""
    firsts = [first for first, _ in pairs]
    a, b = vectors[firsts], vectors[[second for _, second in pairs]]
    dots = torch.stack([_sums(a * b, parts), _sums(a * a, parts), _sums(b * b, parts)])
    communicator.allreduce(dots)
    lengths = torch.tensor(parts, device=vectors.device)
    of_a, of_b = (
        torch.where(squares > 0, 1 - dots[0] / (2 * squares), 1.0).repeat_interleave(lengths, dim=1)
        for squares in dots[1:]
    )
    vectors[firsts] = of_a * a + of_b * b


def tree(size: int) -> Iterator[list[Pair]]:
    """Yield, from the leaves up, which vectors are added to which: pairs (where the result is, what is added)."""
    power = 1 << (size.bit_length() - 1)
    if rest := size - power:
        yield [(power - rest + i, power + i) for i in range(rest)]
    distance = 1
    while distance < power:
        yield [(first, first + distance) for first in range(0, power, 2 * distance)]
        distance *= 2


def _parts(numels: Sequence[int], start: int, length: int) -> list[int]:
    """Return how many elements of each tensor, and of what pads them, lie in a chunk of all of them end to end."""
    parts, end = [], 0
    for numel in numels:
        begin, end = end, end + numel
        parts.append(max(0, min(end, start + length) - max(begin, start)))
    return [*parts, length - sum(parts)]


def _sums(products: Tensor, parts: list[int]) -> Tensor:
    return torch.stack([part.sum(-1) for part in products.split(parts, dim=1)], dim=-1)
