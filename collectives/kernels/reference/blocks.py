"""The common parts of codecs: blocks, their sums and maxima, the sections of a wire, the residual, and random numbers."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from gradwire.collectives.kernels.layout import pad16

#: Integers, or int64 tensors of them.
_Integers = TypeVar("_Integers", int, Tensor)

SMALLEST = 2.0**-100
LARGEST = 2.0**127

#: Partial sums in a block: element e is added to partial e % 128.
PARTIALS = 128


def in_blocks(flat: Tensor, block: int) -> Tensor:
    """Return the numbers as (blocks, block); the last block is padded with 0."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-(-flat.numel() // block), block)


def lengths(numel: int, block: int, device: torch.device) -> Tensor:
    """Return (blocks, 1) float32: how many elements each block has."""
    starts = torch.arange(0, numel, block, device=device, dtype=torch.int64)
    return (numel - starts).clamp(max=block).to(torch.float32).view(-1, 1)


def block_sums(terms: Tensor) -> Tensor:
    """Return (blocks, 1) sums of the rows of (blocks, block), in a fixed order: 128 partial sums, then a tree."""
    partials = terms.new_zeros(len(terms), PARTIALS)
    for row in torch.nn.functional.pad(terms, (0, -terms.shape[1] % PARTIALS)).split(PARTIALS, dim=1):
        partials = partials + row
    sums = (partials[:, 0::4] + partials[:, 1::4]) + (partials[:, 2::4] + partials[:, 3::4])
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums


def corrected(values: Tensor, residual: Tensor | None) -> Tensor:
    """Return the numbers to encode, values or values + residual, as float32 in new memory."""
    return values.to(torch.float32, copy=True) if residual is None else values + residual


def largest_magnitudes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (maximum, finite), each (blocks, 1). The maximum is 0 for a block that is zero or not finite."""
    maximum = blocks.abs().amax(1, keepdim=True)
    finite = maximum < LARGEST  # NaN is not below
    return torch.where(finite & (maximum >= SMALLEST), maximum, torch.zeros_like(maximum)), finite


def quotient(numerator: float, maximum: Tensor) -> Tensor:
    """Return numerator / maximum, or 0 if maximum is 0, by one division: torch computes `number / tensor` by a reciprocal."""
    return torch.where(maximum > 0, torch.full_like(maximum, numerator) / maximum, torch.zeros_like(maximum))


def divided(numbers: Tensor, divisor: float) -> Tensor:
    """Return numbers / divisor, by one division: on a GPU, torch computes `tensor / number` by a multiplication."""
    return numbers / torch.full_like(numbers, divisor)


def sections(wire: Tensor, code_bytes: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales (with their padding) of a wire, as bytes."""
    return wire[:code_bytes], wire[pad16(code_bytes) :]


def write(wire: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write codes, scales and padding into a wire. codes: bytes. scales: of any dtype."""
    wire.zero_()
    code_bytes, scale_bytes = sections(wire, codes.numel())
    code_bytes.copy_(codes)
    scales = scales.contiguous().view(-1).view(torch.uint8)
    scale_bytes[: scales.numel()].copy_(scales)


def with_nan(scales: Tensor, finite: Tensor) -> Tensor:
    """Return the scales, with NaN for blocks that are not finite."""
    return torch.where(finite, scales, torch.full_like(scales, float("nan")))


def keep_loss(residual: Tensor | None, corrected: Tensor, decoded: Tensor) -> None:
    """Set the residual to the encoding error, and to 0 where the decoded number is not finite."""
    if residual is not None:
        residual.copy_(torch.where(decoded.isfinite(), corrected - decoded, torch.zeros_like(decoded)))


def keep_dense_loss(residual: Tensor | None, blocks: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Set the residual to the encoding error of blocks with codes (blocks, block) and scales (blocks, 1)."""
    if residual is not None:
        n = residual.numel()
        keep_loss(residual, blocks.view(-1)[:n], scaled(codes, scales, n))


def put(out: Tensor, decoded: Tensor, add: bool, scale: float) -> None:
    """Set a tensor to decoded * scale, or with `add`, add that to the tensor."""
    out.copy_(out + decoded * scale if add else decoded * scale)


def scaled(codes: Tensor, scales: Tensor, numel: int) -> Tensor:
    """Return codes (blocks, block) float32 times scales (blocks, 1) float32, the first numel of them, flat."""
    return (codes * scales).view(-1)[:numel]


def scales_of(wire: Tensor, code_bytes: int, blocks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the scales of a wire, (blocks, 1) float32."""
    return sections(wire, code_bytes)[1].view(dtype)[:blocks].view(-1, 1).to(torch.float32)


# The random numbers of the codecs: a function of a position and a seed, the same on every kind of processor.


def lowbias32(index: _Integers, seed: int) -> _Integers:
    """Return 32 random bits for an index: Wellons' lowbias32 (2018) of index * 0x9E3779B9 + seed."""
    low = 0xFFFFFFFF
    x = (index * 0x9E3779B9 + seed) & low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & low
    x = ((x ^ (x >> 15)) * 0x846CA68B) & low
    return x ^ (x >> 16)


def random_bits(numel: int, seed: int, device: torch.device) -> Tensor:
    """Return (numel,) int64, 32 random bits for each index."""
    return lowbias32(torch.arange(numel, device=device, dtype=torch.int64), seed)


def uniform(numel: int, seed: int, device: torch.device) -> Tensor:
    """Return (numel,) float32 in [0, 1), in steps of 2^-24."""
    return (random_bits(numel, seed, device) >> 8).to(torch.float32) * 2.0**-24


def stochastic(numbers: Tensor, random: Tensor) -> Tensor:
    """Round numbers to integers (float32), up if the uniform `random` is below the fraction, so that the mean is kept."""
    below = numbers.floor()
    return below + (random < numbers - below)
