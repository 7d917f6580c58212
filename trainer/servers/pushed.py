"""The tensors that workers push to servers: dense ones uncompressed or as codes with error feedback at the worker, sparse ones
as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import Codec, State
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.collectives.compression.registry import CODECS
from gradwire.collectives.compression.seeds import rounding_seed
from gradwire.trainer.reducer.checkpoint_format import check_finite
from gradwire.trainer.reducer.compression import Compressor, Encoding, Policy
from gradwire.trainer.servers.connection import Flat
from gradwire.trainer.servers.rows import DENSE, coalesced, form_of, of_rows
from gradwire.trainer.world.world import here

_Forms: TypeAlias = list[list[int]]
"""The form of each parameter's gradient in a message, see form_of()."""


@dataclass(frozen=True)
class _Group:
    """Describes gradients that are sent together: if encoding is None, uncompressed, in one buffer for each dtype; else as one
    code of float32 values. members: the numbers of their parameters. tensors: tensors with the shapes and dtypes in which
    they are sent."""

    encoding: Encoding | None
    members: tuple[int, ...]
    tensors: tuple[Tensor, ...]

    @cached_property
    def flat(self) -> Flat:
        """Return the layout of all members."""
        return Flat(self.tensors)

    def codec_at(self, step: int) -> Codec | None:
        """Return the codec of a step; None if the gradients are uncompressed, as during the warm-up."""
        return None if self.encoding is None else self.encoding.codec_at(step)

    def sent(self, forms: _Forms) -> tuple[Sequence[int], Flat]:
        """Return the members that a message contains, and their layout: the dense ones; of an encoded group all members, or
        none if none is dense."""
        dense = [place for place, number in enumerate(self.members) if forms[number][0] == DENSE]
        if len(dense) == len(self.members) or (dense and self.encoding is not None):
            return self.members, self.flat
        return [self.members[place] for place in dense], Flat([self.tensors[place] for place in dense])

    def empty(self, forms: _Forms, step: int) -> list[Tensor]:
        """Return new buffers into which to receive a worker's gradients of a step."""
        members, flat = self.sent(forms)
        codec = self.codec_at(step)
        if codec is None or not members:
            return flat.empty()
        return [torch.empty(codec.wire_bytes(flat.numel), dtype=torch.uint8, device="cpu")]


class Packing:
    """Lays out the gradients of some parameters in messages: first the form of each gradient; then the dense uncompressed ones,
    in one buffer for each dtype; then a code for each encoding; then the indices and values of each sparse one.

    encodings: the encoding of each dense gradient; None for uncompressed. Attribute flat: the layout of the parameters.
    """

    def __init__(self, parameters: Sequence[Tensor], encodings: Sequence[Encoding | None]) -> None:
        self.flat = Flat(parameters)
        self._like = [torch.empty_like(parameter, device="meta") for parameter in parameters]
        members: dict[Encoding | None, list[int]] = {None: []}
        for number, encoding in enumerate(encodings):
            members.setdefault(encoding, []).append(number)
        self.groups: list[_Group] = []
        for encoding, numbers in members.items():
            given = [self._like[number] for number in numbers]
            if encoding is not None:
                given = [like.to(torch.float32) for like in given]
            self.groups.append(_Group(encoding, tuple(numbers), tuple(given)))

    def dense_forms(self) -> Tensor:
        """Return the forms of gradients that are all dense, which are zeros; a new tensor."""
        return torch.zeros((len(self._like), 2), dtype=torch.int64, device="cpu")

    def empty_rows(self, count: int) -> Tensor:
        """Return a new tensor into which to receive some rows of the only parameter."""
        (like,) = self._like
        return torch.empty((count, *like.shape[1:]), dtype=like.dtype, device="cpu")

    def empty(self, forms: Tensor, step: int) -> list[Tensor]:
        """Return new buffers into which to receive a worker's gradients of these forms."""
        listed = forms.tolist()
        buffers = [buffer for group in self.groups for buffer in group.empty(listed, step)]
        for like, (dimensions, rows) in zip(self._like, listed, strict=True):
            if dimensions > 0:
                buffers.append(torch.empty((dimensions, rows), dtype=torch.int64, device="cpu"))
                buffers.append(torch.empty((rows, *like.shape[dimensions:]), dtype=like.dtype, device="cpu"))
        return buffers

    def decode(self, pushed: Sequence[Tensor], step: int) -> list[Tensor | None]:
        """Return the gradients of a step from what Sender.encode() returned, None for each parameter without one."""
        arrived = iter(pushed)
        forms = next(arrived).tolist()
        gradients: list[Tensor | None] = [None] * len(forms)
        for group in self.groups:
            members, flat = group.sent(forms)
            buffers = [next(arrived) for _ in range(len(flat))]
            if members and (codec := group.codec_at(step)) is not None:
                values = flat.empty()
                codec.decode(*buffers, *values)
                buffers = values
            for number, view in zip(members, flat.views(buffers), strict=True):
                if forms[number][0] == DENSE:
                    gradients[number] = view.to(self._like[number].dtype)
        for number, (dimensions, _) in enumerate(forms):
            if dimensions > 0:
                gradients[number] = of_rows(next(arrived), next(arrived), self._like[number].shape)
        return gradients


class Sender:
    """Encodes gradients into buffers, and adds the error of each encoding to the next step's gradients. seed, rank, key: for
    codecs that draw random numbers; together different for each Sender."""

    def __init__(self, packing: Packing, seed: int, rank: int = 0, key: int = 0) -> None:
        self._plain, *self._coded = packing.groups
        self._seed, self._rank, self._key = seed, rank, key
        self._residuals: list[Tensor | None] = []
        self._states: list[State | None] = []
        for group in self._coded:
            assert group.encoding is not None
            codec = group.codec_at(group.encoding.warmup_steps)
            assert codec is not None
            keeps, numel = group.encoding.feedback, group.flat.numel
            self._residuals.append(torch.zeros(numel, dtype=torch.float32, device="cpu") if keeps else None)
            self._states.append(codec.new_state(numel, torch.device("cpu")) if keeps else None)

    def encode(self, gradients: Sequence[Tensor | None], step: int) -> list[Tensor]:
        """Return the forms of the gradients of a step, and buffers with the gradients, for Packing.decode()."""
        gradients = [coalesced(gradient) for gradient in gradients]
        forms = [form_of(gradient) for gradient in gradients]
        dense = [gradient if form[0] == DENSE else None for form, gradient in zip(forms, gradients, strict=True)]
        pushed = [torch.tensor(forms, dtype=torch.int64, device="cpu").reshape(-1, 2)]
        members, flat = self._plain.sent(forms)
        pushed += flat.pack([dense[number] for number in members])
        for number, group in enumerate(self._coded):
            members, flat = group.sent(forms)
            buffers = flat.pack([dense[member] for member in members])
            if members and (codec := group.codec_at(step)) is not None:
                (values,) = buffers
                (code,) = group.empty(forms, step)
                seed = rounding_seed(step, self._rank, number, self._key, 0, self._seed)
                codec.encode(values, code, residual=self._residuals[number], seed=seed, state=self._states[number])
                self._keep(number, [dense[member] is None for member in members], codec, code)
                buffers = [code]
            pushed += buffers
        for (dimensions, _), gradient in zip(forms, gradients, strict=True):
            if dimensions > 0 and gradient is not None:
                pushed += [gradient.indices().cpu(), gradient.values().cpu()]
        return pushed

    def _keep(self, number: int, unused: Sequence[bool], codec: Codec, code: Tensor) -> None:
        """Add to a residual what the code has for members without a dense gradient, which the server does not use."""
        residual = self._residuals[number]
        if residual is None or not any(unused):
            return
        flat = self._coded[number].flat
        values = flat.empty()
        codec.decode(code, *values)
        for is_unused, kept, view in zip(unused, flat.views([residual]), flat.views(values), strict=True):
            if is_unused:
                kept.add_(view.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the residuals and the codec states, by name."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of state_dict() for the same parameters and encodings. Raises KeyError or ValueError, with nothing
        loaded, for a state of other ones, and for numbers that are not finite."""
        tensors = self._tensors()
        for name, tensor in tensors.items():
            if state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
                has, needs = ((tuple(each.shape), each.dtype) for each in (state[name], tensor))
                raise ValueError(f"{name} is {has[1]} of shape {has[0]}, not {needs[1]} of shape {needs[0]}")
            check_finite(name, state[name])
        for name, tensor in tensors.items():
            tensor.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"residual.{n}": residual for n, residual in enumerate(self._residuals) if residual is not None}
        for number, state in enumerate(self._states):
            tensors |= {f"state.{number}.{name}": tensor for name, tensor in (state or {}).items()}
        return tensors


def encodings_of(compression: Compressor) -> Policy:
    """Return the encodings of pushed gradients. Raises ValueError for matrix codecs, which compress sums over ranks."""
    encodings = Policy(compression)
    for encoding in encodings.encodings:
        if isinstance(encoding.codec, MatrixCodec):
            raise ValueError(
                f"{here()}compression={encoding.codec.name!r} compresses sums over all ranks, but what a rank pushes to a "
                f"server is its own gradient: give a codec of buffers ({', '.join(CODECS)})"
            )
    return encodings
