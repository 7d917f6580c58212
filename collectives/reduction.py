"""Reduction operations and the dtypes they work on, and the dtypes of verbs that only move data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

#: A caller's name of a reduction: one of COMBINE's names, or torch's ReduceOp.SUM, AVG, MIN, MAX, PRODUCT.
Op = str | dist.ReduceOp.RedOpType

#: (first, second, out=) -> elementwise result in out, which may be either operand. The order of the operands decides the sign
#: of a zero in min and max, so ranks that combine the same two must use the same order.
Combine = Callable[..., object]

COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "average": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}

#: The dtypes that can be reduced.
DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)

#: The dtypes that verbs without a reduction also carry.
MOVED = (
    *DTYPES,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)

#: torch's ops, and our names for them.
TORCH_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "average",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
}

#: A bool is carried as a uint8 of 0 or 1, on which logical or is max and logical and is min.
_BOOL_OPS = {"sum": "max", "max": "max", "product": "min", "min": "min"}


def op_name(rank: int, op: Op) -> str:
    """Return one of 'sum', 'average', 'min', 'max', 'product'. Raises ValueError for anything else."""
    name = op if isinstance(op, str) else TORCH_OPS.get(op) if isinstance(op, Hashable) else None
    if name not in COMBINE:
        raise ValueError(
            f"rank {rank}: op is {op!r}; allowed are {', '.join(map(repr, COMBINE))} and torch's ReduceOp of these names"
        )
    return name


def check_dtype(rank: int, dtype: torch.dtype, allowed: Sequence[torch.dtype] = DTYPES) -> None:
    """Raise TypeError, which lists the allowed dtypes, for any other."""
    if dtype not in allowed:
        raise TypeError(f"rank {rank}: dtype is {dtype}; allowed are {', '.join(map(str, allowed))}")


def check_arithmetic(rank: int, dtype: torch.dtype, op: str, prescale: float = 1.0, postscale: float = 1.0) -> None:
    """Raise TypeError if op or a scale factor is not defined for the dtype."""
    check_dtype(rank, dtype)
    if not isinstance(prescale, int | float) or not isinstance(postscale, int | float):
        raise TypeError(f"rank {rank}: prescale={prescale!r} and postscale={postscale!r}; numbers are needed")
    if dtype is torch.bool and op == "average":
        raise TypeError(
            f"rank {rank}: the average of bool tensors is not defined; allowed are 'sum', 'min', 'max', 'product'"
        )
    if not dtype.is_floating_point and (prescale, postscale) != (1.0, 1.0):
        raise TypeError(
            f"rank {rank}: prescale={prescale} and postscale={postscale} need a floating-point tensor, not {dtype}"
        )


def carried(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """Return the tensor and op that travel in place of these: the same, but uint8 with max or min for bool."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8), _BOOL_OPS[op]
    return tensor, op


def finish(tensor: torch.Tensor, op: str, size: int) -> None:
    """Divide a sum over `size` ranks if op is 'average'. Integer averages truncate toward zero."""
    if op == "average":
        tensor.div_(size, rounding_mode=None if tensor.dtype.is_floating_point else "trunc")


@dataclass(frozen=True)
class Reduction:
    """An op and its factors, as they are applied around an exchange: the contributions times prescale, the result times
    postscale."""

    op: str
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def is_scaled(self) -> bool:
        """Whether a factor is other than 1."""
        return (self.prescale, self.postscale) != (1.0, 1.0)

    def __str__(self) -> str:
        return (
            f"{self.op}, prescale={float(self.prescale)}, postscale={float(self.postscale)}"
            if self.is_scaled
            else self.op
        )

    def begin(self, contribution: torch.Tensor) -> None:
        """Scale this rank's numbers, in place."""
        if self.prescale != 1.0:
            contribution.mul_(self.prescale)

    def end(self, result: torch.Tensor) -> None:
        """Scale the result, in place."""
        if self.postscale != 1.0:
            result.mul_(self.postscale)
