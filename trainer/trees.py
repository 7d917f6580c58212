"""Trees of tensors and plain values: written as JSON and the tensors' bytes, and sent between ranks. Nothing is pickled but
what a caller of broadcast() keeps of other types."""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.collectives.kernels.reference.memory import LINE_BYTES
from gradwire.collectives.reduction import MOVED, check_dtype
from gradwire.trainer.checkpoint import on_all_ranks
from gradwire.trainer.reducer.arguments import check_tensor
from gradwire.trainer.world.world import names_rank

ALIGNMENT_BYTES = LINE_BYTES
"""The bytes of each tensor begin at a multiple of this."""

_LIST_BYTES = 32 << 20
"""Tree.pieces() yields a list once it holds this many bytes."""

_SEQUENCES: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size)}
_MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (dict, list, set, int, float)}
"""The containers that a tree may have, by name, and what may make the values of a defaultdict."""

_NOT_SENT = "rank {} has what cannot be sent ({})"
"""The text of the error of all ranks for the tree of one of them."""

_New: TypeAlias = "Callable[[torch.dtype, list[int], str], Tensor]"
"""A function that returns a tensor of a dtype and shape on a device, given by its type."""


@dataclass
class Tree:
    """Holds a tree as its layout and its tensors, in the order of the tree. layout: JSON, with dtype, shape and device type in
    place of each tensor.

    starts: the offset of each tensor in bytes. nbytes: the number of bytes of all tensors, with padding.
    """

    layout: Any
    tensors: list[Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    nbytes: int = 0

    def pieces(self, start: int, stop: int) -> Iterator[list[Tensor]]:
        """Yield bytes start to stop of the tree as lists of contiguous CPU tensors, each beginning at the next multiple of
        ALIGNMENT_BYTES. start: a multiple of it. The lists are short, so that few copies from a GPU exist at a time."""
        found: list[Tensor] = []
        nbytes = 0
        for tensor, first in zip(self.tensors, self.starts, strict=True):
            begin, end = max(first, start), min(first + tensor.nbytes, stop)
            if begin >= end:
                continue
            piece = _in_order(tensor).view(-1)
            if end - begin < tensor.nbytes:
                piece = piece.view(torch.uint8)[begin - first : end - first]
            found.append(piece.cpu())
            nbytes += end - begin
            if nbytes >= _LIST_BYTES:
                yield found
                found, nbytes = [], 0
        yield found


def _in_order(tensor: Tensor) -> Tensor:
    """Return the tensor with its numbers in order in memory of their own: a copy of a transposed, expanded or conjugate one."""
    return tensor.resolve_conj().resolve_neg().contiguous()


@names_rank
def flatten(tree: Any, name: str, *, keeps_others: bool = False) -> Tree:
    """Return the Tree of dicts, lists, tuples, sets, tensors, numbers, strings, booleans and None. Tensors are not copied.

    Containers keep their types, also OrderedDicts with attributes, Counters, defaultdicts, and named tuples of classes that a
    module defines at its top. name: that of the tree in errors. keeps_others: whether values of other types remain in the
    layout, which JSON then cannot hold. Raises TypeError for them otherwise, and for a tensor that is not dense or has no
    memory of its own.
    """
    found = Tree(None)

    def outline(value: Any, *path: Any) -> Any:
        if isinstance(value, Tensor):
            tensor = check_tensor(value.detach())
            found.tensors.append(tensor)
            found.starts.append(found.nbytes)
            found.nbytes += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            return {"tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type]}
        if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
            return value
        kind = type(value)
        if _MAPPINGS.get(kind.__name__) is kind:
            return {kind.__name__: pairs(value, path), **attributes(value, path)}
        if kind is defaultdict and (value.default_factory is None or value.default_factory in _FACTORIES.values()):
            factory = value.default_factory
            return {"defaultdict": [factory and factory.__name__, pairs(value, path)]}
        if _SEQUENCES.get(kind.__name__) is kind:
            return {kind.__name__: [outline(each, *path, number) for number, each in enumerate(value)]}
        if isinstance(value, tuple) and _named_tuple(kind.__module__, kind.__qualname__) is kind:
            items = [outline(each, *path, number) for number, each in enumerate(value)]
            return {"named": [kind.__module__, kind.__qualname__, items]}
        if keeps_others:
            return {"other": value}
        place = name + "".join(f"[{key!r}]" for key in path)
        raise TypeError(
            f"{place} is of type {kind.__name__}, and what is kept are tensors, numbers, strings, booleans, None, dicts, "
            "lists, tuples and sets of these, and objects with state_dict() and load_state_dict()"
        )

    def pairs(value: Mapping[Any, Any], path: tuple[Any, ...]) -> list[Any]:
        return [[outline(key, *path), outline(each, *path, key)] for key, each in value.items()]

    def attributes(value: Any, path: tuple[Any, ...]) -> dict[str, Any]:
        """Return the attributes of a container, such as the _metadata in the state of a module."""
        own = getattr(value, "__dict__", None)
        return {"attributes": pairs(own, path)} if own else {}

    found.layout = outline(tree)
    return found


def unflatten(layout: Any, data: Tensor) -> Any:
    """Return the tree of a layout. data: the bytes of its tensors, uint8, which are copied. Raises TypeError for a named tuple
    whose class this process has not imported."""
    at = 0

    def cut(dtype: torch.dtype, shape: list[int], device: str) -> Tensor:
        nonlocal at
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        tensor = data[at : at + nbytes].view(dtype).view(shape).clone().to(device)
        at += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return tensor

    return _filled(layout, cut)


def _filled(layout: Any, new: _New) -> Any:
    """Return the tree of a layout. new: returns the next tensor."""

    def fill(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind, content = next(iter(value.items()))
        if kind == "tensor":
            dtype, shape, device = content
            return new(getattr(torch, dtype), shape, device)
        if kind == "other":
            return content
        if kind == "named":
            module, qualified, items = content
            named = _named_tuple(module, qualified)
            if named is None:
                raise TypeError(f"saved or sent was a {module}.{qualified}, which is no named tuple in this process")
            return named._make([fill(each) for each in items])
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([fill(each) for each in content])
        if kind == "defaultdict":
            factory, items = content
            return defaultdict(_FACTORIES.get(factory), unpaired(items))
        made = _MAPPINGS[kind](unpaired(content))
        if "attributes" in value:
            vars(made).update(unpaired(value["attributes"]))
        return made

    def unpaired(items: list[Any]) -> dict[Any, Any]:
        return {fill(key): fill(each) for key, each in items}

    return fill(layout)


def _named_tuple(module: str, qualified: str) -> Any:
    """Return a class of named tuples by its name, if this process has imported it; else None."""
    found: Any = sys.modules.get(module)
    for name in qualified.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_make") else None


def encode(record: Any, default: Callable[[Any], Any] | None = None) -> Tensor:
    """Return a record as JSON in a tensor of uint8. default: converts values that JSON cannot hold, as in json.dumps."""
    return torch.frombuffer(bytearray(json.dumps(record, default=default).encode()), dtype=torch.uint8)


def decode(data: Tensor) -> Any:
    """Return the record that encode() was given. JSON turns tuples into lists and keys into strings."""
    return json.loads(data.numpy().tobytes())


def broadcast(tree: Any, root: int, communicator: Communicator) -> Any:
    """Return the tree of the rank `root`, with its tensors on the same types of device; the trees of other ranks are ignored.
    Collective. Values of types that a Tree cannot hold are sent pickled. Raises ValueError on all ranks for what the root
    cannot send."""
    mine = Tree(None)

    def flatten_on_root() -> None:
        nonlocal mine
        if communicator.rank == root:
            mine = flatten(tree, "tree", keeps_others=True)
            pickle.dumps(mine.layout)  # raises for what cannot be pickled
            for tensor in mine.tensors:
                check_dtype(root, tensor.dtype, MOVED)

    on_all_ranks(communicator, flatten_on_root, failed=_NOT_SENT)  # the others would wait for what the root cannot send
    layout = communicator.broadcast_object(mine.layout, root)
    if communicator.rank == root:
        for tensor in mine.tensors:
            communicator.broadcast(_in_order(tensor), root)
        return tree

    def received(dtype: torch.dtype, shape: list[int], device: str) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        communicator.broadcast(tensor, root)
        return tensor

    return _filled(layout, received)


def gather(tree: Any, root: int, communicator: Communicator) -> list[Any] | None:
    """Return the trees of all ranks, by rank, on the rank `root`; None on the others. Collective. Raises ValueError on all
    ranks for values that a Tree cannot hold."""
    tensors: list[Tensor] = []

    def layout_here() -> Any:
        mine = flatten(tree, "tree")
        tensors.extend(mine.tensors)
        return mine.layout

    layouts = on_all_ranks(communicator, layout_here, failed=_NOT_SENT)
    if communicator.rank != root:
        for tensor in tensors:
            communicator.send(tensor, root)
        return None

    def received(sender: int) -> _New:
        def new(dtype: torch.dtype, shape: list[int], device: str) -> Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            communicator.recv(tensor, sender)
            return tensor

        return new

    return [tree if rank == root else _filled(layout, received(rank)) for rank, layout in enumerate(layouts)]
