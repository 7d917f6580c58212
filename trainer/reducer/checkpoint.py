"""The part of a checkpoint that holds the state of an exchange with codecs: residuals, states of codecs, and the buckets.

Its fields: version, of the format; world_size and rank, where it was saved; op and predivide; step, the number of exchanges;
parameters, the name and shape of each; order, learning and arrivals, the order of the parameters in the buckets and what is being
learned about it; sparse, the parameters with sparse gradients; buckets, of each the parameters, and with a codec also starts,
numel, encoding, shard_start and tensors (see CodedBuffer); waiting, the residuals of parameters that no bucket holds. The part of
a DDP hook lacks order, learning, arrivals and sparse.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile, zip_longest
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.trainer.checkpoint import Given, agree, need, need_finite, need_whole, on_all_ranks, without
from gradwire.trainer.reducer.arguments import Average, Sum
from gradwire.trainer.reducer.buffers import Exported
from gradwire.trainer.reducer.dtensors import held_here
from gradwire.trainer.reducer.planner import BucketLayout
from gradwire.trainer.reducer.reducer import Reducer

KEY = "gradwire"
"""The key of the part in the state_dict() of a DistributedOptimizer."""

VERSION = 2


def state_of(reducer: Reducer) -> dict[str, Any]:
    """Return the state of the optimizer, and with codecs that of the exchange: dicts, lists, tensors, numbers and strings.
    Raises RuntimeError while gradients are exchanged, and while residuals wait for the next exchange in no buffer. Raises the
    error of Reducer.check_last()."""
    reducer.check_last()
    state = reducer.setup.optimizer.state_dict()
    if not reducer.planner.is_encoded:
        return state
    _check_idle(reducer)
    if reducer.residuals.has_local:
        raise RuntimeError(
            f"rank {reducer.setup.communicator.rank}: parameters were moved to another dtype or device since the last step, and "
            "residuals wait for the next exchange: save the state after a step()"
        )
    return {**state, KEY: {**_identity(reducer), **reducer.state_dict()}}


def load_state(reducer: Reducer, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
    """Load a state of state_of(). also: those of ranks that no longer exist. Collective if there are codecs.

    Training resumes exactly if the number of ranks, the codecs and the parameters are those of the checkpoint, and each rank
    has its own part. Otherwise every rank gets the mean of the residuals (for op=Sum, an equal part). If no rank has a part,
    residuals are zero.

    Raises ValueError on all ranks, and loads nothing, if only some ranks have a part, a part is damaged or of other parameters,
    parts are of different checkpoints, or the optimizer of any rank cannot load its state.
    """
    optimizer, communicator = reducer.setup.optimizer, reducer.setup.communicator
    bare = without(state_dict, KEY)
    if not reducer.planner.is_encoded:
        optimizer.load_state_dict(bare)
        if communicator.rank == 0 and has_residuals(state_dict.get(KEY)):
            _warn("rank 0: saved with codecs, loaded without: the residuals are lost")
        return

    def read(state: dict[str, Any]) -> dict[str, Any]:
        check_part(state[KEY], reducer.planner.described())
        if state[KEY]["op"] != reducer.setup.op:
            raise ValueError(f"saved with op={state[KEY]['op']!r}, not {reducer.setup.op!r}")
        return _label_of(state[KEY])

    given = agree(communicator, KEY, [state_dict, *also], read)
    if given is not None:
        _check_owners(communicator, given)
    layout: BucketLayout | None = None

    def restore() -> bool:
        nonlocal layout
        _check_idle(reducer)
        if given is not None and _identity(reducer).items() <= given.part.items():
            layout = reducer.restored(given.part)
        return layout is not None

    is_exact = all(on_all_ranks(communicator, restore))
    go_on: Callable[[], object]
    if given is None:
        go_on = partial(reducer.restart, 0, {})
    elif is_exact and layout is not None:
        go_on = partial(reducer.load_state_dict, given.part, layout)
    else:
        go_on = partial(reducer.restart, given.part["step"], _shared_residuals(reducer, given))
    before = optimizer.state, optimizer.param_groups

    def undo() -> None:
        optimizer.state, optimizer.param_groups = before

    on_all_ranks(communicator, partial(optimizer.load_state_dict, bare), undo)
    go_on()
    if given is not None and not is_exact and communicator.rank == 0 and has_residuals(given.part):
        _warn(_shared_text(given, communicator.size))


def _check_owners(communicator: Communicator, given: Given) -> None:
    """Raise ValueError on all ranks if they were given all parts of a checkpoint, and these have residuals of only some of the
    sums of a bucket. Collective."""
    mine = [
        [len(entry["tensors"]["owner"]) if entry.get("tensors") else 0 for entry in state[KEY]["buckets"]]
        for state in given.contributed
    ]
    parts = [owned for theirs in communicator.allgather_record(mine) for owned in theirs]
    if len(parts) < given.part["world_size"]:
        return
    for place, (entry, *owned) in enumerate(zip(given.part["buckets"], *parts, strict=True)):
        if sum(owned) not in (0, entry.get("numel")):  # 0 where no rank encodes sums
            raise ValueError(
                f"rank {communicator.rank}: load_state_dict: {KEY!r} is damaged: owner of bucket {place} has {owned} numbers "
                f"in the parts of the ranks, of {entry['numel']} in all"
            )


def _identity(reducer: Reducer) -> dict[str, Any]:
    """Return the fields that identify this rank and its exchange of gradients. An exact resumption needs equal fields."""
    setup = reducer.setup
    here = {"version": VERSION, "world_size": setup.communicator.size, "rank": setup.communicator.rank}
    return {**here, "op": setup.op, "predivide": setup.predivide}


def _check_idle(reducer: Reducer) -> None:
    """Raise RuntimeError while gradients are exchanged."""
    if not reducer.is_idle:
        raise RuntimeError(
            f"rank {reducer.setup.communicator.rank}: gradients are still being exchanged: an earlier backward() failed midway "
            "(call synchronize(), then zero_grad())"
        )


def _shared_residuals(reducer: Reducer, given: Given) -> dict[int, Exported]:
    """Return, by parameter, the residuals of all parts, of which every rank gets an equal share. Collective."""
    mine, parts, parameters = given.part, [state[KEY] for state in given.contributed], reducer.parameters
    found: dict[int, Exported] = {
        index: {name: tensor.to(parameters[index].device) for name, tensor in waiting.items()}
        for index, waiting in mine["waiting"].items()
    }
    for place, entry in enumerate(mine["buckets"]):
        if not entry.get("tensors"):
            continue
        total = torch.zeros(entry["numel"], device=parameters[entry["parameters"][0]].device, dtype=torch.float32)
        for part in parts:
            saved, start = part["buckets"][place]["tensors"], part["buckets"][place]["shard_start"]
            worker, owner = saved["worker"].to(total.device), saved["owner"].to(total.device)
            total.add_(worker, alpha=1 / len(given.saved) if part["op"] == Average else 1.0)
            total[start : start + owner.numel()].add_(owner)
        reducer.setup.communicator.allreduce(total, Sum, postscale=mine["predivide"])
        for slot, (index, start) in enumerate(zip(entry["parameters"], entry["starts"], strict=True)):
            found[index] = {"residual": total[start : start + held_here(parameters[index]).numel()]}
            for name, tensor in entry["tensors"].items():
                if name.endswith(f".{slot}") and name.count(".") == 1:  # the codec's state for this parameter
                    found[index][name.partition(".")[0]] = tensor.to(total.device)
    return found


def _shared_text(given: Given, now: int) -> str:
    """Return the text that warns that residuals are shared, or lost."""
    before = given.part["world_size"]
    message = (
        f"rank 0: saved on {before} ranks, loaded on {now}: the residuals of ranks {given.saved} are now shared by all"
    )
    if lost := sorted(set(range(before)) - set(given.saved)):
        message += (
            f"; those of ranks {lost}, which no rank loaded, are lost: load on every rank the state that it saved, and by "
            "load_state_dict(..., also=[...]) the states of ranks that no longer exist"
        )
    return message


def _warn(message: str) -> None:
    """Warn at the line of the program that has called load_state_dict(). Rules have methods and decorators in between."""
    modules = (frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_stack(sys._getframe()))
    inside = takewhile(("gradwire", "contextlib").__contains__, modules)
    warnings.warn(message, stacklevel=1 + len([*inside]))


def has_residuals(part: Any) -> bool:
    """Return whether the part, which may be damaged, has residuals."""
    try:
        return bool(part["waiting"]) or any(entry.get("tensors") for entry in part["buckets"])
    except (AttributeError, KeyError, TypeError):
        return False


# The format


def _label_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that must be equal in all parts of one checkpoint."""
    return {key: part[key] for key in ("world_size", "op", "predivide", "step", "order", "learning")} | {
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


def check_part(part: Mapping[str, Any], described: Sequence[tuple[Any, ...]] | None = None) -> None:
    """Raise an error, which names the fault, unless this is a valid part; see damage_named().

    described: name and shape of each parameter that the part must have; None for a part of a DDP hook, whose parameters are
    known later.
    """
    if part["version"] != VERSION:
        raise ValueError(f"it is a {KEY!r} of version {part['version']!r}, not {VERSION}")
    need_whole("world_size", part["world_size"], 1)
    need_whole("rank", part["rank"], 0, part["world_size"])
    need_whole("step", part["step"], 0)
    need(0 < part["predivide"] < math.inf, f"predivide is {part['predivide']!r}")
    was = [(name, tuple(shape), *more) for name, shape, *more in part["parameters"]]
    if described is not None and was != list(described):
        old, new = next((pair for pair in zip_longest(was, described) if pair[0] != pair[1]), (None, None))
        raise ValueError(
            f"saved with {len(was)} parameters, here are {len(described)}; the first that differs was {old} and is {new}"
        )
    numels = [math.prod(shape) for _, shape, *_ in was]
    for place, entry in enumerate(part["buckets"]):
        _check_bucket(f"bucket {place}", entry, numels)
    for index, kept in part["waiting"].items():
        need_whole("a parameter in waiting", index, 0, len(numels))
        for name, tensor in kept.items():
            _check_numbers(f"waiting {index}: {name}", tensor)
        _check_numbers(f"waiting {index}: residual", kept["residual"], numels[index])
    if described is not None:
        arrivals, sparse = part["arrivals"], part.get("sparse", [])  # earlier versions have no sparse gradients
        for name, indices in (("order", part["order"]), ("arrivals", arrivals or []), ("sparse", sparse)):
            _check_indices(name, indices, len(numels))
        _check_order(part["order"], [entry["parameters"] for entry in part["buckets"]])


def _check_bucket(name: str, entry: Mapping[str, Any], numels: Sequence[int]) -> None:
    members = entry["parameters"]
    _check_indices(f"{name}: parameters", members, len(numels))
    need(bool(members), f"{name} has no parameters")
    if "tensors" not in entry:
        return
    starts, numel, shard_start, tensors = (entry[key] for key in ("starts", "numel", "shard_start", "tensors"))
    for start in (*starts, numel, shard_start):
        need_whole(f"{name}: starts, numel or shard_start", start, 0)
    ends = [start + numels[index] for start, index in zip(starts, members, strict=False)]
    fit = len(starts) == len(members) and all(map(int.__le__, ends, [*starts[1:], numel]))
    need(fit, f"{name}: its parameters do not fit between starts {starts!r} and numel {numel}")
    for key, tensor in tensors.items():
        need_finite(f"{name}: {key}", tensor)
    if tensors:
        _check_numbers(f"{name}: worker", tensors["worker"], numel)
        _check_numbers(f"{name}: owner", tensors["owner"], tensors["owner"].numel())
        need(shard_start + tensors["owner"].numel() <= numel, f"{name}: owner has {tensors['owner'].numel()} numbers")


def _check_order(order: Sequence[int], buckets: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless the buckets partition the ordered parameters, in that order, and follow each other as they fill
    up."""
    members = [index for bucket in buckets for index in bucket]
    need(sorted(members) == sorted(order), "the buckets' parameters are not those of order")
    position = {index: place for place, index in enumerate(order)}
    places = [[position[index] for index in bucket] for bucket in buckets]
    lasts = [bucket[-1] for bucket in places]
    ordered = all(bucket == sorted(bucket) for bucket in places) and lasts == sorted(lasts)
    need(ordered, "the buckets' parameters are not in order")


def _check_numbers(name: str, tensor: Tensor, numel: int | None = None) -> None:
    """Raise ValueError unless these are finite float32 numbers, and if `numel` is given, so many in one dimension."""
    need(tensor.dtype is torch.float32, f"{name} has dtype {tensor.dtype}, not torch.float32")
    need_finite(name, tensor)
    if numel is not None:
        need(tensor.shape == (numel,), f"{name} has shape {tuple(tensor.shape)}, not {(numel,)}")


def _check_indices(name: str, indices: Sequence[int], end: int) -> None:
    """Raise ValueError unless these are parameters, each at most once."""
    for index in indices:
        need_whole(f"a parameter in {name}", index, 0, end)
    need(len(set(indices)) == len(indices), f"{name}: {indices!r} are not different")
