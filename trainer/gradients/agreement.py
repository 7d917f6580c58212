"""What the ranks must have in common before they can train one model, compared when an optimizer is made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.collectives.errors import ranks_text
from gradwire.trainer.gradients.dtensors import held_here, shard_of
from gradwire.trainer.world.world import here

_Described: TypeAlias = tuple[str, tuple[int, ...], str]


def check_settings(communicator: Communicator, of: str, settings: Mapping[str, str]) -> None:
    """Raise ValueError on all ranks alike where they do not have the same settings, with the values and who has which.
    Collective. of: what they are the settings of. settings: values in words, by name; the same names on all ranks."""
    everyones = communicator.allgather_record(dict(settings))
    faults = []
    for name in settings:
        ranks = defaultdict(list)
        for rank, theirs in enumerate(everyones):
            ranks[theirs.get(name)].append(rank)
        if len(ranks) > 1:
            said = "; ".join(f"{value} on {ranks_text(who)}" for value, who in ranks.items())
            faults.append(f"{name} is {said}")
    if faults:
        raise ValueError(f"{here()}the ranks do not make the same {of}: {'. '.join(faults)}")


def agree_on_parameters(communicator: Communicator, names: Sequence[str], parameters: Sequence[Tensor]) -> list[str]:
    """Return the names in rank 0's order. Raises ValueError on all ranks alike where they do not train the same
    parameters, or hold different shards of them. Collective."""
    named = list(zip(names, parameters, strict=True))
    shards = {name: shard_of(parameter) for name, parameter in named}
    mine = [(name, held_here(parameter).shape, str(parameter.dtype)) for name, parameter in named]
    gathered = communicator.allgather_record((shards, mine))
    for rank, (theirs, _) in enumerate(gathered):
        _check_shards(rank, theirs, gathered[0][0])
    everyones = [[(name, tuple(shape), dtype) for name, shape, dtype in theirs] for _, theirs in gathered]
    for rank, theirs in enumerate(everyones):
        if difference := set(theirs) ^ set(everyones[0]):
            name, _, _ = min(difference)
            raise ValueError(
                f"{here()}ranks 0 and {rank} do not train the same parameters: {name!r} "
                f"{_described(name, everyones[0])} on rank 0, and {_described(name, theirs)} on rank {rank}"
            )
    return [name for name, _, _ in everyones[0]]


def _described(name: str, parameters: Sequence[_Described]) -> str:
    """Return what a rank, which trains these parameters, says of one of them."""
    for other, shape, dtype in parameters:
        if other == name:
            return f"has shape {list(shape)} and dtype {dtype}"
    return "is not trained"


def _check_shards(rank: int, theirs: Mapping[str, str], first: Mapping[str, str]) -> None:
    """Raise ValueError where a rank holds other shards than rank 0, whose gradients cannot be averaged."""
    for name in sorted(theirs.keys() & first.keys()):
        if theirs[name] != first[name]:
            raise ValueError(
                f"{here()}ranks 0 and {rank} of the process_set hold different shards of {name!r} ({first[name] or 'all of it'}; "
                f"{theirs[name] or 'all of it'}): gradients are exchanged among ranks that hold the same. Beside "
                "fully_shard(model, mesh=mesh['shard']), that is process_set=mesh.get_group('replicate')"
            )
