"""The world between init() and shutdown(), and the public functions that join it, leave it, and return this process's ranks."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import ContextDecorator
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, PeerLost
from gradwire.collectives.control.key import Key, key_of_process, use_key_file
from gradwire.collectives.errors import add_rank
from gradwire.collectives.torch_internals import HashStore
from gradwire.trainer.world.environment import DYNAMIC_TIMELINE, Settings, notice, read_settings
from gradwire.trainer.world.generations import WORKER, Worker
from gradwire.trainer.world.importing import check_not_importing
from gradwire.trainer.world.joined import World
from gradwire.trainer.world.launch import ALONE, Launch, read_launch, slurm_hint
from gradwire.trainer.world.meeting import Meeting, init_group, meet
from gradwire.trainer.world.process_sets import ProcessSet, ProcessSetLike, global_process_set, ranks_of

_log = logging.getLogger("gradwire")


class NotInitialized(RuntimeError, ValueError):
    """A world is needed before init() or after shutdown(). Horovod's programs catch it as a ValueError."""


class _Holder:
    """Holds the world between init() and shutdown(), since Horovod's functions take no handle of it.

    store: that of the last world that init() made. On rank 0, this reference keeps the store's server running, since other
    ranks may still be leaving that world, or already be connecting for the next one. left: the keys of the meetings that this
    process has left or will leave. worker: the Worker of this process in an elastic job, from init() on. names: those of
    operations in flight.
    """

    world: World | None = None
    store: Store | None = None
    worker: Worker | None = None

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
    key_file: str | os.PathLike[str] | None = None,
) -> None:
    """Join the world that the launcher's environment variables describe; without a launcher, a world of one.

    If torch.distributed is initialized, its default group is the world. Otherwise init() initializes it: gloo, and NCCL for
    CUDA tensors if CUDA and NCCL are available. Collective over all processes that were launched; further calls do nothing.

    comm: makes the world smaller: an mpi4py communicator, or a list of launched ranks. The i-th rank of the list becomes rank i
    of the world. The list contains this process, and is the same on all processes in the list.
    process_sets: process sets to register, or lists of their ranks, the same on all ranks; "dynamic" is accepted, as in
    Horovod.
    timeout_s: the seconds in which the ranks must find each other, and each operation of the verbs and optimizers must finish;
    default 300.
    An existing torch.distributed, and a Communicator given as process_set, keep their own deadlines.
    stall_warning_s: the seconds after which a waiting rank logs for which ranks it waits; default 60; 0: never.
    stall_shutdown_s: the seconds after which such a rank raises CollectiveTimeout, if they are fewer than timeout_s; 0, the
    default: only after timeout_s.
    key_file: the file with the key of the job, from `gradwire keygen`, the same for all processes: with it, gradwire encrypts its
    connections, also those of Communicators and process groups that are made elsewhere, and after shutdown(): a process keeps its
    key. By default that of the environment variable GRADWIRE_KEY_FILE. With a key, a group over gloo between hosts is an error.

    In an elastic job (gradwire run --min-np), the launcher decides which processes are the ranks, and init() waits for its
    decision. A process that starts after training has begun is alone until it calls a function that hvd.elastic.run decorates.
    After shutdown(), init() waits for the launcher's next generation.

    Horovod's environment variables apply to arguments that are not given (docs/reference/environment.md). A warning of the
    logger `gradwire` on rank 0 names the variables that are used and those that are ignored.

    Raises ValueError if the environment does not say how to find rank 0, for invalid arguments and variables, and for a key that
    cannot be used: the other ranks raise CollectiveError at once, unless this process has used another key before, is a worker of
    an elastic job, or serves the store, as rank 0 does without torchrun, and they arrive more than five seconds later. Raises
    RuntimeError in a process that was forked from a rank after its init(), and in one that imports the script, such as a
    DataLoader's worker or a rank of horovod.run(). Raises CollectiveError if the ranks do not find each other in time; in an
    elastic job, TimeoutError if the launcher begins no generation with this process in time, and RuntimeError if the job has
    ended.
    """
    if _holder.world is not None:
        if not _holder.world.is_of_this_process:
            raise RuntimeError(
                f"rank {_holder.world.rank}: this process was forked from that rank, whose world it cannot use: start processes "
                "with the method 'spawn' or 'forkserver', or fork before init()"
            )
        if key_file is not None and Key.read(key_file) != key_of_process():
            raise ValueError(
                f"rank {_holder.world.rank}: init(key_file={os.fspath(key_file)!r}): the world was joined without this key: give "
                "it to the first init()"
            )
        return
    check_not_importing("init()")
    settings = read_settings(os.environ).replaced(timeout_s, stall_warning_s, stall_shutdown_s)
    if key_file is not None:
        use_key_file(key_file)
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f'process_sets must be a list of process sets, None or "dynamic", not {process_sets!r}')
    listed = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    static = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in listed]
    ranks = None if comm is None else ranks_of(comm)
    owns = not dist.is_initialized()
    if owns and _holder.worker is None and WORKER in os.environ:
        _holder.worker = Worker(os.environ, settings.timeout_s)
    if _holder.worker is not None and ranks is not None:
        raise ValueError(
            "init(comm=) is not for elastic jobs, in which the launcher says which processes are the ranks"
        )
    if owns and _holder.worker is None and read_launch(os.environ) is ALONE:
        _hint()
    if settings.log_level is not None:
        _log.setLevel(settings.log_level)
        if not _log.hasHandlers():  # if a program configures no logging, Python shows warnings only
            _log.addHandler(logging.StreamHandler())
    if settings.interface is not None:  # torch's gloo gets the interface from this variable only
        os.environ.setdefault("GLOO_SOCKET_IFNAME", settings.interface)
    world = _join(settings, ranks, static, owns=owns)
    try:
        if settings.timeline not in (None, DYNAMIC_TIMELINE):
            world.start_timeline(settings.timeline, settings.marks_cycles)
    except BaseException:
        shutdown()
        raise
    if world.rank == 0 and (said := notice(os.environ)):
        _log.warning("gradwire: %s", said)


def _join(settings: Settings, ranks: list[int] | None, process_sets: list[ProcessSet], *, owns: bool) -> World:
    """Join the world that the environment describes; in an elastic job, the next generation in which the ranks find each other.
    Arguments: see World and its add()."""
    worker = _holder.worker
    while True:
        if worker is not None:
            worker.take_place(settings.timeout_s)
        launch = read_launch(os.environ)
        try:
            lost = None if worker is None or worker.losses is None else worker.losses.ranks
            meeting = None
            if owns:
                meeting = start_torch_distributed(launch, settings.timeout_s, left=_holder.left, lost=lost)
            world = World(launch, settings, ranks, meeting, owns_process_group=owns)
            try:
                world.add(process_sets)
            except BaseException as error:
                world.close(error if isinstance(error, CollectiveError) else None)
                raise
            break
        except CollectiveError as error:
            if worker is None or isinstance(error, ValueError):  # a caller's mistake, which would happen again
                raise
            worker.leave(error, _lost_by(error))
    _holder.world = world
    if world.meeting is not None:
        _holder.store = world.meeting.store
    atexit.register(shutdown)
    return world


def _hint() -> None:
    """Log how to start several processes, because the user may have forgotten a launcher."""
    spec = sys.modules["__main__"].__spec__
    script = sys.argv[0] if sys.argv[0].endswith(".py") else "train.py"
    module = spec.name.removesuffix(".__main__") if spec is not None else ""
    if module == "gradwire.trainer.tools.check":
        module = "gradwire check"
    elif module == "gradwire.bench":
        module = " ".join((module, *sys.argv[1:2]))  # with the name of the benchmark
    program = f"-m {module}" if module else script
    alone = f"one process, which trains alone; to start two: torchrun --nproc-per-node 2 {program}"
    _log.warning("gradwire: %s", slurm_hint(os.environ, program) or alone)


def shutdown() -> None:
    """Leave the world: close all of its Communicators, and torch.distributed if init() initialized it. Never hangs. In a
    process that was forked from a rank, the rank's world remains open."""
    world, _holder.world = _holder.world, None
    atexit.unregister(shutdown)
    if world is not None and world.is_of_this_process:
        world.close()


def elastic_worker() -> Worker | None:
    """Return the Worker of this process in an elastic job; None in other jobs, and before init()."""
    return _holder.worker


def leave_generation(error: CollectiveError | None) -> None:
    """Leave the world, and the generation of an elastic job. error: the reason; this rank then leaves at once, whatever other
    ranks do. None: complete running operations, and leave for an update. Raises RuntimeError if the launcher is gone."""
    world, worker = current_world(), _holder.worker
    assert worker is not None
    lost = _lost_by(error) if error is not None and world.has_failed() else ()
    _holder.world = None
    atexit.unregister(shutdown)
    world.close(error)
    worker.leave(error, lost)


def join_next_generation(settings: Settings) -> None:
    """Join the next generation of an elastic job, after leave_generation(). Raises as init()."""
    _join(settings, None, [], owns=True)


def _lost_by(error: CollectiveError) -> tuple[int, ...]:
    """Return the ranks that no longer answer, according to an error, without those that announced that they leave."""
    is_lost = isinstance(error, CollectiveTimeout) or (isinstance(error, PeerLost) and not error.has_left)
    return error.ranks if is_lost else ()


def start_torch_distributed(
    launch: Launch,
    timeout_s: float,
    backend: str | None = None,
    left: set[str] | None = None,
    lost: Callable[[], Collection[int]] | None = None,
) -> Meeting | None:
    """Initialize torch.distributed for a launch, and return the Meeting of its ranks; None for a rank that is alone.

    backend None: gloo, with NCCL for CUDA tensors if CUDA and NCCL are available. left, lost: as in meet().
    """
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if launch.size > 1:
        return meet(launch, timeout_s, backend, left, lost)
    init_group(backend, timeout_s, HashStore(), 0, 1)
    return None


def is_initialized() -> bool:
    """Return whether this process has called init(), and not shutdown() since then."""
    return _holder.world is not None


def current_world() -> World:
    """Return the world that init() joined. Raises NotInitialized before that."""
    if _holder.world is None:
        raise NotInitialized("call hvd.init() first (import gradwire as hvd)")
    return _holder.world


def current_settings() -> Settings:
    """Return the settings of the world that init() joined; without a world, the defaults."""
    return Settings() if _holder.world is None else _holder.world.settings


class _NamesRank(ContextDecorator):
    """The door between users and checks: it begins the messages of ValueErrors, TypeErrors and RuntimeErrors with this rank.

    A public function or constructor is decorated with names_rank, or uses it in a `with` block; the functions that it calls then
    raise without a rank. What has a Communicator names that one's rank instead, and so does what a step passes often.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and _holder.world is not None:
            add_rank(error, _holder.world.rank)


names_rank = _NamesRank()


def communicator_of(process_set: ProcessSetLike) -> Communicator:
    """Return the Communicator of a process set. Raises NotIncluded if this process is not in it."""
    return process_set if isinstance(process_set, Communicator) else current_world().communicator(process_set)


def root_in(communicator: Communicator, root_rank: int) -> int:
    """Convert root_rank, a rank of the world, to a rank of a Communicator. Raises ValueError if root_rank does not take part.

    If the Communicator's ranks have no ranks in torch.distributed, root_rank is already a rank of the Communicator.
    """
    if not isinstance(root_rank, int):
        raise TypeError(f"root_rank must be a whole number, not {root_rank!r}")
    ranks: list[int | None] = list(communicator.global_ranks or range(communicator.size))
    if communicator.global_ranks and _holder.world is not None:
        ranks = _holder.world.ranks_of(communicator)
    if root_rank not in ranks:
        listed = ", ".join(map(str, ranks))
        raise ValueError(f"root_rank={root_rank} does not take part; ranks of the world that do are {listed}")
    return ranks.index(root_rank)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, or a new one for a list of ranks, and return it. Collective over the world, including ranks
    outside of the set.

    Raises ValueError on all ranks if ranks are not in the world or repeated, if a registered set has the same ranks, and if
    processes give different sets. Raises RuntimeError before init().
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    current_world().add([made])
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set, and return whether it was registered; the set of all ranks cannot be removed. Collective over
    the world. Optimizers that were made with it continue to work.
    """
    world = current_world()
    if process_set is global_process_set or process_set not in world.process_sets:
        return False
    world.remove(process_set)
    return True


def names_in_flight(communicator: Communicator) -> dict[tuple[str, str | None], object]:
    """Return the named calls of a Communicator that are in flight, by verb and name. Callers add and remove them."""
    return _holder.names.setdefault(communicator, {})


def record_in_timelines(communicator: Communicator) -> None:
    """Add a Communicator that was not made by the World to the timelines."""
    if _holder.world is not None:
        _holder.world.recorder.add(communicator)


def rank() -> int:
    """Return the rank of this process, 0 <= rank() < size()."""
    return current_world().rank


def size() -> int:
    """Return the number of processes in the world."""
    return current_world().size


def local_rank() -> int:
    """Return the rank of this process among those of its host, as set by the launcher if it sets one."""
    return current_world().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return current_world().local_size


def cross_rank() -> int:
    """Return the index of this host among those that have a process with the same local_rank()."""
    return current_world().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with the same local_rank()."""
    return current_world().cross_size
