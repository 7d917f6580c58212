"""The tensors that workers push to servers: dense ones uncompressed or as codes with error feedback at the worker, sparse ones
as rows; and their sums at a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import Codec, State, rounding_seed
from gradwire.collectives.sparse import added
from gradwire.trainer.checkpoint import need_finite
from gradwire.trainer.reducer.compression import Encoding
from gradwire.trainer.servers.messages import Flat

ABSENT, DENSE = -1, 0

Forms: TypeAlias = list[int]
"""The form of each gradient: its number of sparse dimensions, or DENSE, or ABSENT for None."""


def forms_of(gradients: Sequence[Tensor | None]) -> Forms:
    """Return the forms of gradients."""
    return [ABSENT if each is None else each.sparse_dim() if each.is_sparse else DENSE for each in gradients]


def coalesced(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient detached from the autograd graph, and coalesced if it is sparse; None for None."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    return gradient.coalesce() if gradient.is_sparse else gradient


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

    def sent(self, forms: Forms) -> tuple[Sequence[int], Flat]:
        """Return the members that a message contains, and their layout: the dense ones; of an encoded group all members, or
        none if none is dense."""
        dense = [place for place, number in enumerate(self.members) if forms[number] == DENSE]
        if len(dense) == len(self.members) or (dense and self.encoding is not None):
            return self.members, self.flat
        return [self.members[place] for place in dense], Flat([self.tensors[place] for place in dense])


class Packing:
    """Lays out the gradients of some parameters in messages: the dense uncompressed ones, in one buffer for each dtype; then a
    code for each encoding; then the indices and values of each sparse one.

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

    def decode(self, forms: Forms | None, pushed: Sequence[Tensor], step: int) -> list[Tensor | None]:
        """Return the gradients of a step from what Sender.encode() returned, None for each parameter without one."""
        forms = [DENSE] * len(self._like) if forms is None else forms
        arrived = iter(pushed)
        gradients: list[Tensor | None] = [None] * len(forms)
        for group in self.groups:
            members, flat = group.sent(forms)
            buffers = [next(arrived) for _ in range(len(flat))]
            if members and (codec := group.codec_at(step)) is not None:
                values = flat.empty()
                codec.decode(*buffers, *values)
                buffers = values
            for number, view in zip(members, flat.views(buffers), strict=True):
                if forms[number] == DENSE:
                    gradients[number] = view.to(self._like[number].dtype)
        for number, dimensions in enumerate(forms):
            if dimensions > 0:
                gradients[number] = torch.sparse_coo_tensor(
                    next(arrived),
                    next(arrived),
                    self._like[number].shape,
                    device="cpu",
                    is_coalesced=True,
                    check_invariants=False,
                )
        return gradients


class Sender:
    """Encodes gradients into buffers, and adds the error of each encoding to the next step's gradients. seed, rank, number: for
    codecs that draw random numbers; together different for each Sender. Attribute steps: how often it has encoded.

    reuses: whether the buffers of uncompressed gradients are used again by the next step. New ones cost more than the copies.
    """

    def __init__(
        self, packing: Packing, seed: int = 0, rank: int = 0, number: int = 0, *, reuses: bool = False
    ) -> None:
        self._plain, *self._coded = packing.groups
        self._seeds = rank, number, seed
        self._buffers = [group.flat.empty() for group in packing.groups] if reuses else None
        self.steps = 0
        self._residuals: list[Tensor | None] = []
        self._states: list[State | None] = []
        for group in self._coded:
            assert group.encoding is not None
            codec = group.codec_at(group.encoding.warmup_steps)
            assert codec is not None
            keeps, numel = group.encoding.feedback, group.flat.numel
            self._residuals.append(torch.zeros(numel, dtype=torch.float32, device="cpu") if keeps else None)
            self._states.append(codec.new_state(numel, torch.device("cpu")) if keeps else None)

    def encode(self, gradients: Sequence[Tensor | None]) -> tuple[Forms | None, list[Tensor]]:
        """Return the forms of the gradients of a step, None if all are dense, and buffers with the gradients, for
        Packing.decode()."""
        step, self.steps = self.steps, self.steps + 1
        gradients = [coalesced(gradient) for gradient in gradients]
        forms = forms_of(gradients)
        dense = [gradient if form == DENSE else None for form, gradient in zip(forms, gradients, strict=True)]
        pushed: list[Tensor] = []
        for place, group in enumerate((self._plain, *self._coded)):
            members, flat = group.sent(forms)
            reused = self._buffers[place] if self._buffers is not None and flat is group.flat else None
            buffers = flat.pack([dense[member] for member in members], reused)
            if members and (codec := group.codec_at(step)) is not None:
                buffers = [self._encode(place - 1, codec, buffers[0], step)]
                self._keep(place - 1, [dense[member] is None for member in members], codec, buffers[0])
            pushed += buffers
        for dimensions, gradient in zip(forms, gradients, strict=True):
            if dimensions > 0 and gradient is not None:
                pushed += [gradient.indices().cpu(), gradient.values().cpu()]
        return (forms if any(forms) else None), pushed

    def _encode(self, number: int, codec: Codec, values: Tensor, step: int) -> Tensor:
        """Return the code of an encoded group's values."""
        rank, key, seed = self._seeds
        code = torch.empty(codec.wire_bytes(values.numel()), dtype=torch.uint8, device="cpu")
        drawn = rounding_seed(step, rank, number, key, 0, seed)
        codec.encode(values, code, residual=self._residuals[number], seed=drawn, state=self._states[number])
        return code

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
            need_finite(name, state[name])
        for name, tensor in tensors.items():
            tensor.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"residual.{n}": residual for n, residual in enumerate(self._residuals) if residual is not None}
        for number, state in enumerate(self._states):
            tensors |= {f"state.{number}.{name}": tensor for name, tensor in (state or {}).items()}
        return tensors


def weighted_sum(
    tensors: Sequence[tuple[Tensor | None, float]], dtype: torch.dtype, *, in_place: bool = False
) -> Tensor | None:
    """Return the sum of tensors of one shape times their factors, in their order, as a tensor of dtype. A single dense tensor
    with factor 1 is returned without a copy. in_place: whether the sum may be computed in the memory of the first tensor.

    None counts as zeros; if all are None, the sum is None. It is sparse and coalesced if all others are sparse. Floating-point
    numbers are added in float32 or wider. For integers, all factors must be 1.
    """
    present = [(tensor, factor) for tensor, factor in tensors if tensor is not None]
    if not present:
        return None
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    kinds = forms_of([tensor for tensor, _ in present])
    if DENSE not in kinds and all(one == other for one, other in pairwise(kinds)):
        indices = torch.cat([tensor.indices() for tensor, _ in present], 1)
        values = torch.cat([tensor.values().to(wide) * factor for tensor, factor in present])
        return added(indices, values, present[0][0].shape).to(dtype)
    (first, factor), *others = present
    first = first.to_dense() if first.is_sparse else first
    if not others and factor == 1:
        return first.to(dtype)
    total = first.to(wide, copy=not in_place)
    if factor != 1:
        total.mul_(factor)
    for tensor, factor in others:
        total.add_(tensor.to(wide), alpha=1 if factor == 1 else factor)
    return total.to(dtype)
