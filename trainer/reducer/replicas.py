"""The check that the ranks that train one model hold the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Communicator, ReplicasDiffer
from gradwire.collectives.kernels import cpu_or_reference
from gradwire.collectives.kernels.reference import memory as reference
from gradwire.trainer.reducer.dtensors import held_here

_WORD = 8


@dataclass(frozen=True)
class ReplicaCheck:
    """Compares the parameters of all ranks, and with_state also the optimizer's state. all_names: returns the parameters with
    their names."""

    communicator: Communicator
    optimizer: torch.optim.Optimizer
    all_names: Callable[[], dict[Tensor, str]]
    with_state: bool = True

    def compare(self, step: int) -> None:
        """Compare one hash of each rank first, and the hashes of all values only if the first ones differ. Collective. Raises
        ReplicasDiffer on all ranks. step: the number of steps so far; before the first one, only the parameters that require
        gradients are compared."""
        hashes = {name: hash_of(value) for name, value in (self._values() if step else self._trained())}
        summary = (
            f"{hash_of(tuple(sorted(hashes.items()))):016x}"  # ranks may list their parameters in different orders
        )
        if len(set(self.communicator.allgather_record(summary))) == 1:
            return
        random = f"{hash_of(torch.get_rng_state()):016x}"
        gathered: list[tuple[dict[str, int], str]] = self.communicator.allgather_record((hashes, random))
        every_name = dict.fromkeys(name for theirs, _ in gathered for name in theirs)
        differing = [name for name in every_name if len({theirs.get(name) for theirs, _ in gathered}) > 1]
        are = "differ too" if len({theirs for _, theirs in gathered}) > 1 else "are equal"
        raise ReplicasDiffer(
            differing[0],
            [theirs.get(differing[0]) for theirs, _ in gathered],
            len(differing),
            rank=self.communicator.rank,
            operation=f"check of replicas after step {step}" if step else "check of replicas before the first step",
            detail=f". The states of torch's random numbers on the CPU {are}. If the ranks began with different values: call "
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step. If they are to differ, give "
            "check_replicas_every=None",
        )

    def _trained(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of the parameters that require gradients."""
        for parameter, name in self._called().items():
            if parameter.requires_grad:
                yield name, parameter

    def _called(self) -> dict[Tensor, str]:
        """Return the parameters with their names in errors."""
        return {
            parameter: name if name.startswith("parameter ") else f"parameter {name!r}"
            for parameter, name in self.all_names().items()
        }

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Yield names and values: of the parameters, then of the optimizer's state of each, then of its groups' settings."""
        called = self._called()
        for parameter, name in called.items():
            yield name, parameter
        if not self.with_state:
            return
        for parameter, name in called.items():
            for key, value in _leaves(self.optimizer.state.get(parameter, {})):
                yield f"state {key!r} of {name}", value
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in _leaves({key: value for key, value in group.items() if key != "params"}):
                yield f"setting {key!r} of param group {number}", value


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield tensors, numbers, strings and None in nested dicts, lists and tuples, with their paths; skip everything else."""
    if isinstance(tree, (Mapping, list, tuple)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif tree is None or isinstance(tree, (Tensor, int, float, complex, str)):
        yield path, tree


@torch.no_grad()
def hash_of(value: Any) -> int:
    """Return a 64-bit hash of this rank's part of a tensor, or of the repr() of another value.

    For a tensor, it is the hash of its bytes in logical order, for any strides, by
    gradwire.collectives.kernels.reference.memory; the last word is padded with zeros. Tensors with the same bytes have the same
    hash, whatever their dtype, shape and device. Raises TypeError for a sparse tensor.
    """
    if not isinstance(value, Tensor):
        value = torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8)
    value = held_here(value).detach()
    if value.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {value.layout} has no hash; dense ones have")
    data = value.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // _WORD * _WORD
    words = data[:whole]
    if words.data_ptr() % _WORD or words.storage_offset() % _WORD:
        words = words.clone()
    found = _hash_words(words.view(torch.int64), 1)
    if whole == data.numel():
        return found
    rest = data.new_zeros(_WORD)
    rest[: data.numel() - whole] = data[whole:]
    return (found + _hash_words(rest.view(torch.int64), whole // _WORD + 1)) % 2**64


def _hash_words(words: Tensor, place: int) -> int:
    kernels = cpu_or_reference() if words.is_cpu else reference
    number: int = kernels.hash_words(words, place)
    return number
