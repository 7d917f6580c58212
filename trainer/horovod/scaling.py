"""Tensors times the factors that verbs take before and after a reduction."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradwire.collectives.reduction import check_arithmetic
from gradwire.trainer.gradients.arguments import Average, Sum


def scaled(tensor: Tensor, factor: float, divisor: int = 1) -> Tensor:
    """Return tensor * factor / divisor in the tensor's dtype, without history; the tensor itself where both are 1.

    Integers are multiplied and divided in float64 and then truncated toward zero, as Horovod does; those beyond 2**53
    are rounded to float64 first.
    """
    tensor = tensor.detach()
    if factor == divisor == 1:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor * (factor / divisor)
    return tensor.double().mul_(factor).div_(divisor).to(tensor.dtype)


def scales_integers(tensors: Iterable[Tensor], prescale: float, postscale: float) -> bool:
    """Return whether factors other than 1 meet integers, which a Communicator does not multiply."""
    return (prescale, postscale) != (1, 1) and any(_is_integer(tensor) for tensor in tensors)


def unscaled(op: str, postscale: float, size: int) -> tuple[str, float, int]:
    """Return the op whose result, times a factor and divided by a divisor, is that of op and postscale; and these two.

    So an average of integers times a factor is truncated once.
    """
    return (Sum, postscale, size) if op == Average else (op, postscale, 1)


def check_scaling(rank: int, tensors: Iterable[Tensor], op: str, prescale: float, postscale: float) -> None:
    """Raise TypeError where op or a factor means nothing for a tensor's dtype."""
    are_numbers = isinstance(prescale, int | float) and isinstance(postscale, int | float)
    for tensor in tensors:
        factors = (1.0, 1.0) if are_numbers and _is_integer(tensor) else (prescale, postscale)
        check_arithmetic(rank, tensor.dtype, op, *factors)


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype is not torch.bool
