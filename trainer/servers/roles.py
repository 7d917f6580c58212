"""The arguments of a parameter server: which ranks serve, which train, and when an update is made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire.collectives.errors import ranks_text
from gradwire.trainer.servers.aggregator import LATE, Scheme


@dataclass(frozen=True)
class Roles:
    """Holds the roles of a process set's ranks at a parameter server.

    servers: the ranks that hold parameters. groups: the ranks that train, in groups that average their gradients. The first
    rank of a group, the worker, pushes and pulls for all of it.
    """

    servers: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """Return the ranks that push and pull."""
        return tuple(group[0] for group in self.groups)


def checked_ranks(name: str, ranks: Sequence[int] | None, size: int) -> list[int] | None:
    """Return a list of ranks below `size`, sorted; None for None. Raises ValueError for anything else."""
    if ranks is None:
        return None
    listed = list(ranks) if isinstance(ranks, Iterable) else []
    if not all(isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < size for rank in listed):
        listed = []
    if not listed or len(set(listed)) < len(listed):
        raise ValueError(f"{name} must be ranks from 0 to {size - 1}, each once, at least one, not {ranks!r}")
    return sorted(listed)


def roles_of(
    servers: Sequence[int] | None, workers: Sequence[int] | None, groups: Sequence[Sequence[int] | None]
) -> Roles:
    """Return the roles of all ranks.

    servers: the ranks that serve; None for the ranks that do not train, or if all train, for those that push. workers: the
    ranks that train; None for all. groups: for each rank, the ranks of its argument inner=, in their order, or None. Raises
    ValueError, on all ranks, if these contradict each other.
    """
    training = sorted(range(len(groups)) if workers is None else workers)
    found: list[tuple[int, ...]] = []
    for rank, given in enumerate(groups):
        if given is not None and rank not in training:
            raise ValueError(f"rank {rank} has inner= but is not one of workers={training}: it does not train")
        group = (rank,) if given is None else tuple(given)
        for other in group:
            if groups[other] != given:
                raise ValueError(
                    f"inner= must name the same ranks on all of them, which train: it is {ranks_text(group)} on "
                    f"rank {rank}, and {_shown(groups[other])} on rank {other}"
                )
        if rank in training and group[0] == rank:
            found.append(group)
    idle = [rank for rank in range(len(groups)) if rank not in training]
    serving = sorted(servers if servers is not None else idle or [group[0] for group in found])
    if neither := [rank for rank in idle if rank not in serving]:
        raise ValueError(f"{ranks_text(neither)} neither trains (workers=) nor serves (servers=)")
    return Roles(tuple(serving), tuple(found))


def checked_scheme(scheme: Scheme, size: int) -> Scheme:
    """Return the scheme. Raises ValueError for an invalid one."""
    if not isinstance(scheme.quorum, int) or not 1 <= scheme.quorum <= size:
        raise ValueError(f"quorum must be a whole number from 1 to {size}, of ranks or groups, not {scheme.quorum!r}")
    if not (isinstance(scheme.grace_s, (int, float)) and math.isfinite(scheme.grace_s) and scheme.grace_s >= 0):
        raise ValueError(f"grace_s must be a finite number of seconds >= 0, not {scheme.grace_s!r}")
    if scheme.staleness is not None and (not isinstance(scheme.staleness, int) or scheme.staleness < 0):
        raise ValueError(f"staleness must be a whole number >= 0, or None, not {scheme.staleness!r}")
    if scheme.late not in LATE:
        raise ValueError(f"late must be one of {', '.join(map(repr, LATE))}, not {scheme.late!r}")
    return scheme


def cut(parameters: Sequence[Tensor], servers: Sequence[int]) -> dict[int, list[int]]:
    """Divide parameters among servers, with about equal numbers of elements. Return the parameters' numbers for each server
    that has any."""
    parts: dict[int, list[int]] = {server: [] for server in servers}
    loads = dict.fromkeys(servers, 0)
    for number in sorted(range(len(parameters)), key=lambda number: -parameters[number].numel()):
        least = min(servers, key=lambda server: loads[server])
        loads[least] += max(1, parameters[number].numel())
        parts[least].append(number)
    return {server: sorted(part) for server, part in parts.items() if part}


def _shown(group: Sequence[int] | None) -> str:
    return "not given" if group is None else ranks_text(group)
