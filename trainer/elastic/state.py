"""What training goes on from: models, optimizers, samplers, random numbers and values, by Horovod's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gradwire.trainer.elastic.commits import Commits, Restored
from gradwire.trainer.elastic.kinds import Model, RandomNumbers, Value, are_replicas, kind_of, what_binds
from gradwire.trainer.elastic.memory import Memory
from gradwire.trainer.world.world import here, rank, size

_RANDOM = "random numbers"
"""What is kept beside the values, by a name that none of them can have."""


class HostsUpdatedInterrupt(RuntimeError):
    """Is raised where on_hosts_updated() was called: training is to stop here, and to go on with the ranks of then."""


class ObjectState:
    """Holds values that all ranks are to go on with, as attributes: commit() keeps them, restore() and sync() set them.

    values: numbers, strings, booleans, None and tensors, dicts, lists, tuples and sets of these, and objects with state_dict()
    and load_state_dict(), such as a schedule of learning rates or a GradScaler. Python's, NumPy's and torch's random numbers are
    kept with them, and are each rank's own.

    commit(), save(), restore() and sync() are collective.
    """

    def __init__(self, **values: Any) -> None:
        self._names = list(values)
        self._commits: Commits | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._is_updated = self._has_begun = self._agrees = False
        for name, value in values.items():
            if hasattr(type(self), name) or name.startswith("_"):
                raise ValueError(
                    f"{here()}a state has a method or attribute {name!r} already: give the value another name"
                )
            setattr(self, name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have functions called, in order, where training goes on after ranks were started again, perhaps with others: on all
        ranks, once the state is restored. They adapt what depends on the number of ranks, such as learning rates."""
        self._callbacks += callbacks

    def on_reset(self) -> None:
        """Call what register_reset_callbacks() was given."""
        for callback in self._callbacks:
            callback()

    def on_hosts_updated(self, *_: object) -> None:
        """Have this rank raise HostsUpdatedInterrupt at the next commit() or check_host_updates(); in a job in which processes
        stay, as by gradwire run --min-np, have all ranks raise it, after the same one. May be called by a handler of signals,
        such as that by which a scheduler announces the end of a host. Horovod's arguments are ignored."""
        self._is_updated = True

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt where on_hosts_updated() was called on this rank. In a job in which processes stay,
        collective, and raised on all ranks where any of them, or the launcher, wants other processes to take part."""
        self._stop_if(self.commits.ask_for_update() if self._agrees else self._take_update())

    def commit(self) -> None:
        """Save the state, and check for updates of hosts. Call it between steps, after the same ones on all ranks. In a job in
        which processes stay, an update is found by one commit, and raised by the next."""
        self.save()
        self._stop_if(self.commits.update_is_due if self._agrees else self._take_update())

    def _take_update(self) -> bool:
        """Return whether on_hosts_updated() was called since this was asked."""
        is_updated, self._is_updated = self._is_updated, False
        return is_updated

    def _stop_if(self, is_due: bool) -> None:
        if is_due:
            raise HostsUpdatedInterrupt(
                f"{here()}hosts were added or removed: training stops, to resume on the new hosts"
            )

    def save(self) -> None:
        """Keep the state as it is now, until the one after the next is kept.

        Raises TypeError for a value that cannot be kept; OSError where memory is short, after which what was kept before stands;
        CollectiveError.
        """
        shared, own = self._captured()
        self.commits.write(shared, own)

    def restore(self) -> None:
        """Go back to what all ranks have kept. Raises RuntimeError where there is none."""
        restored, faults = self.commits.restore()
        if restored is None:
            raise RuntimeError(f"{here()}there is no commit to restore{': ' if faults else ''}{'; '.join(faults)}")
        self.take(restored)

    def sync(self) -> None:
        """Give all ranks the state of rank 0, and keep it."""
        for name, kind in self._kinds().items():
            setattr(self, name, kind.sync())
        self.save()

    @property
    def has_begun(self) -> bool:
        """Return whether begin() was called."""
        return self._has_begun

    def begin(self, memory: Memory, is_update_wanted: Callable[[], bool] | None = None) -> None:
        """Have commits be kept in a memory from now on. Collective. is_update_wanted: where all ranks agree on updates of hosts,
        whether anything but this rank wants one; it is asked on another thread."""
        self._agrees = is_update_wanted is not None
        if is_update_wanted is None:
            self._commits = Commits(memory)
        else:
            self._commits = Commits(memory, lambda: self._take_update() or is_update_wanted())
        self._has_begun = True

    @property
    def commits(self) -> Commits:
        """Return where commits are kept: before begin(), in memory that ends with the process."""
        if self._commits is None:
            self._commits = Commits(Memory())
        return self._commits

    def unmovable(self) -> list[str]:
        """Return in words what of this state cannot go on in another world without its process being started again."""
        return [
            f"{name!r} is {reason}" for name in self._names if (reason := what_binds(getattr(self, name))) is not None
        ]

    def take(self, restored: Restored) -> None:
        """Go on from what was restored. A rank that did not exist then keeps its random numbers."""
        is_same_size = restored.size == size()
        kinds = self._kinds()
        if restored.rank == rank():
            kinds[_RANDOM] = RandomNumbers()
        for name, kind in kinds.items():
            also = [each[name] for each in restored.also]
            value = kind.take(restored.shared[name], restored.own[name], also, is_same_size=is_same_size)
            if name != _RANDOM:
                setattr(self, name, value)

    def _captured(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what all ranks have in common, and what is this rank's own."""
        kinds = self._kinds()
        replicas = are_replicas([kind.value for kind in kinds.values()])
        kinds[_RANDOM] = RandomNumbers()
        both = {name: kind.captured(are_replicas=replicas) for name, kind in kinds.items()}
        return {name: shared for name, (shared, _) in both.items()}, {name: own for name, (_, own) in both.items()}

    def _kinds(self) -> dict[str, Value]:
        """Return what keeps each value, by name: models first, since optimizers at servers copy their parameters."""
        kinds = {name: kind_of(getattr(self, name)) for name in self._names}
        return dict(sorted(kinds.items(), key=lambda item: not isinstance(item[1], Model)))


class TorchState(ObjectState):
    """Holds a model, an optimizer, and whatever else training is to go on with, as attributes: see ObjectState.

    model: a module. optimizer: one of any kind; of a DistributedOptimizer, the residuals of error feedback are kept, too, and on
    another number of ranks handed over as load_state_dict() does. values: those of ObjectState, more models and optimizers, and
    ElasticSamplers, of which on another number of ranks the rest of the epoch is divided anew.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **values)
