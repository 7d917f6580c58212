"""BatchShares: a batch sampler that divides each global batch among the ranks by their measured speed."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import Sampler

from gradwire.collectives import PeerJoined
from gradwire.collectives.errors import by_value, ranks_text
from gradwire.collectives.torch_internals import runs_hooks
from gradwire.trainer.checkpoint import on_all_ranks
from gradwire.trainer.division import Cost, Speed, better, change_text, check_bounds, divide
from gradwire.trainer.optimizer import DistributedOptimizer
from gradwire.trainer.reducer.agreement import check_settings
from gradwire.trainer.reducer.arguments import Average
from gradwire.trainer.reducer.own_times import OwnTimes
from gradwire.trainer.world.joined import World
from gradwire.trainer.world.world import NotInitialized, current_world, elastic_worker, names_rank

_log = logging.getLogger("gradwire")


class BatchShares(Sampler[list[int]]):
    """Yields this rank's part of each global batch: DataLoader(dataset, batch_sampler=hvd.BatchShares(dataset, ...)), and not
    sampler=, with which a DataLoader takes each part for one sample.

    The global batches of an epoch are the same for all shares and all numbers of ranks. Each rank gets a part of each batch, and
    all ranks together get every sample once an epoch. The parts differ in size, so call optimizer.weigh(len(batch)) before
    backward(), which weighs the average of the gradients by it. docs/guides/machines-that-differ.md is the guide. With optimizer=
    and op=Average, a step that uses different parts without weigh() raises ValueError on all ranks.

    Without shares=, the parts are equal at first. After each `every` steps, the ranks exchange the times of their own computing,
    without their waits for other ranks. If other parts shorten the predicted step of the slowest rank by more than 3 %, the parts
    change, from a batch on that no rank's DataLoader has fetched yet. If measurements then show that the parts do not help, they
    are equal again. Rank 0 logs each change at level info.

    The last batch holds the rest of the samples. It is divided in the same ratios, with at least one sample for each rank,
    whatever the bounds. If it had fewer samples than there are ranks, its samples are added to the batch before.

    Each step of the optimizer uses backward_passes_per_step batches. `position` counts the batches of this epoch that steps have
    used, for state_dict(). If steps use other numbers, as GradScaler does when it skips a step, set it before state_dict().

    dataset: anything with a length, the same on all ranks.
    global_batch: the number of samples of a batch on all ranks together.
    optimizer: a DistributedOptimizer of all ranks, whose steps are measured and counted. Measuring needs the default rule or
    rules.Sharded. Not needed with shares=, except for state_dict().
    shares: relative numbers by rank, such as [3, 1], by which batches are divided from first to last; None: measured.
    least, most: the smallest and largest number of samples of a rank; most=None: any.
    every: the number of steps from one exchange of measurements to the next.
    shuffle: whether the order of the samples is random. It depends on seed and epoch, and is the same on all ranks.
    drop_last: whether to leave out a last batch of less than global_batch samples.

    In an elastic job, make it a value of the state. global_batch remains when the number of ranks changes. The parts are equal
    again then. Raises ValueError on all ranks if the bounds do not allow that, and with shares=.

    The constructor is collective. Raises ValueError on all ranks if arguments are invalid on any rank or differ between ranks.
    """

    @names_rank
    def __init__(
        self,
        dataset: Sized,
        global_batch: int,
        *,
        optimizer: DistributedOptimizer | None = None,
        shares: Sequence[float] | None = None,
        least: int = 1,
        most: int | None = None,
        every: int = 20,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset, self.global_batch, self.optimizer = dataset, global_batch, optimizer
        self.least, self.most, self.every = least, most, every
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = self.position = 0
        self._given = shares
        self._by_hand: list[float] | None = None
        self._first = 0  # the first batch of this epoch to be yielded
        self._taken: deque[list[int]] = deque()  # the parts of the batches that are yielded, and not used by a step yet
        self._next = 0  # the batch after the last one that is yielded
        self._changes: list[tuple[int, list[int]]]  # batches of this epoch, and the parts from there on
        self._world: World
        self._connect()
        self._hook = None if optimizer is None else optimizer.register_step_post_hook(self._after_step)

    @property
    def shares(self) -> list[int]:
        """Return how many samples of the next step's batch each rank has; those of a last batch may be fewer."""
        return list(self._parts_at(self.position))

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, which decides the order of the samples. The epoch of load_state_dict() begins at its position."""
        if epoch != self.epoch:
            self.epoch, self.position, self._first = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, how many of its batches steps have used, and the shares; the same on all ranks. Raises RuntimeError
        without optimizer=: a DataLoader fetches batches ahead of the steps, so their number cannot be known."""
        if self.optimizer is None:
            raise RuntimeError(
                f"rank {self._world.rank}: BatchShares counts batches by the steps of the optimizer: give optimizer="
            )
        shares = self._changes[-1][1]
        return {"epoch": self.epoch, "position": self.position, "shares": list(shares), **self._samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state that state_dict() returned on any rank. Collective. With another number of ranks, parts are
        equal at first. Raises ValueError on all ranks if the states differ between ranks, or are of other samples or batches."""
        if current_world() is not self._world:
            self._connect()
        communicator = current_world().communicator()
        on_all_ranks(communicator, lambda: self._check_state(state_dict))
        check_settings(communicator, "state of BatchShares", {name: str(each) for name, each in state_dict.items()})
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]
        self._first, shares = self.position, state_dict["shares"]
        within = min(shares) >= self.least and (self.most is None or max(shares) <= self.most)
        is_possible = within and len(shares) == self._world.size
        self._restart(shares if is_possible and self._by_hand is None else None)

    def close(self) -> None:
        """Stop counting and measuring steps. Call it on all ranks, after the same step."""
        if self._hook is not None:
            self._hook.remove()

    def __iter__(self) -> Iterator[list[int]]:
        first, count = self._first, self._count
        self.position = self._next = first
        self._changes = [(0, self._changes[-1][1])]
        self._taken.clear()
        order = self._order()
        for number in range(first, count):
            begin = number * self.global_batch
            end = len(order) if number == count - 1 and not self.drop_last else begin + self.global_batch
            parts = self._parts_at(number)
            if end - begin != self.global_batch:
                parts = divide(end - begin, [Cost(0.0, 1 / part) for part in parts])
            begin += sum(parts[: self._world.rank])
            batch = order[begin : begin + parts[self._world.rank]].tolist()
            self._taken.append(parts)
            self._next = number + 1
            yield batch
        self._first = 0

    def __len__(self) -> int:
        """Return the number of batches of the epoch that are to be yielded."""
        return self._count - self._first

    @property
    def _samples(self) -> dict[str, Any]:
        """Return what decides which samples are in which batch."""
        names = ("global_batch", "shuffle", "seed", "drop_last")
        return {"samples": len(self.dataset), **{name: getattr(self, name) for name in names}}

    @property
    def _count(self) -> int:
        """Return the number of batches of an epoch."""
        whole, rest = divmod(len(self.dataset), self.global_batch)
        return whole + (rest >= self._world.size and not self.drop_last)

    def _order(self) -> torch.Tensor:
        """Return the samples of the epoch in order."""
        if not self.shuffle:
            return torch.arange(len(self.dataset), dtype=torch.int64, device="cpu")
        generator = torch.Generator(device="cpu").manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.dataset), generator=generator, dtype=torch.int64, device="cpu")

    def _parts_at(self, number: int) -> list[int]:
        """Return the parts of the ranks in a batch of this epoch. A later change counts first."""
        return next(parts for begin, parts in reversed(self._changes) if begin <= number)

    # What depends on the ranks

    def _connect(self) -> None:
        """Check the arguments, and connect to the ranks of the present world. Collective."""
        try:
            world, worker = current_world(), elastic_worker()
        except NotInitialized as error:
            raise NotInitialized(
                "BatchShares needs the number of ranks: call hvd.init() first, also with DDP"
            ) from error
        # A process that joins an elastic job later is alone until the job takes it in, and must not fail before.
        is_alone = world.size == 1 and worker is not None and worker.is_late
        faults = enumerate(world.communicator().allgather_record(self._fault(world.size, is_alone=is_alone)))
        if wrong := by_value({rank: fault for rank, fault in faults if fault}):
            raise ValueError(
                "BatchShares: " + "; ".join(f"{fault} (on {ranks_text(of)})" for fault, of in wrong.items())
            )
        given = {"shares": self._by_hand, "least": self.least, "most": self.most, "every": self.every}
        settings = {name: str(each) for name, each in {**self._samples, **given}.items()}
        check_settings(
            world.communicator(), "BatchShares", settings | {"optimizer": str(type(self.optimizer).__name__)}
        )
        self._world = world
        self._restart(None)

    def _fault(self, size: int, *, is_alone: bool) -> str:
        """Return what is wrong with the arguments in a world of this size; an empty text if nothing is."""
        try:
            self._check(size, is_alone=is_alone)
        except Exception as error:  # the other ranks would wait for this one
            return f"{type(error).__name__}: {error}"
        return ""

    def _check(self, size: int, *, is_alone: bool) -> None:
        """Raise ValueError or TypeError for invalid arguments in a world of this size."""
        self._by_hand = None if self._given is None else list(self._given)
        for name in ("global_batch", "least", "every", "most"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name == "most" and value is None):
                raise ValueError(f"{name} must be a whole number >= 1, not {value!r}")
        if self.optimizer is None and self._by_hand is None:
            raise ValueError("give optimizer=, whose steps are measured, or shares=")
        if self.optimizer is not None:
            self._check_optimizer(self.optimizer, size)
        if is_alone:
            return
        if len(self.dataset) < size:
            raise ValueError(f"the dataset has {len(self.dataset)} samples, fewer than there are ranks ({size})")
        check_bounds(self.global_batch, size, self.least, self.most)
        if self._by_hand is not None:
            valid = all(isinstance(each, int | float) and each > 0 and math.isfinite(each) for each in self._by_hand)
            if not valid or len(self._by_hand) != size:
                raise ValueError(f"shares must be {size} finite numbers > 0, one for each rank, not {self._by_hand!r}")

    def _check_optimizer(self, optimizer: Any, size: int) -> None:
        if not isinstance(optimizer, DistributedOptimizer):
            kind = type(optimizer).__name__
            raise TypeError(
                f"optimizer must be a DistributedOptimizer, not {kind}: with DDP, give shares= without optimizer="
            )
        if optimizer.communicator.size != size:
            raise ValueError(f"optimizer must be of all {size} ranks, not of {optimizer.communicator.size}")
        if not runs_hooks(optimizer.optimizer):
            raise ValueError(f"step() of {type(optimizer.optimizer).__name__} does not run torch's hooks")
        if self._by_hand is None and optimizer.rule.times is None:
            raise ValueError(
                f"{type(optimizer.rule).__name__} does not measure the ranks' own computing in each step: give shares="
            )

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless a state is of these samples and batches."""
        for name, own in self._samples.items():
            if state.get(name) != own:
                raise ValueError(f"BatchShares has {name}={own!r}, and the state {state.get(name)!r}")
        for name, kind in (("epoch", int), ("position", int), ("shares", list)):
            if type(state.get(name)) is not kind:
                raise ValueError(f"{name!r} is {state.get(name)!r}")
        if not 0 <= state["position"] <= -(-len(self.dataset) // self.global_batch):
            raise ValueError(f"'position' is {state['position']!r}")
        shares = state["shares"]
        if not all(type(each) is int and each > 0 for each in shares) or sum(shares) != self.global_batch:
            raise ValueError(f"'shares' is {shares!r}")

    def _restart(self, parts: list[int] | None) -> None:
        """Measure steps from now on. parts: of the ranks; None for those by hand, or equal ones."""
        size = self._world.size
        weights = self._by_hand or [1.0] * size
        if parts is None:  # fewer ranks than weights, or bounds that cannot hold, only while this process is alone
            bounds = (self.least, self.most) if size > 1 else (1, None)
            parts = divide(self.global_batch, [Cost(0.0, 1 / weight) for weight in weights[:size]], *bounds)
        self._changes = [(0, parts)]
        self._next = 0
        self._taken.clear()
        self._speeds = [Speed() for _ in range(size)]
        self._own_times: OwnTimes | None = None
        if self._by_hand is None and self.optimizer is not None and size > 1:
            self._own_times = OwnTimes(self.optimizer.rule.times)

    # What follows a step

    def _after_step(self, *_: object) -> None:
        """Count the batches of a step, and measure it. Collective after each `every` steps. Raises ValueError on all ranks if
        different parts were averaged without weights."""
        assert self.optimizer is not None
        passes, rule = self.optimizer.backward_passes_per_step, self.optimizer.rule
        taken = [self._taken.popleft() for _ in range(min(passes, len(self._taken)))]
        self.position += len(taken)
        uneven = next((parts for parts in taken if len(set(parts)) > 1), None)
        if uneven is not None and rule.setup.op == Average and not rule.weighs:
            raise ValueError(
                f"rank {self._world.rank}: this step averaged the gradients of {uneven} samples, one number for each rank, with "
                "equal weights: call optimizer.weigh(len(batch)) before each backward(), or use op=hvd.Sum"
            )
        samples = [parts[self._world.rank] for parts in taken]
        if self._own_times is not None:
            self._own_times.record(sum(samples) // len(samples) if samples else 0)
            if (self.optimizer.steps + 1) % self.every == 0:  # join() makes steps equal
                with suppress(PeerJoined):  # a joined rank has no batch
                    self._exchange(self._own_times)

    def _exchange(self, own_times: OwnTimes) -> None:
        """Exchange the times of the last steps, and change the parts if that is worth it. Collective. Raises ValueError on all
        ranks if they are at different batches."""
        communicator = self._world.communicator()
        place = f"epoch {self.epoch}, batch {self.position}"
        everyones = communicator.allgather_record([self._next, list(own_times.medians().items()), place])
        if any(theirs != place for *_, theirs in everyones):
            places = "; ".join(f"{theirs} on rank {rank}" for rank, (*_, theirs) in enumerate(everyones))
            raise ValueError(f"rank {self._world.rank}: the ranks use different batches of BatchShares: {places}")
        for speed, (_, theirs, _) in zip(self._speeds, everyones, strict=True):
            speed.measured(dict(theirs))
        costs = [cost for speed in self._speeds if (cost := speed.cost) is not None]
        found, parts = None, self._changes[-1][1]
        if self._world.rank == 0 and len(costs) == self._world.size:  # rank 0 decides: processors may round differently
            found = better(parts, costs, self.least, self.most)
        found = communicator.allgather_record(found)[0]
        if found is None:
            return
        begin = max(number for number, *_ in everyones)
        self._changes.append((begin, found))
        if self._world.rank == 0:
            change = f"{change_text(parts, found, costs)}, from batch {begin} of epoch {self.epoch} on"
            _log.info("gradwire: the ranks' parts of a batch change %s", change)
