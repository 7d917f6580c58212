"""The largest numbers of every chunk, in 14 bits each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.collectives.compression.codec import Codec, State
from gradwire.collectives.compression.kernels_for import kernels_for
from gradwire.collectives.kernels.reference.sparse import CHUNK
from gradwire.collectives.kernels.wire import pad16

_MOST = 1024  # for which a kernel on a GPU has room


@dataclass(frozen=True)
class ChunkTopK(Codec):
    """Of every chunk of 4096 numbers the k of largest magnitude: indices of 12 bits, values of 2 (a sign, and which of two
    magnitudes a chunk), and two scales as bfloat16. For k = 64 that is 116 bytes a chunk, 141 times fewer than float32.

    The codec of SparseLoCo (2025). Contraction: a chunk keeps the larger part of its energy at the same place, rounded to
    two magnitudes; biased, and meant for error feedback. Ranks mostly choose different places, so the sum over p ranks has
    up to p * k numbers of a chunk that are not zero. To encode it again would keep k of them: instead every rank sends its
    code to all others, which add up all codes. A chunk with a number that is not finite decodes to NaN where it sends any.
    Of a last chunk that is shorter, k / 4096 of the numbers are sent, rounded up.

    k: a multiple of 4 from 4 to 1024.
    """

    name: ClassVar[str] = "chunktopk"
    needs_feedback: ClassVar[bool] = True
    one_shot: ClassVar[bool] = True
    k: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.k <= _MOST or self.k % 4:
            raise ValueError(f"{self.name}: k must be a multiple of 4 from 4 to {_MOST}, not {self.k}")

    @property
    def alignment(self) -> int:
        return CHUNK

    def wire_bytes(self, numel: int) -> int:
        chunks = -(-numel // CHUNK)
        return sum(pad16(chunks * width) for width in (3 * self.k // 2, self.k // 4, 4))

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        kernels_for(wire.device, "sparse").chunktopk_encode(values, residual, wire, self.k)

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        kernels_for(wire.device, "sparse").chunktopk_decode(wire, out, self.k, add, scale)
