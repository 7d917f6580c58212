"""Check that all ranks agree on an optimizer's settings and parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.collectives.errors import ranks_text
from gradwire.trainer.reducer.dtensors import held_here, shard_of
from gradwire.trainer.world.world import names_rank


@names_rank
def check_settings(communicator: Communicator, of: str, settings: Mapping[str, str]) -> None:
    """Raise ValueError on all ranks if their settings differ, with the values and their ranks. Collective. of: the name of the
    object that has the settings. settings: values as text, by name; the same names on all ranks."""
    everyones = communicator.allgather_record(dict(settings))
    faults = []
    for name in settings:
        ranks = defaultdict(list)
        for rank, theirs in enumerate(everyones):
            ranks[theirs.get(name)].append(rank)
        if len(ranks) > 1:
            given = "; ".join(f"{value} on {ranks_text(who)}" for value, who in ranks.items())
            faults.append(f"{name} is {given}")
    if faults:
        raise ValueError(f"the ranks do not make the same {of}: {'. '.join(faults)}")


@names_rank
def check_order(communicator: Communicator, of: str, names: Sequence[str]) -> None:
    """Raise ValueError on all ranks if the ranks list their parameters in different orders. Collective. of: what needs the same
    order."""
    everyones = communicator.allgather_record(list(names))
    for rank, theirs in enumerate(everyones):
        for number, (first, other) in enumerate(zip(everyones[0], theirs, strict=False)):
            if first != other:
                raise ValueError(
                    f"{of} needs the parameters in the same order on all ranks: number {number} is "
                    f"{first!r} on rank 0, and {other!r} on rank {rank}"
                )


@names_rank
def agree_on_parameters(communicator: Communicator, names: Sequence[str], parameters: Sequence[Tensor]) -> list[str]:
    """Return the names in rank 0's order. Raises ValueError on all ranks if the ranks train different parameters, or hold
    different shards of them. Collective."""
    shards, kinds = {}, {}
    for name, parameter in zip(names, parameters, strict=True):
        shards[name] = shard_of(parameter)
        kinds[name] = f"has shape {list(held_here(parameter).shape)} and dtype {parameter.dtype}"
    everyones = communicator.allgather_record((shards, kinds))
    first_shards, first_kinds = everyones[0]
    for rank, (theirs, _) in enumerate(everyones):
        for name in sorted(theirs.keys() & first_shards.keys()):
            if theirs[name] != first_shards[name]:
                raise ValueError(
                    f"ranks 0 and {rank} of the process_set hold different shards of {name!r} "
                    f"({first_shards[name] or 'all of it'}; {theirs[name] or 'all of it'}): gradients are exchanged among "
                    "ranks that hold the same. Beside fully_shard(model, mesh=mesh['shard']), that is "
                    "process_set=mesh.get_group('replicate')"
                )
    for rank, (_, theirs) in enumerate(everyones):
        if difference := set(theirs.items()) ^ set(first_kinds.items()):
            name, _ = min(difference)
            on_first, on_other = (kinds.get(name, "is not trained") for kinds in (first_kinds, theirs))
            raise ValueError(
                f"ranks 0 and {rank} do not train the same parameters: {name!r} "
                f"{on_first} on rank 0, and {on_other} on rank {rank}"
            )
    return list(first_kinds)
