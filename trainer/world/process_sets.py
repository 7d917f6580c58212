"""Sets of ranks that run collectives among themselves, with Horovod's names, and the errors of invalid calls."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradwire.collectives import CollectiveError, Communicator


class Refused(CollectiveError, ValueError):
    """The arguments of a verb are invalid, or do not match those of other ranks. No data was moved, and the Communicator
    remains usable."""


class NotIncluded(Refused):
    """A verb was called with a process set that does not include this rank."""


def refused(communicator: Communicator, verb: str, message: str) -> Refused:
    """Return a Refused error for a verb on this rank."""
    return Refused(message, rank=communicator.rank, operation=verb)


class ProcessSet:
    """Names some of the ranks of the world. init(process_sets=) or add_process_set() register it.

    Attributes: ranks (ascending, by their rank in the world), process_set_id (the same on all ranks; None unless registered).
    """

    def __init__(self, ranks_or_comm: Iterable[int] | dist.ProcessGroup | Communicator) -> None:
        """Take ranks of the world, or those of a torch.distributed group, a Communicator or an mpi4py communicator.

        In a world that init(comm=) made smaller, only ranks of the world can be used: the others number all launched
        processes. Raises ValueError for anything else.
        """
        self.ranks = sorted(ranks_of(ranks_or_comm))
        self.counts_launched = not isinstance(ranks_or_comm, Iterable)
        self.process_set_id: int | None = None
        self._rank = -1

    def size(self) -> int | None:
        """Return the number of ranks; None unless registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the index of this process among the ranks; None unless registered. Raises ValueError if it is not in the set.

        An allgather puts this rank's part at that index.
        """
        if self.process_set_id is None:
            return None
        if self._rank not in self.ranks:
            raise ValueError(f"rank {self._rank}: this process is not part of {self!r}")
        return self.ranks.index(self._rank)

    def included(self) -> bool | None:
        """Return whether this process is one of the ranks; None unless registered."""
        return None if self.process_set_id is None else self._rank in self.ranks

    def register(self, process_set_id: int, rank: int) -> None:
        """Set the id that the world assigns to this set, and the rank of this process in the world."""
        self.process_set_id, self._rank = process_set_id, rank

    def unregister(self) -> None:
        """Remove the id. The set can be registered again."""
        self.process_set_id = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        """Return this set itself: a copy of an object that refers to it, such as a model, uses the same set."""
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the global set by its name, and another set by its ranks, so that it must be registered where it is loaded."""
        return "global_process_set" if self is global_process_set else (ProcessSet, (self.ranks,))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


ProcessSetLike: TypeAlias = "ProcessSet | dist.ProcessGroup | DeviceMesh | Communicator | None"
"""Which ranks take part: a registered ProcessSet, a torch.distributed group, one dimension of a DeviceMesh as in mesh["dp"], a
Communicator, or None for all."""


def ranks_of(ranks: Any) -> list[int]:
    """Return ranks as a list, in the given order. ranks: whole numbers, or a group or communicator as in ProcessSet.

    Raises ValueError for anything else.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(ranks, mpi.Comm):
        group = ranks.Get_group()
        return list(mpi.Group.Translate_ranks(group, list(range(group.Get_size())), mpi.COMM_WORLD.Get_group()))
    if isinstance(ranks, dist.ProcessGroup):
        return dist.get_process_group_ranks(ranks)
    if isinstance(ranks, Communicator):
        return list(ranks.global_ranks)
    try:
        return [operator.index(rank) for rank in ranks]
    except TypeError:
        raise ValueError(
            f"ranks must be whole numbers in a list or another iterable, a torch.distributed group, a Communicator or an "
            f"mpi4py communicator, not {ranks!r}"
        ) from None


def group_along(mesh: DeviceMesh, here: int) -> dist.ProcessGroup:
    """Return the group of a DeviceMesh of one dimension. here: this rank. Raises ValueError for a mesh of several dimensions,
    and if this process is not in it."""
    if mesh.ndim != 1:
        names = [repr(name) for name in mesh.mesh_dim_names or ()]
        raise ValueError(
            f"rank {here}: process_set is a DeviceMesh of {mesh.ndim} dimensions{': ' if names else ''}{', '.join(names)}; name "
            "the one along which ranks take part, as in mesh['dp']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {here}: this process is not part of {mesh!r}, which is given as process_set")
    return mesh.get_group()


def check_new_set(here: int, ranks: list[int], size: int, registered: Iterable[ProcessSet]) -> None:
    """Raise ValueError unless ranks are distinct ranks of a world of this size, at least one, and no registered set has them.
    here: this rank."""
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(
            f"rank {here}: a process set needs at least one rank, each once, of those from 0 to {size - 1}, not {ranks}"
        )
    for other in registered:
        if other.ranks == ranks:
            raise ValueError(f"rank {here}: there is a process set of these ranks already: {other!r}")


global_process_set = ProcessSet(())
"""All ranks of the world, between init() and shutdown()."""
