"""What kernels must do, on the CPU, on the machine and on a GPU: as the reference does, byte for byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dense import (
    QSGD,
    BFloat16,
    Dense,
    Float8,
    Float16,
    Int4,
    Int8,
    Natural,
    OneBit,
    TernGrad,
)
from gradwire.collectives.compression.sparse import DGC, ChunkTopK, RandomK, Sparse, Threshold, TopK
from gradwire.collectives.kernels.cuda.kernels import CudaKernels
from gradwire.collectives.kernels.reference import quantize as reference
from gradwire.collectives.kernels.reference import sparse as reference_sparse

DENSE: tuple[Dense, ...] = (
    Float16(),
    BFloat16(),
    Float8(),
    Float8("e5m2", block=128),
    Int8(),
    Int8(block=1024, stochastic=True),
    Int4(),
    Int4(block=16, stochastic=True),
    OneBit(),
    OneBit(block=32),
    QSGD(),
    QSGD(levels=3, block=64),
    TernGrad(),
    TernGrad(block=1024),
    Natural(),
)
SPARSE: tuple[Sparse, ...] = (TopK(), TopK(0.4), DGC(), Threshold(0.05), RandomK())

#: Around the ends of lanes, vectors, blocks and tiles; of more than one block of threads.
DENSE_NUMELS = (1, 3, 4, 17, 127, 128, 129, 511, 512, 513, 1024, 1500, 9001)
CHUNKED: tuple[ChunkTopK, ...] = (ChunkTopK(), ChunkTopK(4), ChunkTopK(1024))
CHUNK_NUMELS = (1, 31, 4095, 4097, 9001)
SPARSE_NUMELS = (1, 31, 33, 1024, 1025, 8192, 20_001)
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
    """Return the bits of float32 numbers, with one NaN for all."""
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


def _turns(numels: tuple[int, ...], kinds: tuple[str, ...]) -> Iterator[tuple[int, int, int, str]]:
    """Give each number of numbers, with its turn, and a kind, with its place: every kind to the most, one to the others."""
    for turn, numel in enumerate(numels):
        some = kinds if numel == max(numels) else (kinds[turn % len(kinds)],)
        yield from ((turn, numel, place, kind) for place, kind in enumerate(some))


class Pair:
    """The reference on the CPU and the kernels on a device, given the same, as if each had its own memory.

    kernels: an object or a module that has the functions of the reference.
    """

    def __init__(self, kernels: Any, device: str) -> None:
        self.kernels, self.device = kernels, torch.device(device)
        self.failures: list[str] = []

    def both(self, function: str, *arguments: Any, at: int = 0) -> list[Tensor]:
        """Call a function on both sides: the tensors on the reference's side when it is done.

        at: elements by which float32 tensors miss a multiple of 16 bytes on the device.
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
        shift = at if tensor.dtype == torch.float32 else 0
        room = torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device=self.device)
        room[shift:] = tensor
        return room[shift:]


def check_chunks(
    kernels: Any, device: str, codec: ChunkTopK, numels: tuple[int, ...] = CHUNK_NUMELS, kinds: tuple[str, ...] = KINDS
) -> list[str]:
    """Return what differs. Every kind of numbers is tried at the largest numel, one in turn at each other."""
    pair = Pair(kernels, device)
    for turn, numel, place, kind in _turns(numels, kinds):
        residual = numbers(numel, "gaussian", turn + 2) if (turn + place + numel) % 2 else None
        encoded = (numbers(numel, kind, turn), residual, _unwritten(codec.wire_bytes(numel)), codec.k)
        wire = pair.both("chunktopk_encode", *encoded, at=numel % 3)[-1]
        for add in (False, True):
            pair.both("chunktopk_decode", wire, numbers(numel, "wide"), codec.k, add, 0.3)
    return pair.failures


def _unwritten(nbytes: int) -> Tensor:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


def check_dense(
    kernels: Any, device: str, codec: Dense, numels: tuple[int, ...] = DENSE_NUMELS, kinds: tuple[str, ...] = KINDS
) -> list[str]:
    """Return what differs. Every kind of numbers is tried at the largest numel, one in turn at each other."""
    pair = Pair(kernels, device)
    for turn, numel, place, kind in _turns(numels, kinds):
        values, before = numbers(numel, kind, turn), numbers(numel, "wide", turn + 1)
        feedback, at = numbers(numel, "gaussian", turn + 2) if (turn + place + numel) % 2 else None, (turn + place) % 3
        encoded = (values, feedback, _unwritten(codec.wire_bytes(numel)), *codec._encoder(), SEED)
        wire = pair.both(f"{codec.name}_encode", *encoded, at=at)[-1]
        for add in (False, True):
            pair.both(f"{codec.name}_decode", wire, before, *codec._decoder(), add, 0.3, at=at)
    return pair.failures


def check_sparse(
    kernels: Any, device: str, codec: Sparse, numels: tuple[int, ...] = SPARSE_NUMELS, kinds: tuple[str, ...] = KINDS
) -> list[str]:
    """Return what differs. Every kind of numbers is tried at the largest numel, one in turn at each other."""
    pair = Pair(kernels, device)
    for turn, numel, place, kind in _turns(numels, kinds):
        feedback = (turn + place + numel) % 2 == 1 or codec.name == "dgc"
        residual = numbers(numel, "gaussian", turn + 2) if feedback else None
        code(pair, codec, numbers(numel, kind, turn), residual)
    return pair.failures


def code(pair: Pair, codec: Sparse, values: Tensor, residual: Tensor | None) -> None:
    """Encode and decode on both sides, in the ways that the codec has."""
    numel = len(values)
    _SPARSE[codec.name](pair, codec, codec.count(numel), values, residual, _unwritten(codec.wire_bytes(numel)))


def _topk(pair: Pair, codec: Any, k: int, values: Tensor, residual: Tensor | None, wire: Tensor) -> None:
    *_, wire = pair.both("topk_encode", values, residual, wire, k, at=len(values) % 3)
    for add in (False, True):
        pair.both("topk_decode", wire, numbers(len(values), "wide"), k, add, 0.3)


def _dgc(pair: Pair, codec: Any, k: int, values: Tensor, residual: Tensor | None, wire: Tensor) -> None:
    pair.both("dgc_encode", values, residual, wire, k, numbers(len(values), "gaussian", 7), 0.9)


def _threshold(pair: Pair, codec: Any, k: int, values: Tensor, residual: Tensor | None, wire: Tensor) -> None:
    """Without a tau; with a bad one; with one that has nothing yet, and then a few more numbers reach."""
    slack = codec.slack(len(values))
    for tau in (None, torch.tensor([1e-3])):
        pair.both("threshold_encode", values, residual, wire, k, slack, tau)
    tau = torch.zeros(1)
    for factor in (1, 1.005):
        *_, sent, tau = pair.both("threshold_encode", values * factor, residual, wire, k, slack, tau)
    for add in (False, True):
        pair.both("threshold_decode", sent, numbers(len(values), "wide"), k, slack, add, 0.3)


def _randomk(pair: Pair, codec: Any, k: int, values: Tensor, residual: Tensor | None, wire: Tensor) -> None:
    *_, wire = pair.both("randomk_encode", values, residual, wire, k, SEED)
    for add in (False, True):
        pair.both("randomk_decode", wire, numbers(len(values), "wide"), k, SEED, add, 0.3)


_SPARSE: dict[str, Callable[..., None]] = {"topk": _topk, "dgc": _dgc, "threshold": _threshold, "randomk": _randomk}


def check_many(kernels: CudaKernels, device: str) -> list[str]:
    """More tensors than one launch takes, some of them empty, each with its own seed."""
    codec, numels = Int8(stochastic=True), [(7 * i * i) % 700 for i in range(100)]
    values = [numbers(numel, "wide", i) for i, numel in enumerate(numels)]
    residuals = [numbers(numel, "gaussian", -i) for i, numel in enumerate(numels)]
    wires = [_unwritten(codec.wire_bytes(numel)) for numel in numels]
    seeds = [SEED - i for i in range(len(numels))]
    there = [[t.to(device, copy=True) for t in tensors] for tensors in (values, residuals, wires)]
    kernels.int8_encode(*there, *codec._encoder(), seeds)
    outs = [torch.zeros_like(t) for t in there[0]]
    kernels.int8_decode(there[2], outs, *codec._decoder(), False, 1.0)

    def differences() -> Iterator[str]:
        for i, (v, r, w, seed) in enumerate(zip(values, residuals, wires, seeds, strict=True)):
            reference.int8_encode(v, r, w, *codec._encoder(), seed)
            out = torch.zeros_like(v)
            reference.int8_decode(w, out, *codec._decoder(), False, 1.0)
            if not (torch.equal(w, there[2][i].cpu()) and same(r, there[1][i]) and same(out, outs[i])):
                yield f"tensor {i} of {len(numels)}, {len(v)} numbers"

    return list(differences())
