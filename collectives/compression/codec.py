"""The base classes of codecs, which turn numbers into fewer bytes, and back, or sum fewer numbers; and no codec: Raw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradwire.collectives.kernels.layout import pad16
from gradwire.collectives.kernels.reference.blocks import lowbias32

#: The state that a codec keeps from earlier encodings of one part of a buffer, beside the residual: tensors, changed in place.
State: TypeAlias = dict[str, Tensor]


#: The dtypes of the numbers that codecs encode, and of the results that they decode to. All arithmetic is float32.
NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


def identity_of(name: str, settings: object) -> str:
    """Return a name with the fields of a dataclass, as text."""
    listed = ", ".join(f"{each.name}={getattr(settings, each.name)!r}" for each in fields(settings))  # type: ignore[arg-type]
    return f"{name}({listed})"


class CFunctions(NamedTuple):
    """C functions that encode and decode on the CPU: the address of each, and the words whose address it takes as its settings.
    For their arguments, see gradwire.collectives.kernels.cpu.entries."""

    encode: tuple[int, np.ndarray]
    decode: tuple[int, np.ndarray]


class Codec(ABC):
    """A way to write n numbers in `wire_bytes(n)` bytes.

    A codec is a value: it is frozen, and codecs with equal settings are equal. It stores nothing between encodings. The
    caller stores the error of an encoding (the residual of error feedback) and the codec's state, and passes both to the
    next encoding. The same input, seed, state and settings give the same bytes on every device.

    The docstrings of codecs use these symbols: c is the input (values + residual) or one number of it; n is the length of
    the input. A codec with contraction delta has E|decoded - c|^2 <= (1 - delta) |c|^2. An unbiased codec with variance
    omega has E|decoded - c|^2 <= omega |c|^2.

    name: the name in the registry. summable: whether codes may be added undecoded, as numbers of wire_dtype.
    needs_feedback: whether training converges only with error feedback. one_shot: whether each rank sends its code to
    all other ranks, and every rank adds all codes, because encoding the sum would lose too much. Otherwise, each rank decodes
    and adds the codes of its share of the buffer, and sends a code of this sum to all other ranks. draws: whether the
    step (see `at`) decides which numbers are sent. remembers: the names of the state's tensors with one value per number.
    These values must begin as zero, and must be additive: when buckets or ranks change, the values of all ranks for a number
    are summed, and the ranks that encode this number continue with equal parts of the sum.
    """

    name: ClassVar[str]
    summable: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = False
    one_shot: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    remembers: ClassVar[tuple[str, ...]] = ()
    wire_dtype: ClassVar[torch.dtype] = torch.uint8

    @property
    def identity(self) -> str:
        """Return the text that ranks compare before they exchange codes, and that checkpoints contain: the name and all
        settings. If a new version of a codec writes other bytes for equal settings, it needs another name."""
        return identity_of(self.name, self)

    @property
    def alignment(self) -> int:
        """Return the alignment of parts, in elements: a buffer is cut into parts at multiples of this number."""
        return 1

    @property
    def omega(self) -> float:
        """Return an upper bound of the variance omega of an unbiased codec; 0 for a biased codec."""
        return 0.0

    @property
    def takes_feedback(self) -> bool:
        """Return whether error feedback can be used: with an omega of 1 or more, the error may exceed the numbers, and residuals
        would grow in every step."""
        return self.omega < 1

    def at(self, step: int) -> Codec:
        """Return the codec of a step, counted from 0. At every step, parts of a buffer have the alignment of `self`."""
        return self

    def headroom(self, size: int) -> float:
        """Return the factor, a power of two, by which each of `size` ranks multiplies its numbers before it encodes them,
        if the codes are added. A codec of small range returns at most 1 / size: if the numbers of all ranks are within
        this range, so is the sum of their codes."""
        return 1.0

    def new_state(self, numel: int, device: torch.device) -> State | None:
        """Return the initial state for a part of numel elements; None for a codec without state."""
        return {name: torch.zeros(numel, dtype=torch.float32, device=device) for name in self.remembers} or None

    def takes_halves(self, device: torch.device) -> bool:
        """Return whether _encode() and _decode() take bfloat16 and float16 on a device. If not, encode() and decode() give them a
        float32 copy."""
        return False

    @property
    def keeps_state(self) -> bool:
        """Return whether new_state() returns tensors."""
        return bool(self.remembers) or type(self).new_state is not Codec.new_state

    def c_functions(self) -> CFunctions | None:
        """Return the C functions that the compiled loop of an exchange on the CPU calls instead of encode() and decode(). None
        if the codec has a state, or no such functions."""
        return None

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Return the size of the code of numel elements, in bytes."""

    def encode(
        self, values: Tensor, wire: Tensor, *, residual: Tensor | None = None, seed: int = 0, state: State | None = None
    ) -> None:
        """Write the code of `values` to `wire`. The code of bfloat16 or float16 is that of the same numbers as float32.

        values: float32, bfloat16 or float16, 1-D, contiguous, (n,). wire: uint8, (wire_bytes(n),), its address a multiple of 16.
        residual: float32, (n,), contiguous: with it, values + residual is encoded, and residual becomes the error of the code.
        seed: 32 bits, for stochastic rounding. state: from new_state for this length; with None, the codec keeps no state.

        Raises ValueError for other tensors.
        """
        self._check(wire, values, residual)
        if values.dtype != torch.float32 and not self.takes_halves(values.device):
            values = values.to(torch.float32)
        self._encode(values, wire, residual, seed, state)

    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
        """Set out to scale times the numbers of the code `wire`; with add, add them to out.

        out: float32, bfloat16 or float16, 1-D, contiguous, (n,). The result is computed in float32, then rounded once, to nearest
        even.

        Raises ValueError for other tensors.
        """
        self._check(wire, out)
        if out.dtype == torch.float32 or self.takes_halves(out.device):
            self._decode(wire, out, add, scale)
        else:
            numbers = out.to(torch.float32)
            self._decode(wire, numbers, add, scale)
            out.copy_(numbers)

    @abstractmethod
    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        """Implement encode(). The tensors have been checked, except the state."""

    @abstractmethod
    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        """Implement decode(). The tensors have been checked."""

    def _check(self, wire: Tensor, numbers: Tensor, sums: Tensor | None = None) -> None:
        """Check the tensors of kernels, which get bare addresses. numbers: values or a result. sums: a residual or a state."""
        numel = numbers.numel()
        self._check_numbers("values and results", numbers, numel, NUMBERS, wire)
        if sums is not None:
            self._check_numbers("residual and state", sums, numel, NUMBERS[:1], wire)
        nbytes = self.wire_bytes(numel)
        if wire.dtype != torch.uint8 or wire.shape != (nbytes,) or not wire.is_contiguous() or wire.data_ptr() % 16:
            raise ValueError(
                f"{self.name}: the wire of {numel} numbers is {nbytes} contiguous bytes (uint8) at a multiple of 16, "
                f"not {wire.dtype} of shape {tuple(wire.shape)} at {wire.data_ptr():#x}"
            )

    def _check_numbers(
        self, what: str, tensor: Tensor, numel: int, dtypes: tuple[torch.dtype, ...], wire: Tensor
    ) -> None:
        if tensor.dtype not in dtypes or tensor.shape != (numel,) or not tensor.is_contiguous():
            raise ValueError(
                f"{self.name}: {what} must be {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}, 1-D, "
                f"contiguous and {numel}, not {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        if tensor.device != wire.device:
            raise ValueError(f"{self.name}: {what} on {tensor.device}, wire on {wire.device}")


@dataclass(frozen=True)
class Raw(Codec):
    """The plain numbers as float32; a residual is added to them. Unbiased, omega = 0."""

    name: ClassVar[str] = "none"
    summable: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.float32

    def wire_bytes(self, numel: int) -> int:
        return pad16(4 * numel)

    def takes_halves(self, device: torch.device) -> bool:
        return True

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        numbers, n = wire.view(torch.float32), values.numel()
        numbers[n:] = 0
        if residual is None:
            numbers[:n].copy_(values)
        else:
            torch.add(values, residual, out=numbers[:n])
            residual.zero_()

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        numbers = wire.view(torch.float32)[: out.numel()]
        if add:
            out.add_(numbers if scale == 1 else numbers * scale)
        else:
            torch.mul(numbers, scale, out=out)


class MatrixCodec(ABC):
    """Exchanges tensors by a sequence of sums over all ranks, not by codes of a buffer. Each sum may depend on the one before.

    name: the name that users give.
    """

    name: ClassVar[str]

    @property
    def identity(self) -> str:
        """Return the text that checkpoints contain: the name and all settings."""
        return identity_of(self.name, self)

    @abstractmethod
    def new_state(self, shapes: Sequence[Sequence[int]], device: torch.device) -> MatrixState:
        """Return the state of the exchanges of tensors of these shapes, always given in this order."""

    @abstractmethod
    def wire_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return how many bytes one exchange of tensors of these shapes passes to allreduce."""


class MatrixState(ABC):
    """The state between exchanges of the same tensors, on one rank."""

    @abstractmethod
    def exchange(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Replace the tensors, in place, with an approximation of their sums over the ranks, bit for bit the same on all ranks.

        tensors: contiguous, and all float32, all bfloat16 or all float16; a result is computed in float32 and rounded once. Do
        not use them until the iterator ends. The iterator yields one or more 1-D tensors, float32. The caller sums each over the
        ranks, in place, to the same bits on all ranks, before it takes the next. If all sums are multiplied by a positive
        number, so is the result.

        On a GPU, the iterator enqueues its work on the stream that is current when the caller takes the next tensor or the end.
        Keep one stream current for all of them, in all exchanges of a state, or order the streams by events and record the
        yielded tensors on each. Order that stream after those that wrote the tensors, and after those that use kept().
        """

    @abstractmethod
    def kept(self, index: int) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return this rank's error of a tensor, and the codec's state for the tensor by name, which is the same on all ranks.
        The caller may read and write both. None for a tensor that is summed uncompressed."""


#: The shape of a matrix that a matrix codec compresses.
_SHAPE = (256, 256)


def rehearse(
    codec: Codec | MatrixCodec, device: torch.device, *, with_feedback: bool, dtype: torch.dtype = torch.float32
) -> None:
    """Call every kernel that a codec has for tensors of a dtype on `device`, whose sums are float32. Nothing is sent. A dtype
    that codecs do not take is exchanged as float32."""
    dtype = dtype if dtype in NUMBERS else torch.float32
    if isinstance(codec, MatrixCodec):
        matrix = torch.zeros(_SHAPE, device=device, dtype=dtype)
        for _ in codec.new_state([_SHAPE], device).exchange([matrix]):
            pass
        return
    wire = torch.zeros(codec.wire_bytes(1), dtype=torch.uint8, device=device)
    residual = torch.zeros(1, dtype=torch.float32, device=device) if with_feedback else None
    for numbers in (torch.zeros(1, dtype=each, device=device) for each in {torch.float32, dtype}):
        codec.encode(numbers, wire, residual=residual, state=codec.new_state(1, device) if with_feedback else None)
        codec.encode(numbers, wire, residual=residual)
        codec.decode(wire, numbers)
        codec.decode(wire, numbers, add=True)


def mixed(seed: int, value: int) -> int:
    """Return 32 bits that mix both numbers, so that close numbers give distant seeds."""
    return lowbias32(seed, value + 1)


def rounding_seed(step: int, rank: int, chunk: int, shard: int, shot: int, seed: int = 0) -> int:
    """Return the seed of the stochastic rounding of one encoding. seed: the caller's, which differs between buffers."""
    for value in (step, rank, chunk, shard, shot):
        seed = mixed(seed, value)
    return seed
