"""What workers push to a parameter server: gradients as they are, or as codes, with error feedback at the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import State
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.collectives.compression.registry import CODECS
from gradwire.collectives.compression.rehearsal import rehearse
from gradwire.collectives.compression.seeds import rounding_seed
from gradwire.trainer.gradients.checkpoint_format import check_finite
from gradwire.trainer.gradients.compression import Cast, Compressor, Encoding, Policy
from gradwire.trainer.servers.connection import Flat
from gradwire.trainer.world.world import here


@dataclass(frozen=True)
class _Coded:
    """Holds which parameters' gradients are one code, as float32 one after the other, and by which encoding."""

    encoding: Encoding
    members: tuple[int, ...]
    flat: Flat
    numel: int


class Packing:
    """Says how gradients of some parameters are packed: those that travel as they are first, one buffer for each dtype; then
    a code for each encoding.

    policy: says by name which parameter travels as what; only codecs of buffers. Attribute flat: the layout of all
    gradients, and of the parameters, without codes.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], policy: Policy) -> None:
        self.flat = Flat(parameters)
        members: dict[Encoding | None, list[int]] = {}
        for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            members.setdefault(_encoding(policy, name, parameter), []).append(number)
        self._plain_members = members.pop(None, [])
        self.plain = Flat([parameters[number] for number in self._plain_members])
        self.coded: list[_Coded] = []
        for encoding, numbers in members.items():
            assert encoding is not None
            shapes = [torch.empty(parameters[n].shape, dtype=torch.float32, device="meta") for n in numbers]
            numel = sum(shape.numel() for shape in shapes)
            self.coded.append(_Coded(encoding, tuple(numbers), Flat(shapes), numel))
            rehearse(encoding.codec, torch.device("cpu"), with_feedback=encoding.feedback)  # now, not in the first step

    def plain_of(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return new buffers with those that travel as they are."""
        return self.plain.pack([gradients[number] for number in self._plain_members])

    def empty(self, step: int) -> list[Tensor]:
        """Return new buffers for what comes from a worker at its step."""
        return [*self.plain.empty(), *(_room(coded, step) for coded in self.coded)]

    def decode(self, pushed: Sequence[Tensor], step: int) -> list[Tensor]:
        """Return gradients, laid out by `flat`, of what a Sender has made of them at a step."""
        if not self.coded:
            return list(pushed)
        gradients = self.flat.empty()
        views = self.flat.views(gradients)
        first_code = len(pushed) - len(self.coded)
        for number, view in zip(self._plain_members, self.plain.views(pushed[:first_code]), strict=True):
            views[number].copy_(view)
        for coded, buffer in zip(self.coded, pushed[first_code:], strict=True):
            values = buffer
            if (codec := coded.encoding.codec_at(step)) is not None:
                values = torch.empty(coded.numel, dtype=torch.float32)
                codec.decode(buffer, values)
            for number, view in zip(coded.members, coded.flat.views([values]), strict=True):
                views[number].copy_(view)
        return gradients


class Sender:
    """Makes buffers of gradients, and keeps what their encoding loses, which is part of the next step's. seed: tells what is
    drawn here from what others draw."""

    def __init__(self, packing: Packing, seed: int) -> None:
        self._packing = packing
        self._seed = seed
        self._residuals = [
            torch.zeros(coded.numel, dtype=torch.float32) if coded.encoding.feedback else None
            for coded in packing.coded
        ]
        self._states = [_new_state(coded) for coded in packing.coded]

    def encode(self, gradients: Sequence[Tensor | None], step: int) -> list[Tensor]:
        """Return buffers for Packing.decode()."""
        pushed = self._packing.plain_of(gradients)
        for number, coded in enumerate(self._packing.coded):
            (values,) = coded.flat.pack([gradients[member] for member in coded.members])
            if (codec := coded.encoding.codec_at(step)) is not None:
                code = _room(coded, step)
                seed = rounding_seed(step, 0, number, 0, 0, self._seed)
                codec.encode(values, code, residual=self._residuals[number], seed=seed, state=self._states[number])
                pushed.append(code)
            else:
                pushed.append(values)
        return pushed

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what is kept, by name."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where state_dict() was called, of the same parameters and encodings. Raises KeyError and ValueError, with nothing
        loaded, for a state of others, and for one with numbers that are not finite."""
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
    """Return by which encodings gradients are pushed. Raises ValueError for codecs that approximate sums over ranks."""
    encodings = Policy(compression)
    for encoding in encodings.encodings:
        if isinstance(encoding.codec, MatrixCodec):
            raise ValueError(
                f"{here()}compression={encoding.codec.name!r} compresses sums over all ranks, and what a rank pushes to a "
                f"server is its own gradient: give a codec of buffers ({', '.join(CODECS)})"
            )
    return encodings


def _room(coded: _Coded, step: int) -> Tensor:
    """Return a new buffer for a code, or for the numbers themselves during the warm-up."""
    codec = coded.encoding.codec_at(step)
    if codec is None:
        return torch.empty(coded.numel, dtype=torch.float32)
    return torch.empty(codec.wire_bytes(coded.numel), dtype=torch.uint8)


def _new_state(coded: _Coded) -> State | None:
    codec = coded.encoding.codec_at(coded.encoding.warmup_steps)
    assert codec is not None
    return codec.new_state(coded.numel, torch.device("cpu")) if coded.encoding.feedback else None


def _encoding(policy: Policy, name: str, parameter: Tensor) -> Encoding | None:
    """Return what one gradient is encoded by; None where it travels as it is."""
    encoding = policy.encoding(name, parameter)
    if isinstance(encoding, Cast):
        codec = encoding.codec(parameter.dtype)
        return None if codec is None else Encoding(codec)
    return encoding
