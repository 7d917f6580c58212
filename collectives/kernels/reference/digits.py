"""Small integers ("digits") packed into a few bits each, and unpacked."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference.blocks import in_blocks


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return integers as so many bits each, the first in the lowest of a byte; the last byte is filled with zeros."""
    per_byte = 8 // bits
    digits = in_blocks(codes.to(torch.int64) & (2**bits - 1), per_byte)
    shifts = torch.arange(per_byte, device=codes.device) * bits
    return digits.bitwise_left_shift(shifts).sum(1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the (numel,) unsigned integers that pack() was given, int64."""
    shifts = torch.arange(8 // bits, device=packed.device) * bits
    codes: Tensor = packed.to(torch.int64).view(-1, 1).bitwise_right_shift(shifts) & (2**bits - 1)
    return codes.view(-1)[:numel]


def signed(codes: Tensor, bits: int) -> Tensor:
    """Return two's complement integers as float32."""
    return torch.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes).to(torch.float32)
