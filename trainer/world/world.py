"""The world of ranks that this process belongs to: the class World, and the public functions that join, ask and leave it.

Horovod's functions take no handle of a world, so one object of this module, _holder, keeps the one between init() and shutdown().
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.communicator import close_all
from gradwire.collectives.link.membership import Membership, membership_of
from gradwire.collectives.plan.topology import host_id
from gradwire.collectives.torch_internals import HashStore
from gradwire.trainer.world.environment import DYNAMIC_TIMELINE, Settings, notice, read_settings
from gradwire.trainer.world.launch import ALONE, Launch, read_launch, slurm_hint
from gradwire.trainer.world.meeting import Meeting, agreed_ranks, meet
from gradwire.trainer.world.process_sets import (
    NotIncluded,
    ProcessSet,
    ProcessSetLike,
    check_new_set,
    global_process_set,
    group_along,
    ranks_of,
)
from gradwire.trainer.world.recording import Recorder

_log = logging.getLogger("gradwire")

#: How long a rank that leaves waits for the others, to write a timeline with them.
_TIMELINE_S = 10.0


class NotInitialized(RuntimeError, ValueError):
    """Is raised where a world is needed before init() or after shutdown(). Horovod's programs catch a ValueError."""


class World:
    """Holds all ranks, with the Communicators that the verbs and the optimizers use, and the process sets.

    A world that finds torch.distributed initialized uses it and leaves it alone when closed; otherwise `meeting` says how
    its ranks have met. settings.timeout_s: for joining, and for each operation of these Communicators. comm: which of
    the processes launched are this world, in the order of their ranks; None for all. left: the keys of the meetings that this
    process has left.
    """

    def __init__(
        self, launch: Launch, settings: Settings, comm: Sequence[int] | None = None, left: Container[str] = ()
    ) -> None:
        self.settings = settings
        self._owns_process_group = not dist.is_initialized()
        self._launched: Membership | None = None
        self.meeting = (
            start_torch_distributed(launch, settings.timeout_s, left=left) if self._owns_process_group else None
        )
        self.process_sets: list[ProcessSet] = []
        self._registered = 0
        self.recorder = Recorder()
        """What has a timeline made of all that the Communicators of this world do."""
        self._opened: WeakValueDictionary[int, Communicator] = WeakValueDictionary()
        self._optimizers: WeakValueDictionary[int, torch.optim.Optimizer] = WeakValueDictionary()
        self._numbers = count()  # in the order of which those two list what they hold
        self._communicators: dict[ProcessSet | dist.ProcessGroup, Communicator] = {}
        self._times_opened: Counter[int] = Counter()
        try:
            self._join(launch, comm)
        except BaseException:
            self.close()
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
        told = self._is_whole and (launch.rank, launch.size) == (self.rank, self.size)
        local_rank, local_size = (launch.local_rank, launch.local_size) if told else (None, None)
        self.local_rank = topology.local_rank if local_rank is None else local_rank
        self.local_size = topology.local_size if local_size is None else local_size
        local_ranks = self.communicator().allgather_record(self.local_rank)
        self.cross_rank, self.cross_size = cross_position(self.rank, local_ranks)

    def communicator(self, process_set: ProcessSet | dist.ProcessGroup | DeviceMesh | None = None) -> Communicator:
        """Return the Communicator that the verbs share for a process set, made when all its ranks first ask for it.

        Raises NotIncluded on a rank outside of it.
        """
        members = self._checked(process_set)
        if members not in self._communicators:
            if isinstance(members, ProcessSet) and not members.included():
                message = f"this process is not part of {members!r}, which alone may call verbs with it"
                raise NotIncluded(message, rank=self.rank, operation="verb of a process set")
            self._communicators[members] = self.open_communicator(members)
        return self._communicators[members]

    def open_communicator(
        self, process_set: ProcessSet | dist.ProcessGroup | DeviceMesh | None, timeout_s: float | None = None
    ) -> Communicator:
        """Return a new Communicator for one user, closed with the world at the latest. Collective over the process set;
        a rank outside of it gets one that joins it with nobody. timeout_s: by default that of the world."""
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
        """Return a new Communicator of two ranks of the world, in this order, for messages, closed with the world at the latest.
        Collective over the two. name: what both say, and nobody has said before. timeout_s: of this rank's operations; by
        default that of the world."""
        pair = replace(self._membership.subset([first, second], name), beside_others=True)
        patience_s = self.settings.timeout_s if timeout_s is None else timeout_s
        communicator = Communicator(pair, timeout_s=patience_s, stall_warning_s=None)
        self._opened[next(self._numbers)] = communicator
        return communicator

    def add(self, process_sets: Sequence[ProcessSet]) -> None:
        """Register process sets. Collective over the world. Raises ValueError, on all ranks, where one cannot be, and
        where ranks give different ones."""
        self._agree("add_process_set", [process_set.ranks for process_set in process_sets])
        registered = list(self.process_sets)
        for process_set in process_sets:  # on all ranks alike, since they are the same
            if process_set.counts_launched and not self._is_whole:
                raise ValueError(f"rank {self.rank}: after init(comm=), a process set is made of a list of ranks")
            check_new_set(self.rank, process_set.ranks, self.size, registered)
            registered.append(process_set)
        for process_set in process_sets:
            self._register(process_set)

    def remove(self, process_set: ProcessSet) -> None:
        """Forget a registered process set, and close the verbs' Communicator of it. Collective over the world."""
        self._agree("remove_process_set", process_set.ranks)
        self.process_sets.remove(process_set)
        process_set.unregister()
        if (communicator := self._communicators.pop(process_set, None)) is not None:
            communicator.close()

    def ranks_of(self, communicator: Communicator) -> list[int | None]:
        """Return the ranks in this world of a Communicator's ranks, None for what is not in it."""
        place = {launched: rank for rank, launched in enumerate(self._membership.global_ranks)}
        return [place.get(launched) for launched in communicator.global_ranks]

    @property
    def communicators(self) -> list[Communicator]:
        """Return those that were opened here and that somebody still uses, in the order in which they were opened."""
        return list(self._opened.values())

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the distributed optimizers in use, in the order in which they were made."""
        return list(self._optimizers.values())

    def enrol(self, optimizer: torch.optim.Optimizer) -> None:
        """Let join() know of a distributed optimizer."""
        self._optimizers[next(self._numbers)] = optimizer

    def start_timeline(self, file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Record, on this rank, what is going to be written there by rank 0: see gradwire.start_timeline."""
        path = Path(file_path)
        if self.recorder.path is not None:
            raise ValueError(f"rank {self.rank}: a timeline for {self.recorder.path} is being recorded: stop it first")
        if self.rank == 0 and not path.parent.is_dir():
            raise ValueError(
                f"rank {self.rank}: there is no folder {path.parent} to write the timeline {path.name!r} in"
            )
        self.recorder.start(path, marks_cycles=mark_cycles)

    def stop_timeline(self) -> None:
        """Have rank 0 write what all ranks have recorded. Collective."""
        if self.recorder.path is None:
            raise ValueError(f"rank {self.rank}: no timeline is being recorded: start one first")
        self.recorder.stop(self.communicator())

    def close(self) -> None:
        """Close what was opened here, and forget the process sets. A timeline is written, if the other ranks come for
        that soon."""
        if self.recorder.path is not None:
            try:
                self.recorder.stop(self.communicator(), _TIMELINE_S)
            except (CollectiveError, OSError) as error:
                _log.warning("gradwire: rank %d: there is no timeline of all ranks: %s", self.rank, error)
        close_all(self.communicators)
        for process_set in self.process_sets:
            process_set.unregister()
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()
        if self._launched is not None:
            self._launched.close()

    def _checked(self, process_set: object) -> ProcessSet | dist.ProcessGroup:
        """Return what a process set is, all ranks for None. Raises ValueError for what is none, or is not registered."""
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
        """Raise ValueError, on all ranks, unless all say the same."""
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


def start_torch_distributed(
    launch: Launch, timeout_s: float, backend: str | None = None, left: Container[str] = ()
) -> Meeting | None:
    """Initialize torch.distributed as launched, and return how the ranks have met; None for a rank that is alone.

    backend None: gloo, with NCCL for CUDA tensors where torch has both. left: as in meet().
    """
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if launch.size > 1:
        return meet(launch, timeout_s, backend, left)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), store=HashStore(), rank=0, world_size=1)
    return None


class _Holder:
    """Knows the world, since Horovod's functions take no handle of it.

    store: of the last world that init() made. Rank 0 keeps its server for as long as this process holds it: others may
    still be leaving that world, or have come for the next one already. left: the keys of the meetings that this process has
    left, or is about to. names: of operations in flight.
    """

    world: World | None = None
    store: Store | None = None

    def __init__(self) -> None:
        self.left: set[str] = set()
        self.names: WeakKeyDictionary[Communicator, dict[tuple[str, str | None], object]] = WeakKeyDictionary()


_holder = _Holder()


def init(
    comm: Iterable[int] | Any | None = None,
    process_sets: Iterable[ProcessSet | Iterable[int]] | Literal["dynamic"] | None = None,
    *,
    timeout_s: float | None = None,
    stall_warning_s: float | None = None,
    stall_shutdown_s: float | None = None,
) -> None:
    """Join the world that the launcher's environment variables describe; without a launcher, a world of one.

    Where torch.distributed is already initialized, its default group is the world, with whatever backend it has.
    Otherwise it is initialized here: gloo, with NCCL for CUDA tensors where torch has both. Collective over all
    processes that were launched; again does nothing.

    comm: makes the world smaller: a list of ranks, as launched, that has this process in it and is the same on all of
    them (other processes give another), in the order of their ranks in the world; or an mpi4py communicator.
    process_sets: the process sets to register, or lists of their ranks, the same on all ranks; "dynamic" is Horovod's
    word for those that add_process_set() adds later, which is always allowed here.
    timeout_s: what the ranks have to find each other, and what each operation of the verbs and optimizers may take
    before it raises; by default 300. A torch.distributed that was there before, and a Communicator given as
    process_set, keep their own. stall_warning_s, stall_shutdown_s: after which a rank that waits for others says whom
    it waits for (by default 60), and gives up (by default never); 0 is never.

    Horovod's environment variables that mean something here (gradwire.trainer.world.environment) count where an argument is
    not given; a warning of the logger `gradwire` on rank 0 names them, and those that are ignored.

    Raises ValueError where the environment does not say how to find rank 0, and for arguments and variables that cannot
    be meant; CollectiveError where the ranks do not find each other in time.
    """
    if _holder.world is not None:
        return
    settings = read_settings(os.environ).replaced(timeout_s, stall_warning_s, stall_shutdown_s)
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f'process_sets must be a list of process sets, None or "dynamic", not {process_sets!r}')
    listed = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    static = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in listed]
    ranks = None if comm is None else ranks_of(comm)
    launch = read_launch(os.environ)
    if launch is ALONE and not dist.is_initialized():
        _hint()
    if settings.log_level is not None:
        _log.setLevel(settings.log_level)
    if settings.interface is not None:  # which torch's gloo reads nowhere else
        os.environ.setdefault("GLOO_SOCKET_IFNAME", settings.interface)
    world = World(launch, settings, ranks, _holder.left)
    try:
        world.add(static)
        if settings.timeline not in (None, DYNAMIC_TIMELINE):
            world.start_timeline(settings.timeline, settings.marks_cycles)
    except BaseException:
        world.close()
        raise
    _holder.world = world
    if world.meeting is not None:
        _holder.store = world.meeting.store
        _holder.left.add(world.meeting.key)
    atexit.register(shutdown)
    if world.rank == 0 and (said := notice(os.environ)):
        _log.warning("gradwire: %s", said)


def _hint() -> None:
    """Say how several processes are started, because a launcher may have been forgotten."""
    spec = sys.modules["__main__"].__spec__
    script = sys.argv[0] if sys.argv[0].endswith(".py") else "train.py"
    program = f"-m {spec.name.removesuffix('.__main__')}" if spec is not None else script
    alone = f"one process, which trains alone; to start two: torchrun --nproc-per-node 2 {program}"
    _log.warning("gradwire: %s", slurm_hint(os.environ, program) or alone)


def shutdown() -> None:
    """Leave the world: close every Communicator opened here, and torch.distributed if init() made it. Never hangs."""
    world, _holder.world = _holder.world, None
    atexit.unregister(shutdown)
    if world is not None:
        world.close()


def is_initialized() -> bool:
    """Return whether this is between init() and shutdown()."""
    return _holder.world is not None


def current_world() -> World:
    """Return the world that init() joined. Raises NotInitialized before that."""
    if _holder.world is None:
        raise NotInitialized("call hvd.init() first (import gradwire as hvd)")
    return _holder.world


def current_settings() -> Settings:
    """Return the settings of the world that init() joined, and before that those of an environment that says nothing."""
    return Settings() if _holder.world is None else _holder.world.settings


def here() -> str:
    """Return how messages about a caller's mistake begin: this rank, where there is a world to have one in."""
    return "" if _holder.world is None else f"rank {_holder.world.rank}: "


def communicator_of(process_set: ProcessSetLike) -> Communicator:
    """Return the Communicator of a process set. Raises NotIncluded where this process is not in it."""
    return process_set if isinstance(process_set, Communicator) else current_world().communicator(process_set)


def root_in(communicator: Communicator, root_rank: int) -> int:
    """Return which rank of a Communicator root_rank is, a rank of the world. Raises ValueError where it is none of them.

    Of a Communicator whose ranks are none of torch.distributed's, it is a rank of its own.
    """
    if not isinstance(root_rank, int):
        raise TypeError(f"{here()}root_rank must be a whole number, not {root_rank!r}")
    ranks: list[int | None] = list(communicator.global_ranks or range(communicator.size))
    if communicator.global_ranks and _holder.world is not None:
        ranks = _holder.world.ranks_of(communicator)
    if root_rank not in ranks:
        listed = ", ".join(map(str, ranks))
        raise ValueError(f"{here()}root_rank={root_rank} does not take part; ranks of the world that do are {listed}")
    return ranks.index(root_rank)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, or the ranks of one, and return it. Collective over the world, members or not.

    Raises ValueError, on all ranks, for ranks that are not in the world or are given twice, for those of a set that is
    registered, and where the ranks do not all give the same; RuntimeError before init().
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    current_world().add([made])
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set, and return whether there was one to forget: that of all ranks stays. Collective over the
    world. Optimizers that were made with it go on."""
    world = current_world()
    if process_set is global_process_set or process_set not in world.process_sets:
        return False
    world.remove(process_set)
    return True


def names_in_flight(communicator: Communicator) -> dict[tuple[str, str | None], object]:
    """Return whose each name of a verb is, of the operations that a Communicator has been given and that are not done."""
    return _holder.names.setdefault(communicator, {})


def record_in_timelines(communicator: Communicator) -> None:
    """Have timelines show what a Communicator does that this package has not made."""
    if _holder.world is not None:
        _holder.world.recorder.add(communicator)


def rank() -> int:
    """Return this process's place among all, 0 <= rank() < size()."""
    return current_world().rank


def size() -> int:
    """Return the number of processes."""
    return current_world().size


def local_rank() -> int:
    """Return this process's place among those of its host: the launcher's word where it gives one."""
    return current_world().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return current_world().local_size


def cross_rank() -> int:
    """Return this host's place among those that have a process of this local_rank()."""
    return current_world().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process of this local_rank()."""
    return current_world().cross_size
