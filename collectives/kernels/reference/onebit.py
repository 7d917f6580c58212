"""The codec onebit: a sign for each number, and a mean magnitude for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference.blocks import (
    block_sums,
    corrected,
    in_blocks,
    keep_dense_loss,
    put,
    scaled,
    scales_of,
    with_nan,
    write,
)
from gradwire.collectives.kernels.reference.digits import pack, unpack

# onebit: scale = mean magnitude of the block, bit = (c >= 0). Not finite: the sum of magnitudes is not.


def _lengths(numel: int, block: int, device: torch.device) -> Tensor:
    """Return (blocks, 1) float32: how many elements each block has."""
    starts = torch.arange(0, numel, block, device=device)
    return (numel - starts).clamp(max=block).to(torch.float32).view(-1, 1)


def onebit_encode(values: Tensor, residual: Tensor | None, wire: Tensor, block: int, seed: int) -> None:
    blocks = in_blocks(corrected(values, residual), block)
    sums = block_sums(blocks.abs())
    finite = sums.isfinite()
    bits = ((blocks >= 0) & finite).to(torch.float32)
    scales = with_nan(sums / _lengths(values.numel(), block, values.device), finite)
    write(wire, pack(bits.view(-1)[: values.numel()], 1), scales)
    keep_dense_loss(residual, blocks, 2 * bits - 1, scales)


def onebit_decode(wire: Tensor, out: Tensor, block: int, add: bool, scale: float) -> None:
    code_bytes = (out.numel() + 7) // 8
    codes = in_blocks(2.0 * unpack(wire[:code_bytes], 1, out.numel()) - 1.0, block)
    put(out, scaled(codes, scales_of(wire, code_bytes, len(codes)), out.numel()), add, scale)
