"""The codecs in torch's own operations, without our kernels: the peers in `python -m gradwire.bench codec`.

They are as fast as we could write them: temporaries are kept from call to call (or allocated in each, for comparison),
maxima need no pass for magnitudes, and bits are packed as the lanes of wider integers. The number of elements is a
multiple of the block. Work beyond the code is omitted: only randomk handles NaN, and sparse indices are not sorted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.kernels.layout import CHUNK

#: The least maximum or norm of a block, so that nothing is divided by 0.
_LEAST = 1e-30


class Contender(ABC):
    """Encodes `numel` float32 numbers by a codec, keeps the last code, and decodes it.

    keeps: whether temporaries are kept from call to call.
    """

    def __init__(self, codec: Any, numel: int, device: torch.device, *, keeps: bool = True) -> None:
        self.codec, self.numel, self.device, self._keeps = codec, numel, device, keeps
        self._tensors: dict[str, Tensor] = {}
        self.prepare()

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Make the tables and the state that the codec needs."""

    def temporary(self, name: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialized tensor (numel,); with keeps, the same one in all calls with the name."""
        if name not in self._tensors or not self._keeps:
            self._tensors[name] = torch.empty(numel, dtype=dtype, device=self.device)
        return self._tensors[name]

    def restart(self) -> None:  # noqa: B027 - most have nothing to forget
        """Reset the state that belongs to the residual, when the residual is restored."""

    @abstractmethod
    def encode(self, values: Tensor) -> None: ...

    @abstractmethod
    def encode_ef(self, values: Tensor, residual: Tensor) -> None:
        """Encode values + residual, and set residual to the error."""

    @abstractmethod
    def decode(self, out: Tensor) -> None: ...

    @abstractmethod
    def decode_add(self, out: Tensor) -> None: ...


class DensePeer(Contender):
    """Has a code for every number, which decodes to numbers() times its block's scale. scales: (blocks, 1)."""

    codes: Tensor
    scales: Tensor | None = None

    def numbers(self, out: Tensor) -> None:
        """Write the numbers of the codes, not yet scaled."""
        out.copy_(self.codes)

    def encode_ef(self, values: Tensor, residual: Tensor) -> None:
        self.encode(residual.add_(values))
        self._add(residual, -1)

    def decode(self, out: Tensor) -> None:
        self.numbers(out)
        if self.scales is not None:
            out.view(len(self.scales), -1).mul_(self.scales)

    def decode_add(self, out: Tensor) -> None:
        self._add(out, 1)

    def _add(self, out: Tensor, sign: int) -> None:
        numbers = self.temporary("numbers", self.numel)
        self.numbers(numbers)
        if self.scales is None:
            out.add_(numbers, alpha=sign)
        else:
            blocks = len(self.scales)
            out.view(blocks, -1).addcmul_(numbers.view(blocks, -1), self.scales, value=sign)

    def scaled(self, values: Tensor, factors: Tensor) -> Tensor:
        """Return values times the factor of their block, in a temporary. factors: (blocks, 1)."""
        blocks = len(factors)
        product = self.temporary("scaled", self.numel)
        torch.mul(values.view(blocks, -1), factors, out=product.view(blocks, -1))
        return product

    def random(self) -> Tensor:
        return self.temporary("random", self.numel).uniform_()

    def rounded(self, numbers: Tensor) -> Tensor:
        """Round numbers in place, at random or to the nearest integer as the codec does."""
        return numbers.add_(self.random()).floor_() if self.codec.stochastic else numbers.round_()


def largest(blocks: Tensor) -> Tensor:
    """Return each block's largest magnitude, (blocks, 1). An amax of magnitudes is slower, since it writes them
    first."""
    return torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True)).clamp_(min=_LEAST)


class CastPeer(DensePeer):
    def encode(self, values: Tensor) -> None:
        self.codes = self.temporary("codes", self.numel, self.codec.wire_dtype).copy_(values)


class Float8Peer(DensePeer):
    def encode(self, values: Tensor) -> None:
        dtype = torch.float8_e4m3fn if self.codec.format == "e4m3" else torch.float8_e5m2
        maximum, limit = largest(values.view(-1, self.codec.block)), torch.finfo(dtype).max
        self.scales = maximum / limit
        numbers = self.scaled(values, limit / maximum).clamp_(-limit, limit)
        self.codes = self.temporary("codes", self.numel, dtype).copy_(numbers)


class Int8Peer(DensePeer):
    def encode(self, values: Tensor) -> None:
        maximum = largest(values.view(-1, self.codec.block))
        self.scales = maximum / 127
        numbers = self.rounded(self.scaled(values, 127 / maximum))
        self.codes = self.temporary("codes", self.numel, torch.int8).copy_(numbers.clamp_(-127, 127))


class NibblePeer(DensePeer):
    """Packs two integers from -8 to 7 in a byte, as the halves of 16-bit integers."""

    def pack(self, numbers: Tensor) -> None:
        pairs = self.temporary("integers", self.numel, torch.int8).copy_(numbers).view(torch.int16)
        low = torch.bitwise_and(pairs, 15, out=self.temporary("low", self.numel // 2, torch.int16))
        pairs.bitwise_right_shift_(4).bitwise_and_(0xF0).bitwise_or_(low)
        self.codes = self.temporary("codes", self.numel // 2, torch.uint8).copy_(pairs)

    def numbers(self, out: Tensor) -> None:
        pairs = self.temporary("pairs", self.numel // 2, torch.int16).copy_(self.codes)
        high = torch.bitwise_left_shift(pairs, 4, out=self.temporary("high", self.numel // 2, torch.int16))
        pairs.bitwise_or_(high).bitwise_and_(0x0F0F)
        out.copy_(pairs.view(torch.int8).bitwise_xor_(8).sub_(8))


class Int4Peer(NibblePeer):
    def encode(self, values: Tensor) -> None:
        self.scales = (largest(values.view(-1, self.codec.block)) / 7).to(torch.bfloat16).to(torch.float32)
        self.pack(self.rounded(self.scaled(values, 1 / self.scales)).clamp_(-7, 7))


class QSGDPeer(NibblePeer):
    def encode(self, values: Tensor) -> None:
        """Encode. Adding a random number and rounding down also works for negative numbers."""
        norm = torch.linalg.vector_norm(values.view(-1, self.codec.block), dim=1, keepdim=True).clamp_(min=_LEAST)
        self.scales = norm / self.codec.levels
        numbers = self.scaled(values, self.codec.levels / norm).add_(self.random()).floor_()
        self.pack(numbers.clamp_(-self.codec.levels, self.codec.levels))


class OneBitPeer(DensePeer):
    """Packs eight bits in a byte, and unpacks them, by products of 64-bit integers."""

    _GATHER = 0x0102040810204080
    _SPREAD = 0x0101010101010101
    _BITS = 0x8040201008040201 - 2**64

    def encode(self, values: Tensor) -> None:
        magnitudes = torch.abs(values, out=self.temporary("magnitudes", self.numel))
        self.scales = magnitudes.view(-1, self.codec.block).mean(1, keepdim=True)
        signs = torch.ge(values, 0, out=self.temporary("signs", self.numel, torch.bool)).view(torch.int64)
        gathered = torch.mul(signs, self._GATHER, out=self.temporary("gathered", self.numel // 8, torch.int64))
        gathered.bitwise_right_shift_(56)
        self.codes = self.temporary("codes", self.numel // 8, torch.uint8).copy_(gathered)

    def numbers(self, out: Tensor) -> None:
        spread = self.temporary("spread", self.numel // 8, torch.int64).copy_(self.codes)
        spread.mul_(self._SPREAD).bitwise_and_(self._BITS)
        signs = self.temporary("integers", self.numel, torch.int8)
        torch.ne(spread.view(torch.uint8), 0, out=signs.view(torch.bool))
        out.copy_(signs.mul_(2).sub_(1))


class TernGradPeer(DensePeer):
    """Packs four numbers in a byte, as the bytes of 32-bit integers."""

    _LANES = 0x03030303

    def encode(self, values: Tensor) -> None:
        """Encode. Adding a random number and rounding down to -1, 0 or 1 is faster than torch.bernoulli and a sign."""
        self.scales = largest(values.view(-1, self.codec.block))
        numbers = self.scaled(values, 1 / self.scales).add_(self.random()).floor_().clamp_(-1, 1)
        fours = self.temporary("integers", self.numel, torch.int8).copy_(numbers).view(torch.int32)
        self._fold(fours.bitwise_and_(self._LANES), torch.bitwise_right_shift)
        self.codes = self.temporary("codes", self.numel // 4, torch.uint8).copy_(fours.bitwise_and_(0xFF))

    def numbers(self, out: Tensor) -> None:
        fours = self.temporary("fours", self.numel // 4, torch.int32).copy_(self.codes)
        self._fold(fours, torch.bitwise_left_shift)
        out.copy_(fours.bitwise_and_(self._LANES).view(torch.int8).bitwise_xor_(2).sub_(2))

    def _fold(self, fours: Tensor, shift: Callable[..., Tensor]) -> None:
        """Or `fours` with itself shifted by 6, 12 and 18 bits, in place."""
        shifted = self.temporary("shifted", self.numel // 4, torch.int32)
        for bits in (6, 12):
            fours.bitwise_or_(shift(fours, bits, out=shifted))


class NaturalPeer(DensePeer):
    """Sends signs and exponents. To round, it adds a random number to the mantissa, which may carry."""

    def prepare(self) -> None:
        powers = torch.arange(-77, 51, device=self.device, dtype=torch.float64).exp2().to(torch.float32)
        powers[0] = 0
        self.table = torch.cat([powers, -powers])

    def encode(self, values: Tensor) -> None:
        bits = values.view(torch.int32)
        codes = torch.bitwise_and(bits, 0x7FFFFFFF, out=self.temporary("magnitudes", self.numel, torch.int32))
        codes.add_(self.temporary("random", self.numel, torch.int32).random_(0, 1 << 23))
        codes.bitwise_right_shift_(23).sub_(50).clamp_(0, 126)
        signs = torch.bitwise_right_shift(bits, 24, out=self.temporary("signs", self.numel, torch.int32))
        codes.bitwise_or_(signs.bitwise_and_(128))
        self.codes = self.temporary("codes", self.numel, torch.uint8).copy_(codes)

    def numbers(self, out: Tensor) -> None:
        places = self.temporary("places", self.numel, torch.int32).copy_(self.codes)
        torch.index_select(self.table, 0, places, out=out)


class SparsePeer(Contender):
    """Sends the indices and values of the largest numbers, for both topk and threshold."""

    indices: Tensor
    sent: Tensor

    def choose(self, values: Tensor) -> Tensor:
        """Return the indices of the numbers to send, (k,)."""
        magnitudes = torch.abs(values, out=self.temporary("magnitudes", self.numel))
        return torch.topk(magnitudes, self.codec.count(self.numel), sorted=False).indices

    def encode(self, values: Tensor) -> None:
        self.indices = self.choose(values)
        self.sent = values.index_select(0, self.indices)

    def encode_ef(self, values: Tensor, residual: Tensor) -> None:
        self.encode(residual.add_(values))
        residual.index_fill_(0, self.indices, 0)

    def decode(self, out: Tensor) -> None:
        out.zero_().index_copy_(0, self.indices, self.sent)

    def decode_add(self, out: Tensor) -> None:
        out.index_add_(0, self.indices, self.sent)


class RandomKPeer(SparsePeer):
    """Sends one random number of each of k parts."""

    def choose(self, values: Tensor) -> Tensor:
        k: int = self.codec.count(self.numel)
        ends = torch.arange(k + 1, device=values.device) * self.numel // k
        random = torch.rand(k, device=values.device, dtype=torch.float64)
        return ends[:-1] + (random * ends.diff()).to(torch.int64)

    def encode(self, values: Tensor) -> None:
        """Encode. If any number is not finite, all numbers sent are NaN, as in our codec: both read all numbers."""
        super().encode(values)
        low, high = torch.aminmax(values)
        self.sent = torch.where(low.isfinite() & high.isfinite(), self.sent, math.nan)


class DGCPeer(SparsePeer):
    def prepare(self) -> None:
        self.momentum = torch.zeros(self.numel, device=self.device)

    def restart(self) -> None:
        self.momentum.zero_()

    def encode_ef(self, values: Tensor, residual: Tensor) -> None:
        self.momentum.mul_(self.codec.momentum).add_(values)
        super().encode_ef(self.momentum, residual)
        self.momentum.index_fill_(0, self.indices, 0)


class ChunkTopKPeer(Contender):
    """Sends the k largest numbers of every chunk of 4096, each as a sign and one of the chunk's two magnitudes."""

    places: Tensor
    sent: Tensor

    def encode(self, values: Tensor) -> None:
        chunks = values.view(-1, CHUNK)
        largest = torch.topk(chunks.abs(), self.codec.k, dim=1, sorted=False)
        self.places, magnitudes = largest.indices, largest.values
        reaches = magnitudes >= magnitudes.mean(1, keepdim=True)
        scales = [
            (magnitudes * part).sum(1, keepdim=True) / part.sum(1, keepdim=True).clamp(min=1)
            for part in (~reaches, reaches)
        ]
        low, high = (scale.to(torch.bfloat16).to(torch.float32) for scale in scales)
        self.sent = torch.where(reaches, high, low).copysign(chunks.gather(1, self.places))

    def encode_ef(self, values: Tensor, residual: Tensor) -> None:
        self.encode(residual.add_(values))
        residual.view(-1, CHUNK).scatter_add_(1, self.places, -self.sent)

    def decode(self, out: Tensor) -> None:
        out.zero_().view(-1, CHUNK).scatter_(1, self.places, self.sent)

    def decode_add(self, out: Tensor) -> None:
        out.view(-1, CHUNK).scatter_add_(1, self.places, self.sent)


PEERS: dict[str, type[Contender]] = {
    "fp16": CastPeer,
    "bf16": CastPeer,
    "fp8": Float8Peer,
    "int8": Int8Peer,
    "int4": Int4Peer,
    "onebit": OneBitPeer,
    "qsgd": QSGDPeer,
    "terngrad": TernGradPeer,
    "natural": NaturalPeer,
    "topk": SparsePeer,
    "threshold": SparsePeer,
    "randomk": RandomKPeer,
    "dgc": DGCPeer,
    "chunktopk": ChunkTopKPeer,
}
