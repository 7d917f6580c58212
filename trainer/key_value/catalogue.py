"""The keys of a key-value store as all ranks know them: which there are, and where each lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from trainer.key_value.arguments import check_tensor, pairs_of, tensors_of
from trainer.key_value.entry import KeySpec, Name
from trainer.world import here


class Catalogue:
    """Lists the keys, in the order in which they came. servers: the ranks that hold keys, each as a whole."""

    def __init__(self, servers: Iterable[int]) -> None:
        self._specs: dict[Name, KeySpec] = {}
        self._loads = dict.fromkeys(sorted(servers), 0)

    def __iter__(self) -> Iterator[KeySpec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def add(self, name: Name, value: Tensor) -> KeySpec:
        """Take in a new key with a value of this shape and dtype, at the server whose keys have the fewest elements."""
        server = min(self._loads, key=lambda server: self._loads[server])
        self._loads[server] += max(1, value.numel())
        self._specs[name] = KeySpec(name, len(self._specs), value.shape, value.dtype, server)
        return self._specs[name]

    def new_values(self, key: Any, value: Any) -> dict[Name, Tensor]:
        """Return what is given for new keys. Raises TypeError for what is no tensor, ValueError for a key that is known."""
        named = {}
        for name, tensor in pairs_of(key, value, "value"):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{here()}value of key {name!r} must be a tensor, not {tensor!r}")
            if name in self._specs:
                raise ValueError(f"{here()}key {name!r} has been given to init() before; push() changes it")
            named[name] = tensor
        return named

    def tensors(self, key: Any, given: Any, what: str) -> list[tuple[KeySpec, list[Tensor]]]:
        """Return known keys with the tensors that are given for each. what: the argument's name.

        Raises KeyError for a key that is not known, TypeError or ValueError for tensors that are not as its value is.
        """
        found = []
        for name, each in pairs_of(key, given, what):
            spec = self._spec(name)
            tensors = tensors_of(name, each, what)
            for tensor in tensors:
                check_tensor(spec, tensor, what)
            found.append((spec, tensors))
        return found

    def _spec(self, name: Name) -> KeySpec:
        if name not in self._specs:
            known = ", ".join(map(repr, list(self._specs)[:10])) + (", ..." if len(self._specs) > 10 else "")
            raise KeyError(f"{here()}key {name!r} was never given to init(); known are {known or 'none'}")
        return self._specs[name]
