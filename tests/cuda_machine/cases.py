"""What kernels must do, on the CPU, on the machine and on a GPU: as the reference does, byte for byte."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.compression import dense
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dense import Dense, Int8
from gradwire.collectives.compression.sparse import DGC, ChunkTopK, RandomK, Sparse, Threshold, TopK
from gradwire.collectives.kernels.reference import quantize as reference
from gradwire.collectives.kernels.reference import sparse as reference_sparse

DENSE: tuple[Dense, ...] = (
    dense.Float16(),
    dense.BFloat16(),
    dense.Float8(),
    dense.Float8("e5m2", block=128),
    Int8(),
    Int8(block=1024, stochastic=True),
    dense.Int4(),
    dense.Int4(block=16, stochastic=True),
    dense.OneBit(),
    dense.OneBit(block=32),
    dense.QSGD(),
    dense.QSGD(levels=3, block=64),
    dense.TernGrad(),
    dense.TernGrad(block=1024),
    dense.Natural(),
)
SPARSE: tuple[Sparse, ...] = (TopK(), TopK(0.4), DGC(), Threshold(0.05), RandomK())

CHUNKED: tuple[ChunkTopK, ...] = (ChunkTopK(), ChunkTopK(4), ChunkTopK(1024))
CODECS: tuple[Codec, ...] = (*DENSE, *SPARSE, *CHUNKED)

#: Around the ends of lanes, vectors, blocks and tiles; of more than one block of threads.
DENSE_NUMELS = (1, 3, 4, 17, 127, 128, 129, 511, 512, 513, 1024, 9001, 1500)
CHUNK_NUMELS = (1, 31, 4095, 9001, 4097)
SPARSE_NUMELS = (1, 31, 33, 1024, 8192, 1025, 20_001)
KINDS = ("gaussian", "wide", "ties", "few", "constant", "denormal", "large", "infinite", "not finite", "any bits")
MORE_KINDS = (*KINDS, "heavy-tailed", "zeros", "near the least", "mostly not finite")
SEED = 0xFEDC_BA98


def numbers(numel: int, kind: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, other = torch.randn(numel, generator=generator), torch.rand(numel, generator=generator)
    if kind == "any bits":
        return torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32).view(torch.float32)
    made = {
        "gaussian": lambda: x,
        "wide": lambda: x * torch.exp(20 * other - 10) * (other > 0.1),
        "ties": lambda: (x * 2).round(),
        "few": lambda: torch.where(other < 0.01, x, torch.where(other < 0.5, 0.0, -0.0)),
        "constant": lambda: torch.full((numel,), -0.3) * (torch.arange(numel) % 2048 < 1024),
        "denormal": lambda: x * 1e-40,
        "heavy-tailed": lambda: x / (other**3 + 1e-9),
        "zeros": lambda: torch.where(other < 0.5, 0.0, -0.0),
        "near the least": lambda: x * 2.0**-101,
        "mostly not finite": lambda: torch.where(other < 0.45, math.nan, torch.where(other > 0.55, -math.inf, x)),
        "large": lambda: x * 2.0**126,
        "infinite": lambda: torch.where(other < 0.3, math.inf * x, x),
        "not finite": lambda: torch.where(other < 0.01, torch.where(x > 0, math.inf, math.nan), x),
    }
    return made[kind]()


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of float32 numbers, with one NaN for all; of others as float32."""
    tensor = tensor.to(torch.float32)
    return torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor).view(torch.int32).cpu()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def encoded(codec: Codec, values: Tensor, residual: Tensor | None = None, **options: Any) -> Tensor:
    wire = _unwritten(codec.wire_bytes(values.numel()))
    codec.encode(values, wire, residual=residual, **options)
    return wire


def decoded(codec: Codec, wire: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), math.nan)
    codec.decode(wire, out)
    return out


class Pair:
    """The reference on the CPU and the kernels on a device, given the same, as if each had its own memory.

    kernels: an object or a module that has the functions of the reference.
    """

    def __init__(self, kernels: Any, device: str) -> None:
        self.kernels, self.device = kernels, torch.device(device)
        self.failures: list[str] = []

    def both(self, function: str, *arguments: Any, at: int = 0) -> list[Tensor]:
        """Call a function on both sides: the tensors on the reference's side when it is done.

        at: elements by which tensors of numbers miss a multiple of 16 bytes on the device.
        """
        module = reference if hasattr(reference, function) else reference_sparse
        expected = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        actual = [self._placed(a, at) if isinstance(a, Tensor) else a for a in arguments]
        getattr(module, function)(*expected)
        getattr(self.kernels, function)(*actual)
        for position, (e, a) in enumerate(zip(expected, actual, strict=True)):
            if isinstance(e, Tensor) and not (torch.equal(e, a.cpu()) if e.dtype == torch.uint8 else same(e, a)):
                rest = [a for a in arguments if not isinstance(a, Tensor)]
                self.failures.append(f"{function}, {len(arguments[0])}, {rest}, at={at}: argument {position} differs")
        return [e for e in expected if isinstance(e, Tensor)]

    def _placed(self, tensor: Tensor, at: int) -> Tensor:
        shift = at if tensor.is_floating_point() else 0
        room = torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device=self.device)
        room[shift:] = tensor
        return room[shift:]


def _unwritten(nbytes: int) -> Tensor:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


def check(
    kernels: Any,
    device: str,
    codec: Codec,
    numels: tuple[int, ...] = (),
    kinds: tuple[str, ...] = KINDS,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Return what differs. Every kind of numbers is tried at the last numel, one in turn at each other. dtype: of values and
    results."""
    usual = (
        DENSE_NUMELS if isinstance(codec, Dense) else CHUNK_NUMELS if isinstance(codec, ChunkTopK) else SPARSE_NUMELS
    )
    pair, numels = Pair(kernels, device), numels or usual
    for turn, numel in enumerate(numels):
        some = kinds if numel == numels[-1] else (kinds[turn % len(kinds)],)
        for place, kind in enumerate(some):
            feedback = (turn + place + numel) % 2 == 1 or codec.name == "dgc"
            residual = numbers(numel, "gaussian", turn + 2) if feedback else None
            code(pair, codec, numbers(numel, kind, turn).to(dtype), residual)
    return pair.failures


def code(pair: Pair, codec: Codec, values: Tensor, residual: Tensor | None) -> None:
    """Encode and decode on both sides, in the ways that the codec has."""
    numel, at = len(values), len(values) % 3
    before, wire = numbers(numel, "wide", 1).to(values.dtype), _unwritten(codec.wire_bytes(numel))
    writes: tuple[Any, ...]
    reads: tuple[Any, ...]
    if isinstance(codec, (Dense, ChunkTopK)):
        writes, reads = (*codec.settings(), SEED), codec.settings()
    else:
        assert isinstance(codec, Sparse)
        k = codec.count(numel)
        writes = reads = (k, SEED) if isinstance(codec, RandomK) else (k,)
    if isinstance(codec, DGC):
        pair.both("dgc_encode", values, residual, wire, *writes, numbers(numel, "gaussian", 7), 0.9)
        return
    if isinstance(
        codec, Threshold
    ):  # without a tau; with a bad one; with one that a few more numbers reach than before
        writes = reads = (*writes, codec.slack(numel))
        for tau in (None, torch.tensor([1e-3])):
            pair.both("threshold_encode", values, residual, wire, *writes, tau)
        tau = torch.zeros(1)
        for factor in (1, 1.005):
            *_, wire, tau = pair.both("threshold_encode", values * factor, residual, wire, *writes, tau)
    else:
        wire = pair.both(f"{codec.name}_encode", values, residual, wire, *writes, at=at)[-1]
    for add in (False, True):
        pair.both(f"{codec.name}_decode", wire, before, *reads, add, 0.3, at=at)
