"""The World: all ranks that have joined, with the Communicators and the process sets that they share."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.communicator import abandon_all, close_all
from gradwire.collectives.control.attempt import membership_of
from gradwire.collectives.control.membership import Membership
from gradwire.collectives.schedules.topology import host_id
from gradwire.trainer.world.environment import Settings
from gradwire.trainer.world.launch import Launch
from gradwire.trainer.world.meeting import Meeting, agreed_ranks, destroy_group
from gradwire.trainer.world.process_sets import (
    NotIncluded,
    ProcessSet,
    check_new_set,
    global_process_set,
    group_along,
)
from gradwire.trainer.world.recording import Recorder

_log = logging.getLogger("gradwire")

#: How long a rank that leaves the world waits for the other ranks to write a timeline.
_TIMELINE_S = 10.0


class Enrolled(Protocol):
    """The interface of a distributed optimizer that a World uses."""

    def settle(self) -> None:
        """Complete the update of the last step."""


class World:
    """Holds all ranks, with the Communicators that the verbs and the optimizers use, and the process sets.

    settings.timeout_s: the limit for joining, and for each operation of these Communicators. comm: the launched ranks that form
    this world, in the order of their ranks in it; None for all. meeting: how they have connected; None if they are connected by
    torch.distributed only, which must be initialized. owns_process_group: whether close() ends torch.distributed.
    """

    def __init__(
        self,
        launch: Launch,
        settings: Settings,
        comm: Sequence[int] | None,
        meeting: Meeting | None,
        *,
        owns_process_group: bool,
    ) -> None:
        self.settings = settings
        self.meeting = meeting
        self._owns_process_group = owns_process_group
        self._process = os.getpid()
        self._launched: Membership | None = None
        self.process_sets: list[ProcessSet] = []
        self._registered = 0
        self.recorder = Recorder()
        """Records a timeline of the operations of this world's Communicators."""
        self._opened: WeakValueDictionary[int, Communicator] = WeakValueDictionary()
        self._optimizers: WeakValueDictionary[int, Enrolled] = WeakValueDictionary()
        self._enrolled = 0
        self._numbers = count()  # the keys of these two dictionaries, in the order of creation
        self._communicators: dict[ProcessSet | dist.ProcessGroup, Communicator] = {}
        self._times_opened: Counter[int] = Counter()
        try:
            self._join(launch, comm)
        except BaseException as error:
            self.close(error if isinstance(error, CollectiveError) else None)
            raise

    def _join(self, launch: Launch, comm: Sequence[int] | None) -> None:
        if self.meeting is None:
            group = dist.group.WORLD
            assert group is not None
            launched = membership_of(group, host_id(), self.settings.timeout_s)
        else:
            launched = self.meeting.membership
        self._launched = launched
        ranks = agreed_ranks(launched, comm, self.settings.timeout_s)
        self._membership = launched.subset(ranks, f"world of {ranks}")
        self.rank, self.size = self._membership.rank, self._membership.size
        self._is_whole = ranks == list(range(launched.size))
        global_process_set.ranks = list(range(self.size))
        self._register(global_process_set)
        topology = self.communicator().topology
        self.hosts = topology.hosts
        is_launched = self._is_whole and (launch.rank, launch.size) == (self.rank, self.size)
        local_rank, local_size = (launch.local_rank, launch.local_size) if is_launched else (None, None)
        self.local_rank = topology.local_rank if local_rank is None else local_rank
        self.local_size = topology.local_size if local_size is None else local_size
        local_ranks = self.communicator().allgather_record(self.local_rank)
        self.cross_rank, self.cross_size = cross_position(self.rank, local_ranks)

    def communicator(self, process_set: ProcessSet | dist.ProcessGroup | DeviceMesh | None = None) -> Communicator:
        """Return the Communicator that all verbs use for a process set. The first call is collective over the set.

        Raises NotIncluded on a rank outside of the set.
        """
        members = self._checked(process_set)
        if members not in self._communicators:
            if isinstance(members, ProcessSet) and not members.included():
                message = f"this process is not part of {members!r}, which alone may call verbs with it"
                raise NotIncluded(message, rank=self.rank, operation="verb of a process set")
            self._communicators[members] = self.open_communicator(members)
        return self._communicators[members]

    def open_communicator(
        self,
        process_set: ProcessSet | dist.ProcessGroup | DeviceMesh | None,
        timeout_s: float | None = None,
        *,
        tensors: Sequence[Tensor] = (),
        beside_others: bool = False,
    ) -> Communicator:
        """Return a new Communicator for one user, closed with the world at the latest. Collective over the process set; a rank
        outside of the set gets a Communicator of this rank alone.

        timeout_s: by default that of the world. tensors: those that it will exchange, if known. If all are on the CPU, it has no
        NCCL group, and the ranks of a host reduce in shared memory. beside_others: see Membership. A Communicator of a
        torch.distributed group ignores tensors and beside_others.
        """
        members = self._checked(process_set)
        joined: Membership | dist.ProcessGroup
        if isinstance(members, ProcessSet):
            identity = members.process_set_id
            assert identity is not None
            self._times_opened[identity] += 1
            name = f"process set {identity}/{self._times_opened[identity]}"
            if members.included():
                joined = self._membership.subset(members.ranks, name)
            else:
                joined = self._membership.subset([self.rank], f"{name}/without rank {self.rank}")
            joined = replace(joined, beside_others=beside_others)
            if tensors and all(tensor.is_cpu for tensor in tensors):
                joined = replace(joined, device_types=("cpu",))
        else:
            joined = members
        communicator = self._opened[next(self._numbers)] = Communicator(
            joined,
            timeout_s=self.settings.timeout_s if timeout_s is None else timeout_s,
            stall_warning_s=self.settings.stall_warning_s,
            stall_shutdown_s=self.settings.stall_shutdown_s,
        )
        self.recorder.add(communicator)
        return communicator

    def open_pair(self, first: int, second: int, name: str, timeout_s: float | None = None) -> Communicator:
        """Return a new Communicator for messages between two ranks of the world, in this order, closed with the world at the
        latest. Collective over the two ranks. name: the same on both, and not used before. timeout_s: the limit of each
        operation of this rank; by default that of the world."""
        pair = replace(self._membership.subset([first, second], name), beside_others=True)
        patience_s = self.settings.timeout_s if timeout_s is None else timeout_s
        communicator = Communicator(pair, timeout_s=patience_s, stall_warning_s=None)
        self._opened[next(self._numbers)] = communicator
        return communicator

    def add(self, process_sets: Sequence[ProcessSet]) -> None:
        """Register process sets. Collective over the world. Raises ValueError on all ranks if a set is invalid or registered
        already, or if ranks give different sets."""
        self._agree("add_process_set", [process_set.ranks for process_set in process_sets])
        registered = list(self.process_sets)
        for process_set in process_sets:  # the same on all ranks, so all raise or none
            if process_set.counts_launched and not self._is_whole:
                raise ValueError(f"rank {self.rank}: after init(comm=), a process set is made of a list of ranks")
            check_new_set(self.rank, process_set.ranks, self.size, registered)
            registered.append(process_set)
        for process_set in process_sets:
            self._register(process_set)

    def remove(self, process_set: ProcessSet) -> None:
        """Unregister a process set, and close the Communicator that the verbs use for it. Collective over the world."""
        self._agree("remove_process_set", process_set.ranks)
        self.process_sets.remove(process_set)
        process_set.unregister()
        if (communicator := self._communicators.pop(process_set, None)) is not None:
            communicator.close()

    def ranks_of(self, communicator: Communicator) -> list[int | None]:
        """Return the rank in this world of each rank of a Communicator; None for a rank that is not in this world."""
        place = {launched: rank for rank, launched in enumerate(self._membership.global_ranks)}
        return [place.get(launched) for launched in communicator.global_ranks]

    @property
    def is_of_this_process(self) -> bool:
        """Return False in a process that was forked from the one that joined this world."""
        return os.getpid() == self._process

    @property
    def communicators(self) -> list[Communicator]:
        """Return the Communicators of this world that are still referenced, in the order in which they were opened."""
        return list(self._opened.values())

    @property
    def optimizers(self) -> list[Enrolled]:
        """Return the distributed optimizers in use, in the order in which they were made."""
        return list(self._optimizers.values())

    def enrol(self, optimizer: Enrolled) -> None:
        """Register a distributed optimizer for join(), broadcast_parameters() and shutdown()."""
        self._optimizers[next(self._numbers)] = optimizer
        self._enrolled += 1

    def withdraw(self, optimizer: Enrolled) -> None:
        """Undo enrol(), for an optimizer that is closed."""
        for number, enrolled in list(self._optimizers.items()):
            if enrolled is optimizer:
                del self._optimizers[number]
                self._enrolled -= 1

    @property
    def deleted_optimizers(self) -> int:
        """Return how many distributed optimizers of this rank were deleted without close()."""
        return self._enrolled - len(self._optimizers)

    def start_timeline(self, file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Start recording on this rank for a timeline that rank 0 will write to a file; see gradwire.start_timeline."""
        path = Path(file_path)
        if self.recorder.path is not None:
            raise ValueError(f"rank {self.rank}: a timeline for {self.recorder.path} is being recorded: stop it first")
        if self.rank == 0 and not path.parent.is_dir():
            raise ValueError(
                f"rank {self.rank}: there is no folder {path.parent} to write the timeline {path.name!r} in"
            )
        self.recorder.start(path, marks_cycles=mark_cycles)

    def stop_timeline(self) -> None:
        """Stop recording. Rank 0 writes the timeline of all ranks. Collective."""
        if self.recorder.path is None:
            raise ValueError(f"rank {self.rank}: no timeline is being recorded: start one first")
        self.recorder.stop(self.communicator())

    def has_failed(self) -> bool:
        """Return whether an operation among all ranks has failed, and none among some of them. The ranks in the error are then
        those of the world."""
        everyone = list(range(self.size))
        failed = [self.ranks_of(each) for each in self.communicators if each.absence.has_failed]
        return bool(failed) and all(ranks == everyone for ranks in failed)

    def close(self, failure: CollectiveError | None = None) -> None:
        """Close the Communicators of this world, and unregister the process sets. A timeline is written if the other ranks
        take part soon. failure: the error that ended the world, if any; close() then does not wait for other ranks, and
        completes no updates. Closes everything even if a part raises an error, as an optimizer may that completes its update;
        then raises the first interrupt, or else the first error, and logs the others."""
        errors: list[BaseException] = []
        for end in self._endings(failure):
            try:
                end()
            except BaseException as error:
                errors.append(error)
        errors.sort(key=lambda error: isinstance(error, Exception))
        for other in errors[1:]:
            _log.error("gradwire: rank %d: %s, while the world was closed", self.rank, repr(other))
        if errors:
            raise errors[0]

    def _endings(self, failure: CollectiveError | None) -> list[Callable[[], object]]:
        """Return the parts of close(), in order."""
        endings: list[Callable[[], object]] = [partial(self._write_timeline, _TIMELINE_S if failure is None else 0.0)]
        if failure is None:
            endings += [partial(self._settle, optimizer) for optimizer in self.optimizers]
            # That of all ranks last: who learns by it that this rank leaves knows of the others already.
            endings += [lambda: close_all(reversed(self.communicators))]
        else:
            endings += [lambda: abandon_all(reversed(self.communicators), failure)]
        endings += [process_set.unregister for process_set in self.process_sets]
        if self._owns_process_group:
            endings += [partial(destroy_group, None if self.meeting is None else self.meeting.interface)]
        if self._launched is not None:
            endings += [self._launched.close]
        return endings

    def _write_timeline(self, patience_s: float) -> None:
        """Write the timeline that is being recorded, if any, and if the other ranks take part within patience_s seconds."""
        if self.recorder.path is not None:
            try:
                self.recorder.stop(self.communicator(), patience_s)
            except (CollectiveError, OSError) as error:
                _log.warning("gradwire: rank %d: there is no timeline of all ranks: %s", self.rank, error)

    def _settle(self, optimizer: Enrolled) -> None:
        """Complete the update of the last step, unless other ranks make that impossible."""
        try:
            optimizer.settle()
        except CollectiveError as error:
            _log.warning("gradwire: rank %d: the update of the last step is not complete: %s", self.rank, error)

    def _checked(self, process_set: object) -> ProcessSet | dist.ProcessGroup:
        """Return the ProcessSet or group of a process_set argument; None means all ranks. Raises ValueError for an argument of
        another type, and for a set that is not registered."""
        if process_set is None:
            return global_process_set
        if isinstance(process_set, DeviceMesh):
            return group_along(process_set, self.rank)
        if isinstance(process_set, ProcessSet) and process_set not in self.process_sets:
            raise ValueError(
                f"rank {self.rank}: {process_set!r} is not registered: give it to init(process_sets=) or, on all ranks, to "
                "add_process_set()"
            )
        if not isinstance(process_set, ProcessSet | dist.ProcessGroup):
            raise ValueError(
                f"rank {self.rank}: process_set is {process_set!r}: a ProcessSet is needed, a Communicator, one dimension of "
                "a DeviceMesh, or a torch.distributed group that this process belongs to"
            )
        return process_set

    def _register(self, process_set: ProcessSet) -> None:
        process_set.register(self._registered, self.rank)
        self._registered += 1
        self.process_sets.append(process_set)

    def _agree(self, call: str, ranks: list[Any]) -> None:
        """Raise ValueError on all ranks unless all of them give the same arguments."""
        said = self.communicator().allgather_record([call, ranks])
        for rank, (other_call, other_ranks) in enumerate(said):
            if [other_call, other_ranks] != said[0]:
                raise ValueError(
                    f"rank {self.rank}: {call} must be called with the same ranks on all ranks of the world: rank 0 called "
                    f"{said[0][0]} with {said[0][1]}, rank {rank} {other_call} with {other_ranks}"
                )


def cross_position(rank: int, local_ranks: list[int]) -> tuple[int, int]:
    """Return Horovod's cross_rank and cross_size of a rank: its place among the ranks that have its local rank, and
    their number.

    local_ranks[r] is the local rank of rank r.
    """
    peers = [peer for peer, local_rank in enumerate(local_ranks) if local_rank == local_ranks[rank]]
    return peers.index(rank), len(peers)
