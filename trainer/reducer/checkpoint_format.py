"""The format of a rank's part of a checkpoint, and the check of a part that is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

KEY = "gradwire"
"""The key of the part in the state_dict() of a DistributedOptimizer."""

SHARDS = "gradwire_shards"
"""The key of the description of pieces in the state_dict() of a DistributedOptimizer with rules.Sharded."""

VERSION = 2

_KEYS = ("world_size", "rank", "op", "predivide", "step", "parameters", "buckets", "waiting")
_BUCKETING_KEYS = ("order", "learning", "arrivals")
"""Further keys if the buckets are gradwire's, not DDP's."""


def label_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that must be equal in all parts of one checkpoint, and the rank."""
    if part["version"] != VERSION:
        return {"version": part["version"]}
    keys = ("version", "world_size", "rank", "op", "predivide", "step", "order", "learning")
    return {key: part[key] for key in keys} | {
        "arrivals": part["arrivals"] is not None,
        "buckets": [_label_of_bucket(entry) for entry in part["buckets"]],
        "waiting": sorted(part["waiting"]),
    }


def _label_of_bucket(entry: Mapping[str, Any]) -> list[Any]:
    """Return the fields of a bucket that are equal on all ranks, without the contents of tensors."""
    if "tensors" not in entry:
        return [entry["parameters"]]
    kept = sorted(name for name in entry["tensors"] if not name.startswith("state."))
    return [entry["parameters"], *(entry[key] for key in ("encoding", "starts", "numel")), kept]


def has_residuals(part: object) -> bool:
    """Return whether the part has residuals, as far as a damaged part can be read."""
    if not isinstance(part, Mapping):
        return False
    buckets = part.get("buckets")
    entries = [entry for entry in buckets if isinstance(entry, Mapping)] if isinstance(buckets, list) else []
    return bool(part.get("waiting")) or any(entry.get("tensors") for entry in entries)


def check_part(part: object, described: Sequence[tuple[Any, ...]] | None = None) -> None:
    """Raise ValueError, which names the fault, unless this is a valid part.

    described: name and shape of each parameter that the part must have; None for a part of a DDP hook, whose parameters are
    known later. A part of another version is not checked.
    """
    if not isinstance(part, Mapping):
        raise ValueError(f"{KEY!r} must be a dict, not {type(part).__name__}")
    _need_whole("version", part.get("version"), 0)
    if part["version"] != VERSION:
        return
    _need_keys("", part, (*_KEYS, *(() if described is None else _BUCKETING_KEYS)))
    _need_whole("world_size", part["world_size"], 1)
    _need(_is_whole(part["rank"], 0, part["world_size"]), f"rank is {part['rank']!r} of {part['world_size']}")
    _need_whole("step", part["step"], 0)
    predivide = part["predivide"]
    _need(isinstance(predivide, (int, float)) and 0 < predivide < math.inf, f"predivide is {predivide!r}")
    _need(isinstance(part["op"], str), f"op is {part['op']!r}")
    numels = [math.prod(shape) for shape in _check_parameters(part["parameters"], described)]
    _need(isinstance(part["buckets"], list), f"buckets is a {type(part['buckets']).__name__}")
    for place, entry in enumerate(part["buckets"]):
        _check_bucket(f"bucket {place}", entry, numels)
    _check_waiting(part["waiting"], numels)
    if described is not None:
        _need(isinstance(part["learning"], bool), f"learning is {part['learning']!r}")
        for name, indices in (
            ("order", part["order"]),
            ("arrivals", [] if part["arrivals"] is None else part["arrivals"]),
            ("sparse", part.get("sparse", [])),  # missing in parts of earlier versions
        ):
            _check_indices(name, indices, len(numels))
        _check_order(part["order"], [entry["parameters"] for entry in part["buckets"]])


def _check_parameters(saved: Any, described: Sequence[tuple[Any, ...]] | None) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters. Raises ValueError if they differ from those described."""
    try:
        was = [(name, tuple(shape), *more) for name, shape, *more in saved]
        _need(all(_is_whole(length, 0) for _, shape, *_ in was for length in shape), "shapes are not whole numbers")
    except (TypeError, ValueError):
        raise _damaged("parameters are not names and shapes") from None
    if described is not None and was != list(described):
        old, new = next((pair for pair in zip_longest(was, described) if pair[0] != pair[1]), (None, None))
        raise ValueError(
            f"saved with {len(was)} parameters, here are {len(described)}; the first that differs was {old} and is {new}"
        )
    return [shape for _, shape, *_ in was]


def _check_bucket(name: str, entry: Any, numels: Sequence[int]) -> None:
    _need(isinstance(entry, Mapping) and bool(entry.get("parameters")), f"{name} has no parameters")
    members = entry["parameters"]
    _check_indices(f"{name}: parameters", members, len(numels))
    if "tensors" not in entry:
        return
    _need_keys(f"{name}: ", entry, ("starts", "numel", "encoding", "shard_start"))
    starts, numel, shard_start, tensors = (entry[key] for key in ("starts", "numel", "shard_start", "tensors"))
    _need_whole(f"{name}: numel", numel, 0)
    _need(_is_whole(shard_start, 0, numel + 1), f"{name}: shard_start is {shard_start!r} of {numel}")
    _need(isinstance(entry["encoding"], str), f"{name}: encoding is {entry['encoding']!r}")
    whole = isinstance(starts, list) and len(starts) == len(members) and all(_is_whole(start, 0) for start in starts)
    _need(whole, f"{name}: starts are {starts!r}")
    ends = [start + numels[index] for start, index in zip(starts, members, strict=True)]
    fit = all(end <= start for end, start in zip(ends, [*starts[1:], numel], strict=True))
    _need(fit, f"{name}: its parameters do not fit between starts {starts!r} and numel {numel}")
    _check_tensors(name, tensors)
    if tensors:
        _need({"worker", "owner"} <= tensors.keys(), f"{name}: of worker and owner one is missing")
        _check_numbers(f"{name}: worker", tensors["worker"], numel)
        _check_numbers(f"{name}: owner", tensors["owner"])
        _need(shard_start + tensors["owner"].numel() <= numel, f"{name}: owner has {tensors['owner'].numel()} numbers")


def _check_order(order: Sequence[int], buckets: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless the buckets partition the ordered parameters, in that order, and follow each other as they fill
    up."""
    members = [index for bucket in buckets for index in bucket]
    _need(sorted(members) == sorted(order), "the buckets' parameters are not those of order")
    position = {index: place for place, index in enumerate(order)}
    places = [[position[index] for index in bucket] for bucket in buckets]
    lasts = [bucket[-1] for bucket in places]
    ordered = all(bucket == sorted(bucket) for bucket in places) and lasts == sorted(lasts)
    _need(ordered, "the buckets' parameters are not in order")


def _check_waiting(waiting: Any, numels: Sequence[int]) -> None:
    _need(isinstance(waiting, Mapping), f"waiting is a {type(waiting).__name__}")
    for index, remembered in waiting.items():
        _need(_is_whole(index, 0, len(numels)), f"waiting: there is no parameter {index!r}")
        name = f"waiting {index}"
        _check_tensors(name, remembered)
        _need_keys(f"{name}: ", remembered, ("residual",))
        for key, tensor in remembered.items():
            _need(tensor.dtype is torch.float32, f"{name}: {key} has dtype {tensor.dtype}, not torch.float32")
        _check_numbers(f"{name}: residual", remembered["residual"], numels[index])


def _check_tensors(name: str, tensors: Any) -> None:
    named = isinstance(tensors, Mapping) and all(
        isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in tensors.items()
    )
    _need(named, f"{name}: tensors by name are needed")
    for key, tensor in tensors.items():
        check_finite(f"{name}: {key}", tensor)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor with a NaN or Inf, which would spoil the parameters at the next step."""
    _need(bool(tensor.isfinite().all()), f"{name} has numbers that are not finite")


def _check_numbers(name: str, tensor: Tensor, numel: int | None = None) -> None:
    """Raise ValueError unless these are float32 numbers in one dimension; `numel` of them, if given."""
    _need(tensor.dtype is torch.float32, f"{name} has dtype {tensor.dtype}, not torch.float32")
    _need(numel is None or tensor.numel() == numel, f"{name} has {tensor.numel()} numbers, not {numel}")
    _need(tensor.dim() == 1, f"{name} has shape {tuple(tensor.shape)}, not one dimension")


def _check_indices(name: str, indices: Any, end: int) -> None:
    """Raise ValueError unless these are parameters, each at most once."""
    whole = isinstance(indices, list) and all(_is_whole(index, 0, end) for index in indices)
    _need(whole, f"{name}: {indices!r} are not parameters, of which there are {end}")
    _need(len(set(indices)) == len(indices), f"{name}: {indices!r} are not different")


def _is_whole(value: object, least: int, end: int | None = None) -> bool:
    """Return whether this is a whole number, and least <= value < end."""
    return type(value) is int and least <= value and (end is None or value < end)


def _need_whole(name: str, value: object, least: int) -> None:
    _need(_is_whole(value, least), f"{name} is {value!r}")


def _need_keys(name: str, entry: Mapping[str, Any], keys: Sequence[str]) -> None:
    missing = [key for key in keys if key not in entry]
    _need(not missing, f"{name}{', '.join(missing)} missing")


def _need(condition: bool, fault: str) -> None:
    if not condition:
        raise _damaged(fault)


def _damaged(fault: str) -> ValueError:
    return ValueError(f"{KEY!r} is damaged: {fault}")
