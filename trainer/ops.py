"""Names of the reductions, and Horovod's older way to choose between two of them."""

from __future__ import annotations

import warnings
from typing import Final

from trainer.world import here

Average: Final = "average"
Sum: Final = "sum"
Min: Final = "min"
Max: Final = "max"
Product: Final = "product"
Adasum: Final = "adasum"

OPS: Final = (Average, Sum, Min, Max, Product)


def resolve_op(op: str | None, average: bool | None) -> str:
    """Return the reduction that Horovod's pair of arguments means: Average where neither is given.

    Raises ValueError for an unknown op, and where both are given.
    """
    if average is not None:
        if op is not None:
            raise ValueError(f"{here()}give op or average, not both (op={op!r}, average={average!r})")
        warnings.warn("average= is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is None:
        return Average
    if op not in OPS:
        raise ValueError(f"{here()}op must be one of {', '.join(OPS)}, not {op!r}")
    return op
