"""The gradients that workers push to a parameter server: uncompressed, or as codes with error feedback at the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import Codec, State
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.collectives.compression.registry import CODECS
from gradwire.collectives.compression.rehearsal import rehearse
from gradwire.collectives.compression.seeds import rounding_seed
from gradwire.trainer.gradients.checkpoint_format import check_finite
from gradwire.trainer.gradients.compression import Compressor, Encoding, Policy, encoding_for
from gradwire.trainer.servers.connection import Flat
from gradwire.trainer.world.world import here


@dataclass(frozen=True)
class _Group:
    """Describes gradients that are sent together: if encoding is None, uncompressed, in one buffer for each dtype; else as one
    code of float32 values. members: the numbers of their parameters. flat: the layout of the buffers or values."""

    encoding: Encoding | None
    members: tuple[int, ...]
    flat: Flat

    def codec_at(self, step: int) -> Codec | None:
        """Return the codec of a step; None if the gradients are uncompressed, as during the warm-up."""
        return None if self.encoding is None else self.encoding.codec_at(step)

    def empty(self, step: int) -> list[Tensor]:
        """Return new buffers into which to receive a worker's gradients of a step."""
        codec = self.codec_at(step)
        if codec is None:
            return self.flat.empty()
        return [torch.empty(codec.wire_bytes(self.flat.numel), dtype=torch.uint8, device="cpu")]

    def pack(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return new buffers with this group's members of all gradients, laid out by `flat`."""
        return self.flat.pack([gradients[number] for number in self.members])


class Packing:
    """Lays out the gradients of some parameters in messages: first the uncompressed ones, in one buffer for each dtype; then a
    code for each encoding.

    policy: selects the encoding of each parameter by name; no matrix codecs. Attribute flat: the layout of all gradients, and
    of the parameters, when uncompressed.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], policy: Policy) -> None:
        self.flat = Flat(parameters)
        members: dict[Encoding | None, list[int]] = {None: []}
        for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            members.setdefault(encoding_for(policy.encoding(name, parameter), parameter.dtype), []).append(number)
        self.groups: list[_Group] = []
        for encoding, numbers in members.items():
            given = [parameters[number] for number in numbers]
            if encoding is not None:
                given = [torch.empty(parameter.shape, dtype=torch.float32, device="meta") for parameter in given]
                rehearse(
                    encoding.codec, torch.device("cpu"), with_feedback=encoding.feedback
                )  # compiles now, not in the first step
            self.groups.append(_Group(encoding, tuple(numbers), Flat(given)))

    def empty(self, step: int) -> list[Tensor]:
        """Return new buffers into which to receive a worker's gradients of a step."""
        return [buffer for group in self.groups for buffer in group.empty(step)]

    def decode(self, pushed: Sequence[Tensor], step: int) -> list[Tensor]:
        """Decode the buffers of a Sender for a step, and return the gradients, laid out by `flat`."""
        if len(self.groups) == 1:  # all gradients are uncompressed
            return list(pushed)
        gradients = self.flat.empty()
        views = self.flat.views(gradients)
        arrived = iter(pushed)
        for group in self.groups:
            buffers = [next(arrived) for _ in range(len(group.flat))]
            if (codec := group.codec_at(step)) is not None:
                values = group.flat.empty()
                codec.decode(*buffers, *values)
                buffers = values
            for number, view in zip(group.members, group.flat.views(buffers), strict=True):
                views[number].copy_(view)
        return gradients


class Sender:
    """Encodes gradients into buffers, and adds the error of each encoding to the next step's gradients. seed: for codecs that
    draw random numbers; different for each Sender."""

    def __init__(self, packing: Packing, seed: int) -> None:
        self._plain, *self._coded = packing.groups
        self._seed = seed
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
        """Return buffers with the gradients of a step, for Packing.decode()."""
        pushed = self._plain.pack(gradients)
        for number, group in enumerate(self._coded):
            (values,) = group.pack(gradients)
            if (codec := group.codec_at(step)) is not None:
                (code,) = group.empty(step)
                seed = rounding_seed(step, 0, number, 0, 0, self._seed)
                codec.encode(values, code, residual=self._residuals[number], seed=seed, state=self._states[number])
                values = code
            pushed.append(values)
        return pushed

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
