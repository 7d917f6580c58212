"""Catalogue: lists a key-value store's keys, equally on all ranks. Functions check keys, tensors, rows and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.collectives.compression.codec import Codec
from gradwire.trainer.reducer.compression import Encoding
from gradwire.trainer.servers.packing import Packing
from gradwire.trainer.servers.server import Key

_Result = TypeVar("_Result")

Name: TypeAlias = int | str

Factory: TypeAlias = Callable[[list[Tensor]], torch.optim.Optimizer]
"""A function that makes an optimizer for a list of tensors, such as functools.partial(torch.optim.SGD, lr=0.1)."""


@dataclass
class KeySpec(Key):
    """Describes a key with one tensor, its value. name: the key."""

    name: Name
    shape: torch.Size
    dtype: torch.dtype


class Catalogue:
    """Lists the keys, in the order in which they were added. servers: the ranks that hold keys; each key is on one server.
    rank: that of this process, for errors."""

    def __init__(self, servers: Iterable[int], rank: int) -> None:
        self._rank = rank
        self._specs: dict[Name, KeySpec] = {}
        self._codec: Codec | None = None
        self._loads = dict.fromkeys(sorted(servers), 0)

    def __iter__(self) -> Iterator[KeySpec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def add(self, name: Name, value: Tensor) -> KeySpec:
        """Add a key with this value's shape and dtype, on the server with the fewest elements. Return its KeySpec."""
        server = min(self._loads, key=lambda server: self._loads[server])
        self._loads[server] += max(1, value.numel())
        title, number, packing = f"key {name!r}", len(self._specs), self._packing(value)
        self._specs[name] = KeySpec(title, number, server, packing, name, value.shape, value.dtype)
        return self._specs[name]

    def compress(self, codec: Codec) -> None:
        """Let a codec encode what is pushed to the keys, present and future."""
        self._codec = codec
        for spec in self:
            spec.packing = self._packing(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))

    def _packing(self, value: Tensor) -> Packing:
        """Return how pushes to a key are sent: by the codec, if there is one and the value has floating-point numbers."""
        codec, encoding = self._codec, None
        if codec is not None and value.dtype.is_floating_point and value.numel():
            encoding = Encoding(codec, feedback=codec.needs_feedback)
        return Packing([value], [encoding])

    def new_values(self, key: Any, value: Any) -> dict[Name, Tensor]:
        """Return the values of new keys, by key, dense and on the CPU. Raises TypeError if a value is not a tensor, ValueError
        if a key exists."""
        named = {}
        for name, tensor in pairs_of(key, value, "value"):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"value of key {name!r} must be a tensor, not {tensor!r}")
            if name in self._specs:
                raise ValueError(f"key {name!r} has been given to init() before; push() changes it")
            named[name] = dense(tensor).cpu()
        return named

    def tensors(self, key: Any, given: Any, what: str) -> list[tuple[KeySpec, list[Tensor]]]:
        """Return the KeySpec of each key with the tensors given for it. what: the argument's name.

        Raises KeyError for an unknown key, TypeError or ValueError for tensors that do not match its value.
        """
        found = []
        for name, each in pairs_of(key, given, what):
            if name not in self._specs:
                known = ", ".join(map(repr, list(self._specs)[:10])) + (", ..." if len(self._specs) > 10 else "")
                raise KeyError(
                    f"rank {self._rank}: key {name!r} was never given to init(); known are {known or 'none'}"
                )
            spec = self._specs[name]
            tensors = list(each) if isinstance(each, (list, tuple)) else [each]
            if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
                raise TypeError(f"{what} of key {name!r} must be a tensor or a list of tensors, not {each!r}")
            for tensor in tensors:
                if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
                    raise ValueError(
                        f"{what} of key {name!r} must have shape {list(spec.shape)} and dtype {spec.dtype}, as init() was "
                        f"given, not {list(tensor.shape)} and {tensor.dtype}"
                    )
            found.append((spec, tensors))
        return found


def agreed(communicator: Communicator, compute: Callable[[], tuple[_Result, Any]]) -> _Result:
    """Call compute(), which returns a result and a record that JSON can hold. Return the result if all ranks have the same
    record. Collective.

    If compute() fails on a rank, raises its error on that rank and ValueError on the others. Raises ValueError on all ranks if
    the records differ.
    """
    result, record, error = None, None, None
    try:
        result, record = compute()
    except Exception as caught:  # the other ranks wait for this rank's record
        error = caught
    everyones = communicator.allgather_record([None if error is None else str(error), record])
    if error is not None:
        raise error
    for rank, (fault, theirs) in enumerate(everyones):
        if fault is not None:
            raise ValueError(f"no rank did anything, because rank {rank} cannot: {fault}")
        if theirs != everyones[0][1]:
            raise ValueError(
                f"the arguments differ between ranks: {everyones[0][1]} on rank 0; {theirs} on rank {rank}"
            )
    return cast(_Result, result)


def pairs_of(key: Any, values: Any, what: str) -> list[tuple[Name, Any]]:
    """Return each key with its value. what: the argument's name.

    Raises TypeError for keys other than int or str, ValueError if there are not as many values as keys or a key is given twice.
    """
    if not isinstance(key, (list, tuple)):
        pairs = [(key, values)]
    elif not isinstance(values, (list, tuple)) or len(values) != len(key):
        given = f"{len(values)} of them" if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"{what} must be a list as long as that of the keys, {len(key)}, not {given}")
    else:
        pairs = list(zip(key, values, strict=True))
    names: set[Name] = set()
    for name, _ in pairs:
        if isinstance(name, bool) or not isinstance(name, (int, str)):
            raise TypeError(f"a key must be an int or a str, not {name!r}")
        if name in names:
            raise ValueError(f"key {name!r} is given twice in one call; one key takes a list of tensors")
        names.add(name)
    return pairs


def rows_of(spec: KeySpec, row_ids: Any) -> Tensor:
    """Return the row numbers, sorted and without duplicates, on the CPU. Raises ValueError or TypeError for invalid ones."""
    if not isinstance(row_ids, Tensor) or row_ids.is_floating_point() or row_ids.dtype == torch.bool:
        raise TypeError(f"row_ids of key {spec.name!r} must be a tensor of whole numbers, not {row_ids!r}")
    if not spec.shape:
        raise ValueError(f"key {spec.name!r} has no rows: its value is a single number")
    rows: Tensor = row_ids.detach().to("cpu", torch.int64).unique()
    wrong = rows[(rows < 0) | (rows >= spec.shape[0])]
    if len(wrong):
        raise ValueError(f"row_ids of key {spec.name!r} must be from 0 to {spec.shape[0] - 1}, and {wrong[0]} is not")
    return rows


def lists_of_rows(key: Any, outs: Sequence[list[Tensor]], row_ids: Any) -> list[list[Any]]:
    """Return the row_ids of each tensor in outs, which has a list of tensors for each key. row_ids: one for all tensors, one
    for each key, or one for each tensor of a single key. Raises ValueError for another number."""
    given = list(row_ids) if isinstance(row_ids, (list, tuple)) else [row_ids]
    if len(given) == 1:
        return [given * len(tensors) for tensors in outs]
    if isinstance(key, (list, tuple)) and len(given) == len(outs):
        return [[rows] * len(tensors) for rows, tensors in zip(given, outs, strict=True)]
    if not isinstance(key, (list, tuple)) and len(given) == len(outs[0]):
        return [given]
    raise ValueError(
        f"row_ids must be one tensor, or as many as there are keys, or tensors in out for a single key, not "
        f"{len(given)}"
    )


def described(factory: Factory) -> tuple[str, str]:
    """Return the class name and settings of the optimizers that a factory makes. Raises TypeError if it is not a factory."""
    wanted = (
        "set_optimizer needs a function that makes an optimizer of a list of tensors, such as "
        "functools.partial(torch.optim.SGD, lr=0.1)"
    )
    probe = torch.zeros(1, dtype=torch.float32, device="cpu")
    try:
        made = factory([probe])
    except Exception as error:
        raise TypeError(f"{wanted}; {factory!r} raised {error!r}") from error
    groups = made.param_groups if isinstance(made, torch.optim.Optimizer) else []
    if [parameter is probe for group in groups for parameter in group["params"]] != [True]:
        raise TypeError(f"{wanted}; {factory!r} returned {made!r}")
    return type(made).__name__, str({name: value for name, value in groups[0].items() if name != "params"})


def check_updatable(name: Name, shape: torch.Size, dtype: torch.dtype, factory: Factory) -> None:
    """Raise ValueError if a server could not make an optimizer for a key's value."""
    if not dtype.is_floating_point:
        raise ValueError(f"an optimizer needs floating-point tensors, and key {name!r} has dtype {dtype}")
    try:
        factory([torch.zeros(shape, dtype=dtype, device="cpu")])
    except Exception as error:
        raise ValueError(f"no optimizer of key {name!r}, of shape {list(shape)}: {error!r}") from error


def is_sparse(tensor: Tensor) -> bool:
    """Return whether a tensor has a layout other than torch.strided."""
    return tensor.layout is not torch.strided


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor in dense layout, detached from the autograd graph."""
    tensor = tensor.detach()
    return tensor.to_dense() if is_sparse(tensor) else tensor


@torch.no_grad()
def fill_rows(tensor: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write the values of some rows. A sparse tensor then consists of these rows; a dense tensor keeps its other rows."""
    if is_sparse(tensor):
        made = torch.sparse_coo_tensor(
            rows[None], values, tensor.shape, is_coalesced=True, check_invariants=False, device=tensor.device
        )
        tensor.copy_(made)
    else:
        tensor[rows.to(tensor.device)] = values.to(tensor.device)
