"""The sparse codecs: they send a fraction of the numbers, and the rest stays in the residual."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import Codec, State, mixed
from gradwire.collectives.compression.dense import ByKernels
from gradwire.collectives.compression.registry import register_codec
from gradwire.collectives.kernels import kernels_for
from gradwire.collectives.kernels.layout import CHUNK, pad16


class Sparse(Codec):
    """Sends the share `ratio` of the numbers, at least one. Indices have 32 bits, so a part has fewer than 2^31 numbers. The
    kernels of the codec's name do the work. A wire holds the indices, then the values, unless the codec's docstring differs.

    Biased: meant for error feedback. A number that is not finite is never left in the residual.
    """

    ratio: float

    @property
    def alignment(self) -> int:
        return 16  # a cache line, so that more results can be written past the caches

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"{self.name}: ratio must be above 0 and at most 1, not {self.ratio}")

    def count(self, numel: int) -> int:
        """Return k, how many of numel numbers are sent."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def wire_bytes(self, numel: int) -> int:
        return 2 * pad16(4 * self.count(numel))

    def takes_halves(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def _parameters(self, numel: int) -> tuple[int, ...]:
        """Return the parameters of the kernels for `numel` numbers."""
        return (self.count(numel),)

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        encode = getattr(self._kernels(wire), f"{self.name}_encode")
        encode(values, residual, wire, *self._parameters(values.numel()))

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        getattr(self._kernels(wire), f"{self.name}_decode")(wire, out, *self._parameters(out.numel()), add, scale)

    def _kernels(self, wire: Tensor) -> ModuleType:
        return kernels_for(wire.device)


@register_codec
@dataclass(frozen=True)
class TopK(Sparse):
    """The k = ceil(ratio * n) numbers of largest magnitude, as indices and values; of equal magnitudes the first ones.

    Contraction: delta >= k / n (Stich et al. 2018). NaN and Inf count as the largest. So if any number is NaN or Inf, the
    code contains at least one of them, which reaches every rank.
    """

    name: ClassVar[str] = "topk"
    needs_feedback: ClassVar[bool] = True
    ratio: float = 0.01


@register_codec
@dataclass(frozen=True)
class Threshold(Sparse):
    """All numbers whose magnitude is at least a threshold tau (Strom 2015). tau is kept from one encoding to the next, and
    adapted so that about k = ceil(ratio * n) numbers reach it.

    If the count of numbers that reach tau is within 5 % of k, these numbers are sent. If not, or if there is no tau yet,
    exactly the k largest are sent, and tau becomes the smallest of their magnitudes. After m numbers were sent, tau is
    multiplied by 1 + (m - k) / (8 k).

    Contraction: delta >= (k - floor(k / 20)) / n, since at least k - floor(k / 20) numbers are sent, always the largest.

    State: tau, one number. Without state, as in the encoding of the sum over the ranks, the codec selects numbers as topk
    does. The code always has room for 5 % more than k numbers.
    """

    name: ClassVar[str] = "threshold"
    needs_feedback: ClassVar[bool] = True
    ratio: float = 0.01

    def slack(self, numel: int) -> int:
        """Return by how much the count of numbers sent may differ from count(numel)."""
        return self.count(numel) // 20

    def wire_bytes(self, numel: int) -> int:
        return 16 + 2 * pad16(4 * (self.count(numel) + self.slack(numel)))

    def new_state(self, numel: int, device: torch.device) -> State:
        return {"tau": torch.zeros(1, dtype=torch.float32, device=device)}

    def _parameters(self, numel: int) -> tuple[int, ...]:
        return self.count(numel), self.slack(numel)

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        tau = None if state is None else state["tau"]
        self._kernels(wire).threshold_encode(values, residual, wire, *self._parameters(values.numel()), tau)


@register_codec
@dataclass(frozen=True)
class RandomK(Sparse):
    """k = ceil(ratio * n) numbers, one drawn from each of k parts of the buffer. The draw depends only on n, seed and step.

    So no indices are sent, and the codes of ranks with equal codecs can be added without decoding: a code is k float32
    numbers (and zeros up to a multiple of 16 bytes). The decoder must repeat the encoder's draw. So seed and step are
    settings of the codec. It does not use the argument `seed` of encode(), which differs from rank to rank. `at(step)`
    returns the codec of a step.

    Every number is drawn with probability k / n. If codes are decoded with scale 1, the codec is biased, needs error
    feedback, and has the contraction delta = k / n on average. If they are decoded with scale n / k, it is unbiased, with
    omega = n / k - 1 (Stich et al. 2018; Wangni et al. 2018). If any number is not finite, drawn or not, all numbers sent
    are NaN, so that every rank gets a NaN.
    """

    name: ClassVar[str] = "randomk"
    summable: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.float32
    ratio: float = 0.01
    seed: int = 0
    step: int = 0

    def at(self, step: int) -> RandomK:
        """Return the codec of a step, the same on all ranks."""
        return replace(self, step=step)

    def wire_bytes(self, numel: int) -> int:
        return pad16(4 * self.count(numel))

    def _parameters(self, numel: int) -> tuple[int, ...]:
        # The seed of the draw is mixed. Otherwise the draws of successive steps would be shifted copies of each other.
        return self.count(numel), mixed(self.step, self.seed)


#: The ratio in the first stage of the ramp; each later stage has a quarter of the ratio of the stage before.
_FIRST_RATIO = 0.25


@register_codec
@dataclass(frozen=True)
class DGC(Sparse):
    """Top-k with momentum correction, momentum factor masking and a ramp of the ratio (Lin et al. 2018, sections 3.1
    to 3.3).

    On each rank u = momentum * u + gradient; v += u; the k = ceil(ratio * n) largest numbers of v are sent, and cleared in v
    and u. v is the residual of error feedback, u the state. So the codec applies the momentum, and the optimizer must have
    none.
    Lin et al. also clip the gradients of each rank before the encoding, with the usual maximum norm divided by
    sqrt(ranks); the codec does not clip.

    Only a rank's own gradients have a momentum. Without state, as in the encoding of the sum over the ranks, the codec works
    as topk.

    Contraction of v: delta >= k / n.

    ratio: the ratio after the ramp. ramp_steps: the number of steps of the ramp, which has stages of equal length. The ratio
    is 25 % in the first stage; in each later stage, it is a quarter of the ratio of the stage before. As the size of a code
    must depend on the codec alone, `at(step)` returns a codec with the ratio of that step.
    """

    name: ClassVar[str] = "dgc"
    needs_feedback: ClassVar[bool] = True
    remembers: ClassVar[tuple[str, ...]] = ("momentum",)
    ratio: float = 0.001
    momentum: float = 0.9
    ramp_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"dgc: momentum must be at least 0 and below 1, not {self.momentum}")
        if self.ramp_steps < 0:
            raise ValueError(f"dgc: ramp_steps must not be negative, not {self.ramp_steps}")

    def at(self, step: int) -> DGC:
        """Return the codec of a step, counted from 0, the same on all ranks: with the ratio that the ramp has reached, and no
        ramp."""
        ratio = self.ratio
        if step < self.ramp_steps and ratio < _FIRST_RATIO:
            stages = math.ceil(math.log(_FIRST_RATIO / ratio, 4))
            ratio = max(ratio, _FIRST_RATIO / 4 ** (step * stages // self.ramp_steps))
        return replace(self, ratio=ratio, ramp_steps=0)

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        momentum = None if state is None else state["momentum"]
        self._check(wire, values, momentum)
        kernels, k = self._kernels(wire), self.count(values.numel())
        if momentum is None:
            kernels.topk_encode(values, residual, wire, k)
        elif residual is None:
            raise ValueError("dgc needs error feedback: the residual accumulates the numbers that are not sent")
        else:
            kernels.dgc_encode(values, residual, wire, k, momentum, self.momentum)

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        self._kernels(wire).topk_decode(wire, out, self.count(out.numel()), add, scale)


_MOST_OF_A_CHUNK = 1024  # a kernel on a GPU has room for no more


@register_codec
@dataclass(frozen=True)
class ChunkTopK(ByKernels):
    """The k numbers of largest magnitude in every chunk of 4096: indices of 12 bits, values of 2 bits (a sign, and one of two
    magnitudes), and the two magnitudes of the chunk as bfloat16. For k = 64 that is 116 bytes a chunk, 141 times fewer than
    float32.

    The codec of SparseLoCo (2025). Biased: it needs error feedback. Contraction: the numbers sent have at least k / 4096 of
    a chunk's squared norm, of which the rounding to two magnitudes loses a part. Ranks mostly choose different indices, so
    the sum over p ranks has up to p * k nonzero numbers in a chunk, and encoding the sum would keep only k of them.
    Instead, every rank sends its code to all other ranks, and each rank adds all codes. In a chunk with a number that is
    not finite, all numbers sent decode to NaN. If the last chunk is shorter, k / 4096 of its numbers are sent, rounded up.

    k: a multiple of 4 from 4 to 1024.
    """

    name: ClassVar[str] = "chunktopk"
    needs_feedback: ClassVar[bool] = True
    one_shot: ClassVar[bool] = True
    k: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.k <= _MOST_OF_A_CHUNK or self.k % 4:
            raise ValueError(f"{self.name}: k must be a multiple of 4 from 4 to {_MOST_OF_A_CHUNK}, not {self.k}")

    @property
    def alignment(self) -> int:
        return CHUNK

    def wire_bytes(self, numel: int) -> int:
        chunks = -(-numel // CHUNK)
        return sum(pad16(chunks * width) for width in (3 * self.k // 2, self.k // 4, 4))
