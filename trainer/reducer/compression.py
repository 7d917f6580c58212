"""The encodings of gradients on the wire: casts, codecs, and the policy that selects them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire.collectives import compression as codecs
from gradwire.collectives.compression.codec import Codec, MatrixCodec
from gradwire.collectives.compression.registry import find_codec

LEAST_NUMEL = 4096
"""Parameters with fewer elements are not worth a codec: together they have few bytes, and each element matters."""

AUTO, ALLOWED = "auto", ("int8",)
"""The compression= that chooses a codec, and the default of allow=: int8 loses about 1 % of a gradient's norm."""

CASTS: dict[torch.dtype, Codec] = {codec.wire_dtype: codec for codec in (codecs.Float16(), codecs.BFloat16())}
"""The codecs that cast, by the dtype on the wire."""


@dataclass(frozen=True)
class Cast:
    """Sends floating-point tensors wider than `wire_dtype` as that dtype, and all others unchanged; with None, all
    unchanged."""

    wire_dtype: torch.dtype | None

    @property
    def identity(self) -> str:
        """Return a text that must be equal on all ranks."""
        return str(self.wire_dtype or "none")

    @property
    def name(self) -> str:
        """Return the cast's name in Compression."""
        return "none" if self.wire_dtype is None else CASTS[self.wire_dtype].name

    def dtype_on_wire(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor of this dtype is sent."""
        wire = self.wire_dtype
        return dtype if wire is None or not dtype.is_floating_point or dtype.itemsize <= wire.itemsize else wire

    def codec(self, dtype: torch.dtype) -> Codec | None:
        """Return the codec that sums tensors of this dtype; None if they are sent unchanged."""
        narrow = self.dtype_on_wire(dtype)
        return None if narrow is dtype else CASTS[narrow]

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the tensor to send, and the dtype that decompress() needs."""
        return tensor.to(self.dtype_on_wire(tensor.dtype)), tensor.dtype

    def decompress(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the received tensor in its dtype before compress()."""
        return tensor.to(dtype)


@dataclass(frozen=True)
class ErrorFeedback:
    """Adds error feedback to a codec: the error of one step's encoding is added to the next step's gradient.

    codec: a codec of gradwire.collectives.compression, or its name. PowerSGD has its own error feedback; for it, only
    warmup_steps applies.
    warmup_steps: the number of exchanges at the start in which gradients are sent uncompressed.

    Raises ValueError for unbiased codecs with a variance omega >= 1 (TernGrad, and QSGD with its default settings), whose
    residuals would grow in every step. These codecs need no error feedback.
    """

    codec: str | Codec | MatrixCodec
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        made = find_codec(self.codec)
        if not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be a whole number >= 0, not {self.warmup_steps!r}")
        if isinstance(made, Codec) and made.name == "none":
            raise ValueError("error feedback needs a codec: without one there is no error")
        if isinstance(made, Codec) and not made.takes_feedback:
            raise ValueError(
                f"error feedback cannot be used with {made!r}: the error may exceed the numbers (omega is "
                f"{made.omega:.2g}), so residuals would grow in every step. Use the codec without error feedback"
            )


Compressor: TypeAlias = "str | Cast | Codec | MatrixCodec | ErrorFeedback"
"""The values that `compression=` takes."""


class Compression:
    """Holds the names for `compression=`: Horovod's none, fp16 (up to 65504 on every rank) and bf16 (the range of float32, 8
    bits of precision), and all codecs of gradwire.collectives.compression with default settings, with error feedback if
    they need it.
    """

    none = Cast(None)
    fp16 = Cast(torch.float16)
    bf16 = Cast(torch.bfloat16)
    fp8 = codecs.Float8()
    int8 = codecs.Int8()
    int4 = codecs.Int4()
    qsgd = codecs.QSGD()
    terngrad = codecs.TernGrad()
    natural = codecs.Natural()
    onebit = ErrorFeedback(codecs.OneBit())
    topk = ErrorFeedback(codecs.TopK())
    threshold = ErrorFeedback(codecs.Threshold())
    randomk = ErrorFeedback(codecs.RandomK())
    dgc = ErrorFeedback(codecs.DGC())
    chunktopk = ErrorFeedback(codecs.ChunkTopK())
    powersgd = codecs.PowerSGD()


NAMES = tuple(name for name in vars(Compression) if not name.startswith("_"))
"""The names in Compression that `compression=` takes."""


@dataclass(frozen=True)
class Encoding:
    """How gradients are exchanged by a codec. feedback: whether error feedback is added to the codec (PowerSGD has its own).
    warmup_steps: the number of uncompressed exchanges at the start."""

    codec: Codec | MatrixCodec
    feedback: bool = False
    warmup_steps: int = 0

    @property
    def identity(self) -> str:
        """Return a text that must be equal on all ranks, and in a checkpoint."""
        return f"{self.codec.identity}, feedback={self.feedback}, warmup_steps={self.warmup_steps}"

    @property
    def name(self) -> str:
        """Return the codec's name."""
        return self.codec.name

    def codec_at(self, step: int) -> Codec | None:
        """Return the codec of a step, counted from 0; None during the warm-up. Not for matrix codecs."""
        assert isinstance(self.codec, Codec)
        since_warmup = step - self.warmup_steps
        return self.codec.at(since_warmup) if since_warmup >= 0 else None


def encoding_for(kind: Cast | Encoding, dtype: torch.dtype) -> Encoding | None:
    """Return the encoding of tensors of a dtype; None if they are sent unchanged."""
    if isinstance(kind, Encoding):
        return kind
    codec = kind.codec(dtype)
    return None if codec is None else Encoding(codec)


@dataclass(frozen=True)
class Auto:
    """Leaves the codec of each bucket to a prediction: one of `allowed`, or none."""

    allowed: tuple[Cast | Encoding, ...]

    @property
    def identity(self) -> str:
        """Return a text that must be equal on all ranks."""
        return f"{AUTO} of {'; '.join(kind.identity for kind in self.allowed)}"


def wanted(compression: Compressor, allow: Sequence[Compressor] | None) -> Compressor | Auto:
    """Return the compression that the arguments compression= and allow= select. Raises ValueError."""
    if compression != AUTO:
        if allow is not None:
            raise ValueError(f"allow is for compression={AUTO!r}, which chooses among them, not for {compression!r}")
        encoding_of(compression, also=(AUTO,))  # raises ValueError for an invalid one
        return compression
    given = ALLOWED if allow is None else allow
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"allow must be a list of codecs, of which each is what compression= takes, not {allow!r}")
    kinds = tuple(kind for kind in dict.fromkeys(map(encoding_of, given)) if kind != Compression.none)
    if not kinds:
        raise ValueError(f"allow={allow!r}: at least one codec is needed, to be chosen instead of none")
    for kind in kinds:
        if isinstance(kind, Encoding) and isinstance(kind.codec, MatrixCodec):
            raise ValueError(
                f"allow: what {kind.name!r} takes cannot be predicted, since it compresses matrices, not buckets: name "
                f"it as compression="
            )
    return Auto(kinds)


def encoding_of(compression: Compressor, also: Sequence[str] = ()) -> Cast | Encoding:
    """Return the cast or the encoding for a `compression=` argument, which may be a name.

    Codecs that need error feedback get it; others get it only if given as ErrorFeedback. Raises ValueError, which lists the
    names. also: further names that the caller accepts, for this list.
    """
    if isinstance(compression, str):
        try:
            compression = getattr(Compression, compression) if compression in NAMES else find_codec(compression)
        except ValueError as error:
            raise ValueError(", ".join([str(error), *also])) from None
    if isinstance(compression, Cast):
        return compression
    if isinstance(compression, ErrorFeedback):
        codec = find_codec(compression.codec)
        return Encoding(codec, isinstance(codec, Codec), compression.warmup_steps)
    if not isinstance(compression, (Codec, MatrixCodec)):
        raise ValueError(
            f"compression must be a codec, ErrorFeedback(codec), one of Compression, or its name "
            f"({', '.join((*NAMES, *also))}), not {compression!r}"
        )
    if isinstance(compression, Codec) and compression.name == "none":
        return Compression.none
    return Encoding(compression, isinstance(compression, Codec) and compression.needs_feedback)


def verb_codec(compression: Compressor) -> Cast | Codec:
    """Return the cast or the codec for a verb's `compression=` argument, without error feedback. Raises ValueError."""
    encoding = encoding_of(compression)
    if isinstance(encoding, Cast):
        return encoding
    codec = encoding.codec
    if isinstance(codec, Codec) and codec.draws:
        raise ValueError(
            f"{codec.name!r} selects by the step which numbers it sends, and a verb has no step: it is for "
            f"DistributedOptimizer(compression=...) and Communicator.allreduce(compression=..., step=...)"
        )
    if isinstance(codec, Codec) and (isinstance(compression, Codec) or not encoding.feedback):
        return codec
    without = f", such as {codec!r}" if isinstance(codec, Codec) else ""
    raise ValueError(
        f"{codec.name!r} with error feedback is for DistributedOptimizer(compression=...), which keeps the error for the "
        f"next step; a verb takes a codec without error feedback{without}"
    )


class Policy:
    """Selects the cast or codec of each parameter's gradient.

    compression: for all parameters; a codec only for those with two dimensions or more, and LEAST_NUMEL elements or more.
    policy: maps patterns of names, like those of files, to the compression of matching parameters of any size; the first match
    counts. Raises ValueError.
    """

    def __init__(self, compression: Compressor | Auto, policy: Mapping[str, Compressor] | None = None) -> None:
        if policy is not None and not isinstance(policy, Mapping):
            raise ValueError(f"policy must map patterns of names to compressions, not be {policy!r}")
        self._default = compression if isinstance(compression, Auto) else encoding_of(compression)
        self._by_pattern = {pattern: encoding_of(value) for pattern, value in (policy or {}).items()}

    @property
    def encodings(self) -> list[Encoding]:
        """Return all encodings by codecs that this policy may select."""
        default = self._default.allowed if isinstance(self._default, Auto) else (self._default,)
        return [x for x in (*default, *self._by_pattern.values()) if isinstance(x, Encoding)]

    @property
    def auto(self) -> Auto | None:
        """Return the Auto for the parameters that no pattern matches; None if predictions choose nothing."""
        return self._default if isinstance(self._default, Auto) else None

    def checked(self, names: Iterable[str] | None) -> Policy:
        """Return this policy, if every pattern matches a parameter's name. Raises ValueError, also if there are no names."""
        if self._by_pattern and names is None:
            raise ValueError("policy selects parameters by name: it needs named_parameters")
        names = list(names or ())
        for pattern in self._by_pattern:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                raise ValueError(f"policy: no parameter's name matches {pattern!r}; names are {some or 'none at all'}")
        return self

    @property
    def described(self) -> tuple[str, str]:
        """Return as text the default compression, and the patterns of parameters that have another one."""
        return self._default.identity, str({pattern: kind.identity for pattern, kind in self._by_pattern.items()})

    def encoding(self, name: str, parameter: Tensor) -> Cast | Encoding:
        """Return the cast or encoding of one parameter's gradient; Compression.none if a prediction chooses it."""
        kind = self._kind(name, parameter)
        return Compression.none if isinstance(kind, Auto) else kind

    def is_chosen(self, name: str, parameter: Tensor) -> bool:
        """Return whether a prediction chooses the encoding of one parameter's gradient."""
        return isinstance(self._kind(name, parameter), Auto)

    def _kind(self, name: str, parameter: Tensor) -> Cast | Encoding | Auto:
        for pattern, encoding in self._by_pattern.items():
            if fnmatchcase(name, pattern):
                return encoding
        is_for_codecs = parameter.dim() >= 2 and parameter.numel() >= LEAST_NUMEL
        return self._default if is_for_codecs or isinstance(self._default, Cast) else Compression.none
