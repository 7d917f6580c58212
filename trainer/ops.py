"""Names of the reductions, and Horovod's older way to choose between two of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

from trainer.world import here

Average: Final = "average"
Sum: Final = "sum"
Min: Final = "min"
Max: Final = "max"
Product: Final = "product"
Adasum: Final = "adasum"

OPS: Final = (Average, Sum, Min, Max, Product, Adasum)
OPS_BY_ELEMENT: Final = (Average, Sum, Min, Max, Product)
"""Those whose result has each element from that element alone, so that ranks can have parts of it."""


def resolve_op(op: str | None, average: bool | None = None, allowed: Sequence[str] = OPS) -> str:
    """Return the reduction that Horovod's pair of arguments means: Average where neither is given.

    Raises ValueError for an op that is not allowed, and where both are given.
    """
    if average is not None:
        if op is not None:
            raise ValueError(f"{here()}give op or average, not both (op={op!r}, average={average!r})")
        warnings.warn("average= is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in allowed:
        raise ValueError(f"{here()}op must be one of {', '.join(allowed)}, not {op!r}")
    return op
