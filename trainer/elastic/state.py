"""The state that training continues from: models, optimizers, samplers, random numbers and values, with Horovod's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gradwire.trainer.elastic.commits import Commits, Restored
from gradwire.trainer.elastic.kinds import Model, RandomNumbers, Value, are_replicas, kind_of, what_binds
from gradwire.trainer.elastic.memory import Memory
from gradwire.trainer.optimizer import DistributedOptimizer
from gradwire.trainer.reducer.agreement import check_order
from gradwire.trainer.world.world import names_rank, rank, size

_RANDOM = "random numbers"
"""The name of the random number states in a commit. It is not an identifier, so that no value has it."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts or ranks are to be added or removed. Training stops here, and continues with the new ranks."""


class ObjectState:
    """Holds the values that training continues from, as attributes. commit() saves them; restore() and sync() set them.

    values: numbers, strings, booleans, None and tensors, dicts, lists, tuples and sets of these, and objects with state_dict()
    and load_state_dict(), such as a learning rate scheduler or a GradScaler. The states of the random number generators of
    Python, NumPy and torch are saved too; each rank has its own.

    commit(), save(), restore() and sync() are collective.
    """

    @names_rank
    def __init__(self, **values: Any) -> None:
        self._names = list(values)
        self._commits: Commits | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._is_updated = self._agrees = False
        self.has_begun = self.has_trained = (
            False  # whether begin() was called; whether these have been the values of the job
        )
        for name, value in values.items():
            if hasattr(type(self), name) or name in vars(self) or name.startswith("_"):
                raise ValueError(f"a state has a method or attribute {name!r} already: give the value another name")
            setattr(self, name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Register functions that all ranks call, in order, when training continues after a restart or in a new world, once the
        state is restored. They adapt values that depend on the number of ranks, such as learning rates."""
        self._callbacks += callbacks

    def on_reset(self) -> None:
        """Call the functions that register_reset_callbacks() was given."""
        for callback in self._callbacks:
            callback()

    def on_hosts_updated(self, *_: object) -> None:
        """Make this rank raise HostsUpdatedInterrupt in the next commit() or check_host_updates(). Under gradwire run --min-np,
        all ranks raise it, in the same call, which is the next or the one after it. A signal handler may call this method,
        for example when a scheduler announces the end of a host. Horovod's arguments are ignored."""
        self._is_updated = True

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt if on_hosts_updated() was called on this rank. Under gradwire run --min-np, this call is
        collective, and all ranks raise it if on_hosts_updated() was called on any rank, or the launcher wants new ranks."""
        self._stop_if(self.commits.ask_for_update() if self._agrees else self._take_update())

    def commit(self) -> None:
        """Save the state, and check for host updates as check_host_updates() does. Call it between steps, after the same steps
        on all ranks. Under gradwire run --min-np, one commit detects an update, and the next raises HostsUpdatedInterrupt."""
        self.save()
        self._stop_if(self.commits.update_is_due if self._agrees else self._take_update())

    def _take_update(self) -> bool:
        """Return whether on_hosts_updated() was called since the last call of this method."""
        is_updated, self._is_updated = self._is_updated, False
        return is_updated

    def _stop_if(self, is_due: bool) -> None:
        if is_due:
            raise HostsUpdatedInterrupt(
                f"rank {rank()}: a rank or the launcher has announced other hosts: training stops, and resumes on those"
            )

    def save(self) -> None:
        """Save the state as it is now, and keep it until the second save() after this one.

        Raises TypeError for a value that cannot be saved; OSError if memory runs out, which leaves the previous save valid;
        CollectiveError if the ranks could not complete the previous save. After an OSError, this rank must end, since others
        wait for its part.
        """
        shared, own = self._captured()
        self.commits.write(shared, own)

    def restore(self) -> None:
        """Set the values to those of the newest commit of all ranks. Raises RuntimeError if there is none."""
        restored, faults = self.commits.restore()
        if restored is None:
            raise RuntimeError(
                f"rank {rank()}: there is no commit to restore{': ' if faults else ''}{'; '.join(faults)}"
            )
        self.take(restored)

    def sync(self, root_rank: int = 0) -> None:
        """Set the values on all ranks to those of one rank, and save the state."""
        for name, kind in self._kinds().items():
            setattr(self, name, kind.sync(root_rank))
        self.save()

    def begin(self, memory: Memory, is_update_wanted: Callable[[], bool] | None = None) -> None:
        """Write commits to this memory from now on. Collective. Raises ValueError if ranks that hold the same parameters list
        them in different orders. is_update_wanted: returns whether the launcher wants new ranks; each commit calls it on
        another thread. None if ranks need not agree on host updates."""
        values = [getattr(self, name) for name in self._names]
        if are_replicas(values):  # a commit then holds parts of all ranks' states, by the numbers of the parameters
            for value in values:
                if isinstance(value, DistributedOptimizer):
                    check_order(value.communicator, "a commit", value.names)
        self._agrees = is_update_wanted is not None
        if is_update_wanted is None:
            self._commits = Commits(memory)
        else:
            self._commits = Commits(memory, lambda: self._take_update() or is_update_wanted())
        self.has_begun = True

    @property
    def memory(self) -> Memory | None:
        """Return the memory of this state's commits; None before the first."""
        return None if self._commits is None else self._commits.memory

    @property
    def commits(self) -> Commits:
        """Return the Commits of this state. Before begin(), they are in memory that ends with the process."""
        if self._commits is None:
            self._commits = Commits(Memory())
        return self._commits

    def unmovable(self) -> list[str]:
        """Return a text for each value that cannot move to another world unless its process is restarted."""
        return [
            f"{name!r} is {reason}" for name in self._names if (reason := what_binds(getattr(self, name))) is not None
        ]

    def take(self, restored: Restored) -> None:
        """Set the values to the restored ones. A rank that did not exist at the commit keeps its random number states."""
        is_same_size = restored.size == size()
        kinds = self._kinds()
        if rank() < restored.size:
            kinds[_RANDOM] = RandomNumbers()
        for name, kind in kinds.items():
            also = [each[name] for each in restored.also]
            value = kind.take(restored.shared[name], restored.own[name], also, is_same_size=is_same_size)
            if name != _RANDOM:
                setattr(self, name, value)

    def _captured(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state that all ranks share, and this rank's own state, by name."""
        kinds = self._kinds()
        replicas = are_replicas([kind.value for kind in kinds.values()])
        kinds[_RANDOM] = RandomNumbers()
        both = {name: kind.captured(are_replicas=replicas) for name, kind in kinds.items()}
        return {name: shared for name, (shared, _) in both.items()}, {name: own for name, (_, own) in both.items()}

    def _kinds(self) -> dict[str, Value]:
        """Return the Value of each value, by name. Models come first, since optimizers at servers copy their parameters."""
        kinds = {name: kind_of(getattr(self, name)) for name in self._names}
        return dict(sorted(kinds.items(), key=lambda item: not isinstance(item[1], Model)))


class TorchState(ObjectState):
    """Holds a model, an optimizer and other values that training continues from, as attributes; see ObjectState.

    model: a module. optimizer: of any kind. The residuals of error feedback of a DistributedOptimizer are saved too. If the
    number of ranks changes, they are redistributed as by load_state_dict(). values: as for ObjectState, and further models,
    optimizers and ElasticSamplers. If the number of ranks changes, the rest of a sampler's epoch is divided again.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **values)
