"""The arguments of verbs: checked before anything is sent, and described as text, by which ranks compare their calls.

Raises ValueError or TypeError that name this rank and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gradwire.collectives.engine.buffers import refusal
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.engine.point_to_point import MOST_TAG
from gradwire.collectives.reduction import MOVED, Op, Reduction, check_arithmetic, check_dtype, op_name


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def described(tensor: torch.Tensor) -> str:
    """Return the text on which all ranks must agree, such as 'float32[8, 128]'."""
    return f"{dtype_name(tensor)}{list(tensor.shape)}"


def signature(text: str, lengths: Sequence[int]) -> str:
    """Return the signature by which a call is known: its text without lengths that depend on the rank and may change each
    time."""
    return text if len(set(lengths)) <= 1 else text.replace(str(lengths), "[...]", 1)


def listed(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def former(engine: Engine, verb: str, given: dict[str, object], **now: str) -> TypeError:
    """Return the error for keyword arguments that a verb does not have. now: the names that replace former arguments."""
    name = next(iter(given))
    remedy = f"; use {now[name]} instead" if name in now else ""
    return TypeError(f"rank {engine.rank}: {verb} has no argument {name!r}{remedy}")


def check_seconds(rank: int, name: str, seconds: float) -> None:
    """Raise ValueError for a number of seconds that is no deadline."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"rank {rank}: {name}={seconds} must be positive and finite")


def check_tensors(engine: Engine, *tensors: torch.Tensor) -> None:
    """Raise TypeError for what is no tensor that can be moved, ValueError for a mixture or a wrong device."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"rank {engine.rank}: a torch.Tensor is needed, not {type(tensor).__name__}")
        if said := refusal(tensor):
            raise TypeError(f"rank {engine.rank}: {said}")
        check_dtype(engine.rank, tensor.dtype, MOVED)
        if tensor.device.type not in engine.device_types:
            allowed = " and ".join(engine.device_types)
            raise ValueError(f"rank {engine.rank}: tensor on {tensor.device}; this group carries {allowed} tensors")
        if (tensor.dtype, tensor.device) != (tensors[0].dtype, tensors[0].device):
            raise ValueError(
                f"rank {engine.rank}: all tensors of a call need one dtype and device; given are "
                f"{tensors[0].dtype} on {tensors[0].device} and {tensor.dtype} on {tensor.device}"
            )


def check_written(engine: Engine, *tensors: torch.Tensor) -> None:
    """Check tensors as check_tensors does. Also raise ValueError for an output whose elements share memory, as after
    expand()."""
    check_tensors(engine, *tensors)
    for tensor in tensors:
        strides = tensor.stride()
        if 0 in strides and any(length > 1 for stride, length in zip(strides, tensor.shape, strict=True) if not stride):
            raise ValueError(
                f"rank {engine.rank}: a tensor of shape {list(tensor.shape)} and strides {list(strides)} cannot hold a "
                "result, because several of its elements share memory; clone() it first"
            )


def reduction_of(
    engine: Engine, tensors: Sequence[torch.Tensor], op: Op, prescale: float = 1.0, postscale: float = 1.0
) -> Reduction:
    """Return the Reduction of tensors in place. Raises what check_written raises; ValueError for an unknown op; TypeError if
    the op or a factor is not defined for a dtype."""
    name = op_name(engine.rank, op)
    for tensor in tensors:
        check_written(engine, tensor)
        check_arithmetic(engine.rank, tensor.dtype, name, prescale, postscale)
    return Reduction(name, prescale, postscale)


def check_root(engine: Engine, name: str, root: int | None) -> None:
    if not isinstance(root, int):
        raise TypeError(f"rank {engine.rank}: {name}={root!r}; a whole number is needed")
    if not 0 <= root < engine.size:
        raise ValueError(f"rank {engine.rank}: {name}={root}; allowed are 0 to {engine.size - 1}")


def check_message(engine: Engine, verb: str, tensor: torch.Tensor, name: str, peer: int | None, tag: int) -> None:
    """Raise ValueError or TypeError for what cannot be sent or received as a message. name: 'src' or 'dst'. peer: the other
    rank; None receives from any."""
    if engine.size == 1:
        raise ValueError(f"rank {engine.rank}: this rank is alone in its group; a message needs another rank")
    if peer is not None or name == "dst":
        check_root(engine, name, peer)
        if peer == engine.rank:
            raise ValueError(f"rank {engine.rank}: {name}={peer} is this rank; a message needs another rank")
    if not isinstance(tag, int) or not 0 <= tag <= MOST_TAG:
        raise ValueError(f"rank {engine.rank}: tag={tag!r}; a whole number from 0 to {MOST_TAG} is needed")
    if tag and not engine.knows_tags(tensor):
        raise ValueError(f"rank {engine.rank}: tag={tag}; NCCL has no tags, so only 0 is allowed")
    if peer is None and not engine.receives_from_any(tensor):
        raise ValueError(
            f"rank {engine.rank}: {verb}() of a tensor on {tensor.device} needs src=, because the link of these ranks cannot "
            f"wait for all of them at once: {'; '.join(engine.routes)}"
        )


def part_lengths(
    engine: Engine, many_name: str, many: torch.Tensor | Sequence[torch.Tensor], one: torch.Tensor, one_name: str
) -> list[int]:
    """Return the elements of each rank's part of `many`, checked against this rank's `one`."""
    if isinstance(many, torch.Tensor):
        if many.numel() != engine.size * one.numel():
            raise ValueError(
                f"rank {engine.rank}: {many_name} has {many.numel()} elements; {engine.size} times the "
                f"{one.numel()} elements of {one_name} are needed"
            )
        return [one.numel()] * engine.size
    lengths = [part.numel() for part in many]
    if len(lengths) != engine.size or lengths[engine.rank] != one.numel():
        raise ValueError(
            f"rank {engine.rank}: {many_name} has parts of {lengths} elements; {engine.size} parts are needed, and that of "
            f"this rank needs the {one.numel()} elements of {one_name}"
        )
    return lengths


def check_rooted(
    engine: Engine, name: str, parts: Sequence[torch.Tensor], one: torch.Tensor, root_name: str, root: int
) -> None:
    """Raise ValueError unless the root, and no other rank, gives a tensor like `one` for each rank."""
    check_tensors(engine, one, *parts)
    wanted = engine.size if engine.rank == root else 0
    if len(parts) != wanted or any(part.numel() != one.numel() for part in parts):
        raise ValueError(
            f"rank {engine.rank}: {name} has tensors of {[part.numel() for part in parts]} elements; with {root_name}={root} "
            f"this rank must give {wanted} of {one.numel()} elements"
        )


def split_lengths(engine: Engine, name: str, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
    """Return the elements that go to, or come from, each rank, where splits count rows of dimension 0."""
    if splits is None:
        if tensor.numel() % engine.size:
            raise ValueError(
                f"rank {engine.rank}: {name} has {tensor.numel()} elements, which is not a multiple of the {engine.size} ranks"
            )
        return [tensor.numel() // engine.size] * engine.size
    rows = tensor.shape[0] if tensor.dim() else 0
    if not all(isinstance(count, int) for count in splits):
        raise TypeError(f"rank {engine.rank}: {name}_splits={list(splits)!r}; whole numbers are needed")
    if len(splits) != engine.size or min(splits) < 0 or sum(splits) != rows:
        raise ValueError(
            f"rank {engine.rank}: {name}_splits={list(splits)}; {engine.size} numbers >= 0 that add up to {rows} rows are needed"
        )
    width = math.prod(tensor.shape[1:])
    return [count * width for count in splits]
