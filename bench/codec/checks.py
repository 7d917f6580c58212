"""The error bounds of the codecs. `python -m gradwire.bench codec` checks them in every result."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dense import (
    QSGD,
    BFloat16,
    Blocked,
    Float8,
    Float16,
    Int4,
    Int8,
    Natural,
    OneBit,
    TernGrad,
)
from gradwire.collectives.compression.sparse import ChunkTopK, RandomK, Sparse, Threshold
from gradwire.collectives.kernels.layout import CHUNK

#: The bounds hold for real numbers, but codes are computed in float32.
_ROUNDING = 1 + 1e-3
#: The tolerance of a float32 sum, relative to the magnitudes of its terms.
_ULP = 2.0**-23


def count_outside(codec: Codec, values: Tensor, decoded: Tensor) -> int:
    """Count the decoded numbers outside the codec's bound for `values` (float32, finite, whole blocks).

    Raises TypeError if no bound is known.
    """
    if isinstance(codec, ChunkTopK):
        return _count_unlike_in_chunks(codec, values.view(-1, CHUNK), decoded.view(-1, CHUNK))
    if isinstance(codec, Sparse):
        return _count_unlike(codec, values, decoded)
    if isinstance(codec, OneBit):
        blocks, decoded = values.view(-1, codec.block), decoded.view(-1, codec.block)
        mean = blocks.abs().mean(1, keepdim=True, dtype=torch.float64).to(torch.float32)
        return _count_above((torch.copysign(mean, blocks) - decoded).abs_(), mean * (_ROUNDING - 1))
    shape = (-1, codec.block if isinstance(codec, Blocked) else values.numel())
    error, values = (values - decoded).abs_().view(shape), values.view(shape)
    return _count_above(error, _largest_error(codec, values) * _ROUNDING)


def count_unequal(result: Tensor, expected: Tensor, terms: Tensor) -> int:
    """Count the elements that differ by more than the rounding of a sum. terms: the sum of its terms' magnitudes."""
    return _count_above((result - expected).abs_(), terms * _ULP)


def relative_error(values: Tensor, decoded: Tensor) -> float:
    """Return |values - decoded| / |values| in L2 norms, in float64."""
    exact = values.to(torch.float64)
    return float(torch.linalg.vector_norm(exact - decoded) / torch.linalg.vector_norm(exact))


def _count_above(errors: Tensor, bound: Tensor) -> int:
    """Count the errors above their bounds; NaN counts."""
    return errors.numel() - int((errors <= bound).sum())


def _largest_error(codec: Codec, blocks: Tensor) -> Tensor:
    """Return the bound of every number's error: (blocks, 1) if it is equal in each block, else (blocks, block)."""
    if isinstance(codec, Float16):
        return blocks.abs().mul_(2.0**-11).add_(2.0**-25)
    if isinstance(codec, BFloat16):
        return blocks.abs().mul_(2.0**-8)
    if isinstance(codec, Natural):
        return blocks.abs().add_(2.0**-76)
    if isinstance(codec, QSGD):
        norm: Tensor = torch.linalg.vector_norm(blocks, dim=1, keepdim=True)
        return norm / codec.levels
    maximum = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
    if isinstance(codec, Float8):
        relative, least = (2.0**-4, 2.0**-10 / 448) if codec.format == "e4m3" else (2.0**-3, 2.0**-17 / 57344)
        return blocks.abs().mul_(relative).add_(maximum * least)
    if isinstance(codec, TernGrad):
        return maximum
    if isinstance(codec, Int8 | Int4):
        step = maximum / 127 if isinstance(codec, Int8) else maximum / 7 * (1 + 2**-7)
        return step if codec.stochastic else step / 2
    raise TypeError(f"no bound is known of {codec}")


def _count_unlike(codec: Sparse, values: Tensor, decoded: Tensor) -> int:
    """Count the violations of a sparse code: numbers must be sent exactly or not at all, as many as the codec's count,
    and the largest ones unless they are drawn at random."""
    sent = decoded != 0
    unlike = int((sent & (decoded != values)).sum())
    k, slack = codec.count(values.numel()), codec.slack(values.numel()) if isinstance(codec, Threshold) else 0
    slack += int((values == 0).sum())  # a zero looks the same, sent or not
    unlike += max(0, abs(int(sent.sum()) - k) - slack)
    if isinstance(codec, RandomK):
        return unlike
    magnitudes = values.abs()
    least = float(magnitudes.masked_fill(~sent, math.inf).min())
    return unlike + int(((magnitudes > least) & ~sent).sum())


def _count_unlike_in_chunks(codec: ChunkTopK, chunks: Tensor, decoded: Tensor) -> int:
    """Count the violations in chunks, one per row: the k largest numbers must be sent, with their signs, and with
    magnitudes up to the largest one."""
    sent, magnitudes = decoded != 0, chunks.abs()
    unlike = int((sent.sum(1) - codec.k).abs().sum())
    unlike += int((sent & (decoded.sign() != chunks.sign())).sum())
    unlike += int((sent & ~(decoded.abs() <= magnitudes.amax(1, keepdim=True) * (1 + 2.0**-8))).sum())
    least = magnitudes.masked_fill(~sent, math.inf).amin(1, keepdim=True)
    return unlike + int(((magnitudes > least) & ~sent).sum())
