"""Trees of tensors and plain values, written as JSON and the tensors' bytes: nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference.copying import LINE_BYTES
from gradwire.trainer.gradients.arguments import check_tensor
from gradwire.trainer.world.world import here

ALIGNMENT_BYTES = LINE_BYTES
"""Where each tensor's bytes begin: at a multiple of this."""

_LIST_BYTES = 32 << 20
"""How many bytes of pieces make a list."""


@dataclass
class Tree:
    """A tree without its tensors, and those by their order in it. layout: JSON, with dtype and shape in place of tensors.

    starts: where the bytes of each tensor lie. nbytes: of all.
    """

    layout: Any
    tensors: list[Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    nbytes: int = 0

    def pieces(self, start: int, stop: int) -> Iterator[list[Tensor]]:
        """Yield what lies at bytes start to stop of the tree, on the CPU, contiguous: each piece at the next multiple of
        ALIGNMENT_BYTES, of which start is one. The pieces come in lists, so that few copies from a GPU exist at a time."""
        found: list[Tensor] = []
        nbytes = 0
        for tensor, first in zip(self.tensors, self.starts, strict=True):
            begin, end = max(first, start), min(first + tensor.nbytes, stop)
            if begin >= end:
                continue
            piece = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
            if end - begin < tensor.nbytes:
                piece = piece.view(torch.uint8)[begin - first : end - first]
            found.append(piece.cpu())
            nbytes += end - begin
            if nbytes >= _LIST_BYTES:
                yield found
                found, nbytes = [], 0
        yield found


def flatten(tree: Any, name: str) -> Tree:
    """Return a tree of dicts, lists, tuples, sets, tensors, numbers, strings, booleans and None. Its tensors are not copied.

    name: of the tree, for errors. Raises TypeError for a value of another kind, and for a tensor without memory of its own.
    """
    found = Tree(None)

    def outline(value: Any, *path: Any) -> Any:
        if isinstance(value, Tensor):
            tensor = check_tensor(value.detach())
            found.tensors.append(tensor)
            found.starts.append(found.nbytes)
            found.nbytes += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            return {"tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, dict):
            return {"dict": [[outline(key, *path), outline(each, *path, key)] for key, each in value.items()]}
        for kind in (list, tuple, set):
            if isinstance(value, kind):
                return {kind.__name__: [outline(each, *path, number) for number, each in enumerate(value)]}
        place = name + "".join(f"[{key!r}]" for key in path)
        raise TypeError(
            f"{here()}{place} is a {type(value).__name__}, and a commit holds tensors, numbers, strings, booleans, None, dicts, "
            "lists, tuples and sets of these, and objects with state_dict() and load_state_dict()"
        )

    found.layout = outline(tree)
    return found


def unflatten(layout: Any, data: Tensor) -> Any:
    """Return the tree of which this is the layout, with copies of its bytes: data, uint8."""
    at = 0

    def fill(value: Any) -> Any:
        nonlocal at
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            dtype, shape, device = getattr(torch, content[0]), content[1], content[2]
            nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
            tensor = data[at : at + nbytes].view(dtype).view(shape).clone().to(device)
            at += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            return tensor
        if kind == "dict":
            return {fill(key): fill(each) for key, each in content}
        made: Iterable[Any] = map(fill, content)
        return {"list": list, "tuple": tuple, "set": set}[kind](made)

    return fill(layout)


def encode(record: Any) -> Tensor:
    """Return a record as JSON in a tensor of uint8."""
    return torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)


def decode(data: Tensor) -> Any:
    """Return the record that encode() was given."""
    return json.loads(data.numpy().tobytes())
