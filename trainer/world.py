"""The world of ranks this process belongs to: init(), shutdown(), and who it is among the others."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from collectives import CollectiveError, Communicator
from collectives.communicator import close_all
from trainer.launch import ALONE, Launch, read_launch, slurm_hint
from trainer.meeting import meet
from trainer.recording import Recorder
from trainer.torch_internals import HashStore

_log = logging.getLogger("gradwire")

#: How long a rank that leaves waits for the others, to write a timeline with them.
_TIMELINE_S = 10.0

ProcessSet: TypeAlias = "dist.ProcessGroup | Communicator | None"
"""Which ranks take part: None for all, a torch.distributed group, or a Communicator."""


class World:
    """Holds all ranks, with the Communicators that the verbs and the optimizers use.

    A world that finds torch.distributed initialized uses it and leaves it alone when closed; otherwise `store` is where
    its ranks have met. timeout_s: for joining, and for each operation of these Communicators.
    """

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        self._owns_process_group = not dist.is_initialized()
        self.store = start_torch_distributed(launch, timeout_s) if self._owns_process_group else None
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._timeout_s = timeout_s
        self.recorder = Recorder()
        """What has a timeline made of all that the Communicators of this world do."""
        self._opened: list[weakref.ref[Communicator]] = []
        self._communicators: dict[dist.ProcessGroup | None, Communicator] = {}
        topology = self.communicator().topology
        told = (launch.rank, launch.size) == (self.rank, self.size)
        local_rank, local_size = (launch.local_rank, launch.local_size) if told else (None, None)
        self.local_rank = topology.local_rank if local_rank is None else local_rank
        self.local_size = topology.local_size if local_size is None else local_size
        local_ranks = self.communicator().allgather_record(self.local_rank)
        self.cross_rank, self.cross_size = cross_position(self.rank, local_ranks)

    def communicator(self, group: dist.ProcessGroup | None = None) -> Communicator:
        """Return the Communicator that the verbs share for a group, made when all its ranks first ask for it."""
        if group not in self._communicators:
            self._communicators[group] = self.open_communicator(group)
        return self._communicators[group]

    def open_communicator(self, group: dist.ProcessGroup | None) -> Communicator:
        """Return a new Communicator for one user, closed with the world at the latest. Collective over the group."""
        communicator = Communicator(group, timeout_s=self._timeout_s)
        self.recorder.add(communicator)
        self._opened = [opened for opened in self._opened if opened() is not None] + [weakref.ref(communicator)]
        return communicator

    def start_timeline(self, file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Record, on this rank, what is going to be written there by rank 0: see trainer.start_timeline."""
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
        """Close what was opened here. A timeline is written, if the other ranks come for that soon."""
        if self.recorder.path is not None:
            try:
                self.recorder.stop(self.communicator(), _TIMELINE_S)
            except (CollectiveError, OSError) as error:
                _log.warning("gradwire: rank %d: there is no timeline of all ranks: %s", self.rank, error)
        close_all(communicator for reference in self._opened if (communicator := reference()) is not None)
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()


def cross_position(rank: int, local_ranks: list[int]) -> tuple[int, int]:
    """Return Horovod's cross_rank and cross_size of a rank: its place among the ranks that have its local rank, and
    their number.

    local_ranks[r] is the local rank of rank r.
    """
    peers = [peer for peer, local_rank in enumerate(local_ranks) if local_rank == local_ranks[rank]]
    return peers.index(rank), len(peers)


def start_torch_distributed(launch: Launch, timeout_s: float, backend: str | None = None) -> Store:
    """Initialize torch.distributed as launched, and return the store in which the ranks have met.

    backend None: gloo, with NCCL for CUDA tensors where torch has both.
    """
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if launch.size == 1:
        store: Store = HashStore()
    else:
        store = meet(launch, timeout_s)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=launch.rank, world_size=launch.size)
    return store


class _Holder:
    """Knows the world, since Horovod's functions take no handle of it.

    store: of the last world that init() made. Rank 0 keeps its server for as long as this process holds it: others may
    still be leaving that world, or have come for the next one already.
    """

    world: World | None = None
    store: Store | None = None


_holder = _Holder()


def init(timeout_s: float = 300.0) -> None:
    """Join the world that the launcher's environment describes (trainer.launch); without a launcher, a world of one.

    Where torch.distributed is already initialized, its default group is the world, with whatever backend it has.
    Otherwise it is initialized here: gloo, with NCCL for CUDA tensors where torch has both. Collective; again does
    nothing.

    timeout_s: what the ranks have to find each other, and what each operation of the verbs and optimizers may take
    before it raises. A torch.distributed that was there before, and a Communicator given as process_set, keep their
    own. Raises ValueError where the environment does not say how to find rank 0, CollectiveError where the ranks do not
    find each other in time.
    """
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s must be a finite number of seconds > 0, not {timeout_s!r}")
    if _holder.world is None:
        launch = read_launch(os.environ)
        if launch is ALONE and not dist.is_initialized():
            _hint()
        _holder.world = World(launch, timeout_s)
        _holder.store = _holder.world.store
        atexit.register(shutdown)


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
    """Return the world that init() joined. Raises RuntimeError before that."""
    if _holder.world is None:
        raise RuntimeError("call trainer.init() first")
    return _holder.world


def here() -> str:
    """Return how messages about a caller's mistake begin: this rank, where there is a world to have one in."""
    return "" if _holder.world is None else f"rank {_holder.world.rank}: "


def communicator_of(process_set: ProcessSet) -> Communicator:
    """Return the Communicator of a process set."""
    return process_set if isinstance(process_set, Communicator) else current_world().communicator(process_set)


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
