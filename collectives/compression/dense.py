"""The dense codecs: one code for every number, written by the kernels of the codec's name.

Codecs that round stochastically are unbiased: correct on average. Codecs with omega >= 1 (TernGrad, and QSGD with its default
blocks) cannot be used with error feedback: the error may exceed the numbers, and the residual then grows from step to step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import CFunctions, Codec, State
from gradwire.collectives.compression.registry import register_codec
from gradwire.collectives.kernels import kernels_for
from gradwire.collectives.kernels.layout import pad16


class ByKernels(Codec):
    """A codec that the kernels of its name write and read. Their parameters are the fields of the codec."""

    def settings(self) -> tuple[Any, ...]:
        """Return the parameters of the kernels."""
        return tuple(vars(self).values())

    def takes_halves(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def c_functions(self) -> CFunctions | None:
        if (type(self)._encode, type(self)._decode) != (ByKernels._encode, ByKernels._decode):
            return None  # a class that others have derived
        kernels = kernels_for(torch.device("cpu"))
        encode, decode = getattr(kernels, f"{self.name}_encode"), getattr(kernels, f"{self.name}_decode")
        return CFunctions(encode.bound(*self.settings()), decode.bound(*self.settings()))

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        encode = getattr(kernels_for(values.device), f"{self.name}_encode")
        encode(values, residual, wire, *self.settings(), seed)

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        getattr(kernels_for(out.device), f"{self.name}_decode")(wire, out, *self.settings(), add, scale)


class Dense(ByKernels):
    """Writes a code of `bits` bits for every number. A wire holds the codes, and zeros up to a multiple of 16 bytes."""

    bits: ClassVar[int]

    def wire_bytes(self, numel: int) -> int:
        return pad16((numel * self.bits + 7) // 8)


class Blocked(Dense):
    """Dense, with a scale for every block of `block` elements, a multiple of 16. Scales follow the codes on the wire.

    If a block has a NaN or Inf, all of it decodes to NaN. Magnitudes of 2^127 and more count as Inf.
    """

    scale_bytes: ClassVar[int] = 4
    block: int

    def __post_init__(self) -> None:
        if self.block <= 0 or self.block % 16:
            raise ValueError(f"{self.name}: block must be a positive multiple of 16, not {self.block}")

    @property
    def alignment(self) -> int:
        return self.block

    def wire_bytes(self, numel: int) -> int:
        return super().wire_bytes(numel) + pad16(self.scale_bytes * -(-numel // self.block))


@register_codec
@dataclass(frozen=True)
class Float16(Dense):
    """IEEE half precision, rounded to nearest even. The largest number is 65504. So if the codes of p ranks are added, each
    rank first divides its numbers by the smallest power of two that is at least p, and later multiplies the sum by it.

    Biased by rounding only. Contraction: 1 - delta <= 2^-22 for magnitudes from 2^-14 to 65504 (relative error at most
    2^-11). Smaller magnitudes have an absolute error of at most 2^-25. Magnitudes of 65520 or more become Inf, and leave no
    residual.
    """

    name: ClassVar[str] = "fp16"
    summable: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.float16
    bits: ClassVar[int] = 16

    def headroom(self, size: int) -> float:
        """Return a power of two of at most 1 / size. It costs numbers near half precision's smallest (6e-8, times the number
        of ranks) some of their bits, and the others none."""
        return 2.0 ** -(size - 1).bit_length()


@register_codec
@dataclass(frozen=True)
class BFloat16(Dense):
    """The upper 16 bits of a float32, rounded to nearest even: the range of float32, with 8 bits of precision.

    Biased by rounding only. Contraction: 1 - delta <= 2^-16 (relative error at most 2^-8).
    """

    name: ClassVar[str] = "bf16"
    summable: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16
    bits: ClassVar[int] = 16


@register_codec
@dataclass(frozen=True)
class Float8(Blocked):
    """8-bit floats with a scale per block of `block` numbers. The scale maps the block's largest magnitude to the largest
    number of the format (448 for e4m3, 57344 for e5m2).

    Rounded to nearest even: biased by rounding only. Contraction: the relative error is at most 2^-4 with e4m3 and 2^-3
    with e5m2, so 1 - delta <= 2^-8 or 2^-6. With the default block, numbers below the format's normal range add less than
    1e-8 to 1 - delta. Formats: Micikevicius et al. 2022 (e4m3 without infinities).
    """

    name: ClassVar[str] = "fp8"
    bits: ClassVar[int] = 8
    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in ("e4m3", "e5m2"):
            raise ValueError(f"fp8: format must be 'e4m3' or 'e5m2', not {self.format!r}")


@register_codec
@dataclass(frozen=True)
class Int8(Blocked):
    """The integer round(c * 127 / m) for each number c of a block, whose largest magnitude is m.

    By default, c * 127 / m is rounded to the nearest integer (half to even). The codec is then biased by rounding only: the
    error is at most m / 254, so 1 - delta <= block / (4 * 127^2), 0.004 for the default block. With stochastic=True, the
    codec is unbiased, and omega <= block / (4 * 127^2), since random rounding has a variance of at most 1/4.
    """

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    block: int = 256
    stochastic: bool = False

    @property
    def omega(self) -> float:
        return self.block / (4 * 127**2) if self.stochastic else 0.0


@register_codec
@dataclass(frozen=True)
class Int4(Blocked):
    """The integer round(c / s) for each number c of a block. s is m / 7, rounded up to bfloat16, so that no integer exceeds
    7; m is the block's largest magnitude.

    By default, c / s is rounded to the nearest integer (half to even). The codec is then biased by rounding only, with
    1 - delta <= block * (1 + 2^-7)^2 / (4 * 7^2), 0.332 for the default block. With stochastic=True, the codec is unbiased,
    and omega has the same bound.
    """

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    scale_bytes: ClassVar[int] = 2
    block: int = 64
    stochastic: bool = False

    @property
    def omega(self) -> float:
        return self.block * (1 + 2**-7) ** 2 / (4 * 7**2) if self.stochastic else 0.0


@register_codec
@dataclass(frozen=True)
class OneBit(Blocked):
    """The sign of each number, with the mean magnitude of its block as the scale (1-bit SGD, Seide et al. 2014; this scale:
    Karimireddy et al. 2019).

    Biased: training converges only with error feedback. Contraction: delta = L1(x)^2 / (d * L2(x)^2) for a block x of d
    elements, at least 1/d, and 2/pi for gaussian numbers. Zero counts as positive, except that a block of zeros stays zero.
    """

    name: ClassVar[str] = "onebit"
    needs_feedback: ClassVar[bool] = True
    bits: ClassVar[int] = 1
    block: int = 1024


@register_codec
@dataclass(frozen=True)
class QSGD(Blocked):
    """The sign of each number c, and the integer |c| * levels / norm, rounded stochastically. norm is the L2 norm of the
    block (Alistarh et al. 2017).

    Unbiased; omega <= min(d / levels^2, sqrt(d) / levels) for blocks of d elements (Lemma 3.1 of the paper).
    """

    name: ClassVar[str] = "qsgd"
    bits: ClassVar[int] = 4
    levels: int = 7
    block: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.levels <= 7:
            raise ValueError(f"qsgd: levels must be from 1 to 7, not {self.levels}")

    @property
    def omega(self) -> float:
        return min(self.block / self.levels**2, math.sqrt(self.block) / self.levels)


@register_codec
@dataclass(frozen=True)
class TernGrad(Blocked):
    """Each number c becomes m * sign(c) with probability |c| / m, and otherwise 0. m is the block's largest magnitude (Wen
    et al. 2017).

    Unbiased; omega = m * L1(x) / L2(x)^2 - 1 <= sqrt(d) - 1 for a block x of d elements.
    """

    name: ClassVar[str] = "terngrad"
    bits: ClassVar[int] = 2
    block: int = 512

    @property
    def omega(self) -> float:
        return math.sqrt(self.block) - 1


@register_codec
@dataclass(frozen=True)
class Natural(Dense):
    """The sign of each number c, and the power of two below or above |c|, chosen at random: one byte (Horvath et al. 2019).

    Unbiased for magnitudes from 2^-76 to 2^49; omega <= 1/8 (Theorem 1 of the paper). Larger magnitudes become 2^49;
    smaller ones become 2^-76 or zero.
    """

    name: ClassVar[str] = "natural"
    bits: ClassVar[int] = 8

    @property
    def omega(self) -> float:
        return 1 / 8
