"""The plan of an exchange: which parameters share a bucket, agreed among ranks and adapted to the order in which gradients
arrive."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Communicator, cores
from gradwire.trainer.optimizers.wrapped import tensors_of
from gradwire.trainer.reducer.agreement import agree_on_parameters
from gradwire.trainer.reducer.bucket import Bucket
from gradwire.trainer.reducer.buffers import CodedBuffer, OperationChain
from gradwire.trainer.reducer.choice import Choice
from gradwire.trainer.reducer.compression import AUTO, Cast, Encoding
from gradwire.trainer.reducer.dtensors import held_here, shard_of
from gradwire.trainer.reducer.layout import (
    LARGE_BUCKET_BYTES,
    BucketPlan,
    Item,
    lay_out,
    plan_buckets,
)
from gradwire.trainer.reducer.plans import USUAL, ExchangePlan, limits
from gradwire.trainer.reducer.presence import Presence
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.reducer.sparse import SparseGradients, large_tables, of_sparse_modules
from gradwire.trainer.reducer.streams import gpus, synchronize
from gradwire.trainer.reducer.trials import PlanTrials, begin_trials

EXCHANGEABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_REMOVED = torch.empty(0, dtype=torch.float32, device="cpu")
"""Stands for a parameter that is no longer the optimizer's. Parameters are identified by their index, so it keeps its place."""

_kind_of = attrgetter("dtype", "device")
_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """Where the gradient of each parameter is exchanged: in a bucket, or in `sparse`. It never changes; another one replaces it.

    buckets: in the order in which they fill up. places: for each parameter in a bucket, by its index, the bucket and the slot.
    sparse: the sparse gradients. presence: which gradients the ranks have; its own message is exchanged after the buckets.
    operations: all that is exchanged, in the order in which all ranks begin it. is_chained: whether some operations depend on
    others. gpus: the GPUs of the gradients.
    """

    buckets: Sequence[Bucket]
    places: Mapping[int, tuple[Bucket, int]]
    sparse: SparseGradients
    presence: Presence
    operations: Sequence[OperationChain]
    is_chained: bool
    gpus: Sequence[torch.device]

    @classmethod
    def of(cls, buckets: Sequence[Bucket], sparse: SparseGradients, communicator: Communicator) -> BucketLayout:
        """Return the layout of these buckets."""
        places = {index: (bucket, slot) for bucket in buckets for slot, index in enumerate(bucket.items)}
        presence = Presence(buckets, communicator)
        operations = [*(each.buffer for each in buckets), *presence.buffers, *([sparse] if sparse.items else [])]
        is_chained = any(each.chained for each in operations)
        on_gpus = gpus([*(bucket.memory.device for bucket in buckets), *sparse.devices])
        return cls(buckets, places, sparse, presence, operations, is_chained, on_gpus)

    @property
    def coded(self) -> list[CodedBuffer]:
        """Return the buffers that codecs exchange."""
        return [bucket.coded for bucket in self.buckets if bucket.coded is not None]

    @property
    def indices(self) -> set[int]:
        """Return the parameters whose gradients are exchanged."""
        return self.places.keys() | set(self.sparse.items)


class BucketPlanner:
    """Makes the BucketLayouts of a Reducer. Parameters are identified by their index.

    At first, the buckets follow the reverse order of the parameters, in which backward usually reaches them. They are rebuilt
    once in the order in which gradients arrived on rank 0, and again when another plan is tried, and when parameters have been
    frozen, unfrozen or added.
    Parameters whose gradients are found to be sparse move from the buckets to `sparse`, and back if they are found to be dense.
    Large tables of embeddings with sparse=True begin in `sparse`.
    """

    def __init__(self, setup: Setup) -> None:
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self.encodings: list[Cast | Encoding] = []
        self.removed: set[int] = set()
        """Parameters that are no longer the optimizer's."""
        self.densified: set[int] = set()
        """Parameters whose gradients were sparse on a rank, and made dense since sparse_as_dense=True."""
        self.sparse_results: dict[int, Tensor] = {}
        """The last results of sparse gradients, even if the buckets have been rebuilt since."""
        self.is_learning = True
        """Whether learn() records the order in which gradients arrive in the next exchange."""
        self.choice: Choice | None = None
        self.trials: PlanTrials[ExchangePlan] | None = None
        """The choice of a plan by measured steps; None before the first agreed layout, and where plans are not tried."""
        self._setup = setup
        self._is_chosen: list[bool] = []
        self._is_stale = False
        self._exchanges_removed = False
        self._order: list[int] = []
        self._arrivals: list[int] | None = None
        self._exchanged: list[Tensor] = []  # in a bucket or in `sparse`
        self._others: list[Tensor] = []  # neither exchanged nor removed
        self._known_sparse: set[int] = set()
        self._searched: set[int] = set()

    def add(self, names: Sequence[str], parameters: Sequence[Tensor], layout: BucketLayout) -> list[int]:
        """Add parameters, for the next extended() or agreed(), and return their indices. One that was taken out of the optimizer
        and is put back before the next agreed() is still in its bucket, and gets its index back. Raises ValueError for dtypes
        that cannot be exchanged; frozen parameters may have any dtype."""
        named = zip(names, parameters, strict=True)
        _check_dtypes(
            self._setup.communicator.rank, ((name, parameter) for name, parameter in named if parameter.requires_grad)
        )
        policy = self._setup.policy
        index_of = {parameter: index for index, parameter in enumerate(self.parameters)}
        for name, parameter in zip(names, parameters, strict=True):
            held = held_here(parameter)
            encoding, is_chosen = policy.encoding(name, held), policy.is_chosen(name, held)
            index = index_of.setdefault(parameter, len(self.parameters))
            if index == len(self.parameters):
                self.names.append(name)
                self.parameters.append(parameter)
                self.encodings.append(encoding)
                self._is_chosen.append(is_chosen)
            elif name != self.names[index]:
                self._is_stale |= encoding != self.encodings[index]
                self.names[index], self.encodings[index], self._is_chosen[index] = name, encoding, is_chosen
        kept = set(tensors_of(self._setup.optimizer.param_groups))
        self.removed = {index for index, parameter in enumerate(self.parameters) if parameter not in kept}
        self.adopt(layout)
        return [index_of[parameter] for parameter in parameters]

    def adopt(self, layout: BucketLayout) -> None:
        """Note which parameters a layout exchanges."""
        laid_out = layout.indices
        others = set(range(len(self.parameters))) - laid_out - self.removed
        self._exchanged = [self.parameters[index] for index in laid_out]
        self._others = [self.parameters[index] for index in others]
        self._exchanges_removed = bool(laid_out & self.removed)

    def layout(self, buckets: Sequence[Bucket] = (), sparse: Sequence[int] = ()) -> BucketLayout:
        """Return the layout of these buckets, with the sparse gradients of some parameters."""
        return BucketLayout.of(buckets, self.sparse_gradients(sparse), self._setup.communicator)

    def sparse_gradients(self, items: Sequence[int], was_dense: bool | None = None) -> SparseGradients:
        """Return the object that exchanges the sparse gradients of some parameters. was_dense: see there."""
        return SparseGradients(
            self._setup,
            items,
            self.names,
            self.parameters,
            self.encodings,
            self.sparse_results,
            was_dense=was_dense,
        )

    def learn(self, arrivals: Iterable[int]) -> None:
        """Record the order in which gradients arrived; every rank calls this after every exchange. A call before the first
        layout sets the order in advance, so that the buckets are not rebuilt for it."""
        if self.is_learning:
            self._arrivals, self._is_stale, self.is_learning = list(arrivals), True, False

    def learn_sparse(self, sparse: Iterable[int], dense: Iterable[int]) -> None:
        """Record parameters whose gradients were found to be sparse in a bucket, or dense outside of one."""
        known = self._known_sparse.union(sparse).difference(dense)
        self._is_stale |= known != self._known_sparse
        self._known_sparse = known

    def follow_choice(self, layout: BucketLayout, step: int, *, counts: bool) -> None:
        """Let compression="auto" correct its choice by the times of the last exchange. Collective in some steps. step, counts:
        see Choice.follow()."""
        assert self.choice is not None
        synchronize(layout.gpus)  # only the steps that are measured wait
        exchange_s = sum(bucket.buffer.exchange_s for bucket in layout.buckets)
        self._is_stale |= self.choice.follow(step, exchange_s, counts=counts)

    @property
    def plan(self) -> ExchangePlan:
        """Return the plan of the next layout."""
        if isinstance(self._setup.plan, ExchangePlan):
            return self._setup.plan
        return USUAL if self.trials is None else self.trials.plan

    @property
    def settled_plan(self) -> ExchangePlan | None:
        """Return the plan once it stays; None before, and where plans are not tried."""
        is_tried = self.trials is not None and not self.trials.settled
        return None if is_tried or (self.trials is None and self._setup.plan is None) else self.plan

    def follow_trials(self, layout: BucketLayout, step: int, waited_s: float, *, counts: bool) -> None:
        """Let the trials of plans measure a step. Collective in some steps. waited_s: for which this rank has waited after
        backward(). See PlanTrials.follow()."""
        assert self.trials is not None
        hidden_s = 0.0  # where ranks fill the cores, an exchange beside backward() takes one from it
        if cores.suffice(self._setup.communicator.topology.local_size, 1 + torch.get_num_threads()):
            hidden_s = sum(bucket.buffer.exchange_s for bucket in layout.buckets) - waited_s
        self._is_stale |= self.trials.follow(layout, step, hidden_s, counts=counts)

    @property
    def is_due(self) -> bool:
        """Return whether agreed() would return another layout."""
        if self._is_stale or self._exchanges_removed:
            return True
        return not all(map(_requires_grad, self._exchanged)) or any(map(_requires_grad, self._others))

    @property
    def is_encoded(self) -> bool:
        """Return whether a codec encodes any parameter, or may do so: a checkpoint then contains the layout of the buckets."""
        may_be = self._setup.parameter_encoding is not None or self._setup.policy.auto is not None
        return may_be or any(isinstance(kind, Encoding) for kind in self.encodings)

    # Layouts

    def extended(self, layout: BucketLayout) -> BucketLayout | None:
        """Return the layout with more buckets, after the others, for parameters that require gradients only since the last
        agreed(), or have been moved to another dtype or device since; None if there are none. Sends nothing: if ranks differ in
        them, the exchange or the next agreed() raises an error."""
        buckets, sparse = layout.buckets, layout.sparse.items
        moved: list[Bucket] = []
        for bucket in buckets:
            if [*map(_kind_of, bucket.parameters)] != bucket.kinds:
                moved.append(bucket)
        if moved:
            self._is_stale = True
            order = [index for bucket in moved for index in bucket.items]
            stay = [bucket for bucket in buckets if bucket not in moved]
            buckets = [*stay, *self._made(order, stay)]
        if any(map(_requires_grad, self._others)):
            known = layout.indices
            newcomers = [index for index in reversed(self._trainable()) if index not in known]
            _check_dtypes(
                self._setup.communicator.rank, ((self.names[index], self.parameters[index]) for index in newcomers)
            )
            self._known_sparse |= self._sparse_among(self._new_tables(newcomers))
            dense = [index for index in newcomers if index not in self._known_sparse]
            sparse = [*sparse, *(index for index in newcomers if index in self._known_sparse)]
            self._order += dense
            buckets = [*buckets, *self._made(dense, buckets)]
            self.is_learning = True
        elif not moved:
            return None
        return self.layout(buckets, sparse)

    def agreed(self, layout: BucketLayout) -> BucketLayout:
        """Return the layout that replaces this one, the same on all ranks. Collective. Raises ValueError on all ranks if they
        have different parameters."""
        if self.choice is None and (auto := self._setup.policy.auto) is not None:
            self.choice = Choice(self._setup, auto, self.parameters[0].device.type if self.parameters else "cpu")
        trainable = self._trainable()
        self._is_stale = False
        if self.choice is not None:
            self.choice.sizes.clear()
        _check_dtypes(
            self._setup.communicator.rank, ((self.names[index], self.parameters[index]) for index in trainable)
        )
        known = dict.fromkeys([*(self._arrivals or ()), *self._order, *reversed(trainable)])
        self.is_learning = not layout.indices | set(self._arrivals or ()) >= set(trainable)
        self._arrivals = None
        wanted = set(trainable)
        index_of = {self.names[index]: index for index in known if index in wanted}
        parameters = [self.parameters[index] for index in index_of.values()]
        communicator = self._setup.communicator
        agreed = [index_of[name] for name in agree_on_parameters(communicator, list(index_of), parameters)]
        if tables := self._new_tables(agreed):
            expected = sorted(self.names[index] for index in self._sparse_among(tables))
            everyones = map(set, communicator.allgather_record(expected))
            self._known_sparse |= {index_of[name] for name in set.intersection(*everyones)}
        self._order = [index for index in agreed if index not in self._known_sparse]
        if self.trials is None:
            held = [held_here(self.parameters[index]) for index in self._order]
            self.trials = begin_trials(self._setup, held, [self.encodings[index] for index in self._order])
        return self.layout(self._made(self._order), [index for index in agreed if index in self._known_sparse])

    def release_removed(self) -> None:
        """Release the memory of parameters that are no longer the optimizer's."""
        for index in self.removed:
            self.parameters[index] = _REMOVED
            self.sparse_results.pop(index, None)

    def _trainable(self) -> list[int]:
        parameters, removed = self.parameters, self.removed
        return [index for index in range(len(parameters)) if parameters[index].requires_grad and index not in removed]

    def _new_tables(self, trainable: Sequence[int]) -> dict[Tensor, int]:
        """Return the parameters that may be large tables with sparse gradients, without those of earlier calls."""
        new = {self.parameters[index]: index for index in trainable if index not in self._searched}
        self._searched.update(trainable)
        needs_dense = self._setup.sparse_as_dense or self._setup.in_shares
        return {} if needs_dense else {table: new[table] for table in large_tables(new)}

    def _sparse_among(self, tables: dict[Tensor, int]) -> set[int]:
        """Return the tables whose modules say that their gradients are sparse."""
        return {tables[table] for table in of_sparse_modules(tables)} if tables else set()

    def _items(self, encodings: Sequence[Hashable]) -> list[Item]:
        items = []
        _, planned = limits(self.plan)
        for parameter, code in zip(self.parameters, encodings, strict=True):
            held, group = held_here(parameter), self._setup.groups.get(parameter)
            kind = (held.dtype, held.device, code, group)
            is_planned = isinstance(self._setup.plan, ExchangePlan) or (held.is_cpu and isinstance(code, Cast))
            most = planned if is_planned else LARGE_BUCKET_BYTES
            items.append(Item(held.numel(), held.element_size(), kind, most, grouped=group is not None))
        return items

    def _made(self, order: Sequence[int], beside: Sequence[Bucket] = ()) -> list[Bucket]:
        """Return new buckets for parameters in this order. beside: the other buckets of the layout, whose numbers differ, so that
        no two have the same seed of stochastic rounding."""
        self._choose(order)
        first_bytes, _ = limits(self.plan)
        plans = plan_buckets(self._items(self.encodings), order, first_bucket_bytes=first_bytes)
        first = 1 + max((bucket.number for bucket in beside), default=-1)
        return [self._bucket(plan, number) for number, plan in enumerate(plans, first)]

    def _choose(self, order: Sequence[int]) -> None:
        """Choose the encodings of the parameters that the policy leaves to predictions, for the buckets that they would fill
        together. Parameters with the same choice are then laid out as if the user had given that encoding."""
        if self.choice is None:
            return
        pairs = zip(self._is_chosen, self.encodings, strict=True)
        for plan in plan_buckets(self._items([AUTO if is_chosen else kind for is_chosen, kind in pairs]), order):
            if self._is_chosen[plan.items[0]]:
                size = plan.presence_offset, held_here(self.parameters[plan.items[0]]).dtype
                kind = self.choice.choose(size)
                for index in plan.items:
                    self.encodings[index] = kind

    def _bucket(self, plan: BucketPlan, number: int) -> Bucket:
        kind = self.encodings[plan.items[0]]
        return Bucket(self._setup, plan, self.names, self.parameters, kind, number, self.densified)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the parameters, and what is being learned about it."""
        return {"order": list(self._order), "learning": self.is_learning, "arrivals": self._arrivals}

    def restored(self, saved: Sequence[dict[str, Any]]) -> list[Bucket] | None:
        """Return saved buckets with their state; None if parameters, codecs or ranks differ from the saved ones."""
        items = self._items(self.encodings)
        for members in (entry["parameters"] for entry in saved):
            if max(members) >= len(items) or len({items[index].kind for index in members}) > 1:
                return None
        buckets = [self._bucket(lay_out(items, entry["parameters"]), number) for number, entry in enumerate(saved)]
        for buffer, entry in zip((bucket.coded for bucket in buckets), saved, strict=True):
            if (buffer is not None) != ("tensors" in entry) or not (buffer is None or buffer.load_state_dict(entry)):
                return None
        return buckets

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state_dict(), which is part of that of the Reducer."""
        self._order, self.is_learning, self._arrivals = list(state["order"]), state["learning"], state["arrivals"]
        self._is_stale |= self._arrivals is not None
        self._known_sparse = set(state.get("sparse", ()))

    def described(self) -> list[tuple[Any, ...]]:
        """Return the name of every parameter and the shape of this rank's part; of a sharded parameter also shard_of()."""
        named = zip(self.names, self.parameters, strict=True)
        return [(name, tuple(held_here(p).shape), *filter(None, [shard_of(p)])) for name, p in named]


def _check_dtypes(rank: int, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for a parameter of a dtype that cannot be exchanged."""
    for name, parameter in named:
        if parameter.dtype not in EXCHANGEABLE_DTYPES:
            raise ValueError(
                f"rank {rank}: parameter {name!r} has dtype {parameter.dtype}; gradients can be exchanged for "
                f"{', '.join(map(str, EXCHANGEABLE_DTYPES))}"
            )
