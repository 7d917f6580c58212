"""Data whose exact result is known: whole numbers, different on every rank, that no dtype rounds.

The data of a rank repeats a *tile* of PERIOD numbers. PERIOD is prime, so no chunk or segment boundary coincides with
it, and a piece in the wrong place differs from the right one. No number is 0 (except of bool), so memory that was
zeroed and never written counts as wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

PERIOD = 4093
LARGEST = 1 << 20
FACTORS = (2, 3, 5)
_ADDING = ("sum", "average")
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda every: every.sum(0),
    "min": lambda every: every.amin(0),
    "max": lambda every: every.amax(0),
    "product": lambda every: every.prod(0),
}


def _random(high: int, seed: int) -> torch.Tensor:
    """Return whole numbers in [0, high), the same on every rank: int64, (PERIOD,)."""
    return torch.randint(0, high, (PERIOD,), generator=torch.Generator().manual_seed(seed))


def exact_limit(dtype: torch.dtype) -> int:
    """Return the number up to which all whole numbers are exact in `dtype`: 256 for bfloat16, 127 for int8."""
    if dtype == torch.bool:
        return 1
    return round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def check_size(size: int, op: str, dtype: torch.dtype) -> None:
    """Raise ValueError if a sum over `size` ranks cannot be exact in `dtype`, even if every rank contributes 1."""
    limit = exact_limit(dtype)
    if op in _ADDING and dtype != torch.bool and size > limit:
        raise ValueError(
            f"{op} of {dtype} over {size} ranks would overflow or round, and could not be checked: at most {limit} ranks are "
            f"allowed with {dtype}"
        )


def own_tile(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tile of `rank` if nothing is reduced. It differs from every other rank's, as far as `dtype` has enough
    numbers.

    Returns:
        int64 of shape (PERIOD,).
    """
    limit = min(exact_limit(dtype), LARGEST)
    if dtype == torch.bool:
        return (_random(2, seed=0) + rank) % 2
    return 1 + (_random(limit, seed=0) + rank) % limit


def contribution_tile(rank: int, size: int, op: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the tile that `rank` contributes to a reduction over `size` ranks.

    sum, average, min, max: a number that all ranks share, plus 0, 1, ... in the order of the ranks, which begins at a
    random rank for each element. So the extremes are on varying ranks. product: 1, except on one rank per element,
    which has 2, 3 or 5. bool: in each element, one rank differs from all others.

    Returns:
        int64 of shape (PERIOD,).

    Raises:
        ValueError: a sum over `size` ranks cannot be exact in `dtype`.
    """
    check_size(size, op, dtype)
    owner = _random(size, seed=1)
    if dtype == torch.bool:
        owned = owner == rank
        return (owned if op in ("sum", "max") else ~owned).long()
    if op == "product":
        return torch.where(owner == rank, torch.tensor(FACTORS)[_random(len(FACTORS), seed=2)], 1)
    share = min(exact_limit(dtype) // (size if op in _ADDING else 1), LARGEST)
    turns = min(size, (share + 1) // 2)
    return 1 + _random(share - turns + 1, seed=0) + (owner + rank) % turns


def reduced_tile(size: int, op: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the exact reduction of all ranks' contributions, computed on this rank alone.

    Returns:
        float64 for the average of floats, else int64, of shape (PERIOD,).
    """
    every = torch.stack([contribution_tile(rank, size, op, dtype) for rank in range(size)])
    if op == "average":
        total = every.sum(0)
        return total.double() / size if dtype.is_floating_point else total.div(size, rounding_mode="trunc")
    if op == "sum" and dtype == torch.bool:
        return every.amax(0)
    return REDUCTIONS[op](every)


def expand(tile: torch.Tensor, start: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the elements [start, start + count) of the endless repetition of a tile."""
    turned = tile.roll(-(start % PERIOD)).to(device, dtype)
    return turned.repeat(-(-count // PERIOD))[:count]


def count_wrong(output: torch.Tensor, expected: torch.Tensor) -> int:
    """Count the elements that are not equal to the expected ones; NaN is never equal."""
    return int((output != expected).sum())
