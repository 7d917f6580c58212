"""What can be reduced, and by which codec."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.collectives.compression.codec import Codec
from gradwire.trainer.gradients.arguments import Adasum, Average, Sum, check_group
from gradwire.trainer.gradients.compression import Cast
from gradwire.trainer.horovod.scaling import check_scaling
from gradwire.trainer.rules.adasum import check_adasum
from gradwire.trainer.world.world import here


def check_reducible(
    communicator: Communicator, verb: str, tensors: Sequence[Tensor], op: str, prescale: float, postscale: float
) -> list[Tensor]:
    """Return the tensors of a reduction. Raises TypeError or ValueError for what cannot be reduced."""
    checked = check_group(communicator.rank, verb, tensors)
    check_scaling(communicator.rank, checked, op, prescale, postscale)
    if op == Adasum:
        check_adasum(checked)
    return checked


def summing_codec(compression: Cast | Codec, tensor: Tensor, op: str) -> Codec | None:
    """Return the codec that a tensor is reduced by; None where it is reduced as it is, or cast."""
    if isinstance(compression, Cast):
        return compression.codec(tensor.dtype) if op in (Average, Sum) else None
    if op not in (Average, Sum) or not tensor.dtype.is_floating_point:
        raise ValueError(
            f"{here()}codec {compression.name!r} is for the sum or average of floating-point tensors, not for op {op!r} of "
            f"{tensor.dtype}"
        )
    return compression
