"""The assignment of parameters to buckets, agreed among ranks and adapted to the order in which gradients arrive."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.trainer.optimizers.wrapped import tensors_of
from gradwire.trainer.reducer.agreement import agree_on_parameters
from gradwire.trainer.reducer.bucket import Bucket, presence_of
from gradwire.trainer.reducer.buffers import CodedBuffer, Exported, PlainBuffer
from gradwire.trainer.reducer.choice import Choice
from gradwire.trainer.reducer.compression import AUTO, Cast, Encoding
from gradwire.trainer.reducer.dtensors import held_here, shard_of
from gradwire.trainer.reducer.layout import (
    LARGE_BUCKET_BYTES,
    SMALL_BUCKET_BYTES,
    BucketPlan,
    Item,
    lay_out,
    plan_buckets,
)
from gradwire.trainer.reducer.residuals import Residuals
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.reducer.sparse import SparseGradients, large_tables, of_sparse_modules
from gradwire.trainer.world.world import here

EXCHANGEABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_REMOVED = torch.empty(0, dtype=torch.float32, device="cpu")
"""Stands for a parameter that is no longer the optimizer's. Parameters are identified by their index, so it keeps its place."""

_requires_grad = operator.attrgetter("requires_grad")


class Bucketing:
    """Holds the buckets of the parameters that require gradients. Parameters are identified by their index.

    At first, the buckets follow the reverse order of the parameters, in which backward usually reaches them. They are rebuilt
    once in the order in which gradients arrived on rank 0, and again when parameters have been frozen, unfrozen or added. The
    residuals of old buckets move to the new ones; the residuals of a frozen parameter wait until it is unfrozen. Parameters
    whose gradients are found to be sparse move from the buckets to `sparse`, and back if they are found to be dense. Large tables
    of embeddings with sparse=True begin in `sparse`.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._combination = setup
        self.names: list[str] = []
        self._encodings: list[Cast | Encoding] = []
        self._is_chosen: list[bool] = []
        self._choice: Choice | None = None
        self._is_stale = False
        self.residuals = Residuals()
        """Of the parameters that have no buffer with error feedback at the moment."""
        self._order: list[int] = []
        self._arrivals: list[int] | None = None
        self.removed: set[int] = set()
        """Parameters that are no longer the optimizer's."""
        self._exchanged: list[Tensor] = []  # in a bucket or in `sparse`
        self._others: list[Tensor] = []  # neither exchanged nor removed
        self.is_learning = True
        """Whether learn() records the order in which gradients arrive in the next exchange."""
        self.known_sparse: set[int] = set()
        """Parameters whose gradients are known to be sparse; the next update() moves them out of their buckets, or back."""
        self._searched: set[int] = set()
        self.densified: set[int] = set()
        """Parameters whose gradients were sparse on a rank, and made dense since sparse_as_dense=True."""
        self.parameters: list[Tensor] = []
        self.buckets: list[Bucket] = []
        self.places: dict[int, tuple[int, int]] = {}
        """For each parameter in a bucket: the index of its bucket, and its slot there."""
        self.presence: list[PlainBuffer] = []
        """Buffers to exchange after the buckets."""
        self._sparse_results: dict[
            int, Tensor
        ] = {}  # by parameter: the last one, even if the buckets have been rebuilt since
        self.sparse = self.sparse_gradients(())
        """Sparse gradients to exchange after `presence`."""

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Add parameters, for the next extend() or update(). Raises ValueError for dtypes that cannot be exchanged; frozen
        parameters may have any dtype."""
        named = zip(names, parameters, strict=True)
        _check_dtypes((name, parameter) for name, parameter in named if parameter.requires_grad)
        self.names += names
        policy = self._setup.policy
        for name, parameter in zip(names, map(held_here, parameters), strict=True):
            self._encodings.append(policy.encoding(name, parameter))
            self._is_chosen.append(policy.is_chosen(name, parameter))
        self.parameters += parameters
        kept = set(tensors_of(self._setup.optimizer.param_groups))
        self.removed = {index for index, parameter in enumerate(self.parameters) if parameter not in kept}
        self._note_exchanged()

    def _note_exchanged(self) -> None:
        """Record which parameters are exchanged, when that has changed: so is_due and extend() have little to do in a step."""
        laid_out = self._laid_out()
        others = [index for index in range(len(self.parameters)) if index not in laid_out and index not in self.removed]
        self._exchanged = [self.parameters[index] for index in laid_out]
        self._others = [self.parameters[index] for index in others]
        self._is_stale |= bool(laid_out & self.removed)

    @property
    def is_encoded(self) -> bool:
        """Return whether a codec encodes any parameter, or may do so: a checkpoint then contains the layout of the buckets."""
        may_be = self._setup.returning is not None or self._setup.policy.auto is not None
        return may_be or any(isinstance(kind, Encoding) for kind in self._encodings)

    @property
    def coded(self) -> list[CodedBuffer]:
        """Return the buffers that codecs exchange."""
        return [bucket.coded for bucket in self.buckets if bucket.coded is not None]

    def learn(self, arrivals: Iterable[int]) -> None:
        """Record the order in which gradients arrived; every rank calls this after every exchange. A call before the first
        update() sets the order in advance, so that the buckets are not rebuilt for it."""
        if self.is_learning:
            self._arrivals = list(arrivals)
            self.is_learning = False

    @property
    def is_due(self) -> bool:
        """Return whether update() would rebuild the buckets."""
        in_buckets = self.known_sparse & self.places.keys() or set(self.sparse.items) - self.known_sparse
        if self._is_stale or self._arrivals is not None or in_buckets:
            return True
        return not all(map(_requires_grad, self._exchanged)) or any(map(_requires_grad, self._others))

    def sparse_gradients(self, items: Sequence[int]) -> SparseGradients:
        """Return the object that exchanges the sparse gradients of some parameters."""
        return SparseGradients(
            self._combination, items, self.names, self.parameters, self._encodings, self._sparse_results
        )

    def extend(self) -> None:
        """Add buckets, after the others, for parameters that require gradients only since the last update(), or have been
        moved to another dtype or device since. Sends nothing: if ranks differ in them, the exchange or the next update() raises
        an error."""
        moved = [bucket for bucket in self.buckets if bucket.is_moved]
        if moved:
            self._is_stale = True
            for coded in filter(None, (bucket.coded for bucket in moved)):
                self.residuals.export_local(coded)
            order = [index for bucket in moved for index in bucket.items]
            stays = [bucket for bucket in self.buckets if bucket not in moved]
            self._replace([*stays, *self._made(order, len(self.buckets))])
        if any(map(_requires_grad, self._others)):
            known = self._laid_out()
            newcomers = [index for index in reversed(self._trainable()) if index not in known]
            _check_dtypes((self.names[index], self.parameters[index]) for index in newcomers)
            self.known_sparse |= self._sparse_among(self._new_tables(newcomers))
            tables = [index for index in newcomers if index in self.known_sparse]
            self.sparse = self.sparse_gradients([*self.sparse.items, *tables])
            newcomers = [index for index in newcomers if index not in self.known_sparse]
            self._order += newcomers
            self._take_in(self._made(newcomers, len(self.buckets)))
            self._note_exchanged()
            self.is_learning = True

    def _new_tables(self, trainable: Sequence[int]) -> dict[Tensor, int]:
        """Return the parameters that may be large tables with sparse gradients, without those of earlier calls."""
        new = {self.parameters[index]: index for index in trainable if index not in self._searched}
        self._searched.update(trainable)
        needs_dense = self._setup.sparse_as_dense or self._combination.in_shares
        return {} if needs_dense else {table: new[table] for table in large_tables(new)}

    def _sparse_among(self, tables: dict[Tensor, int]) -> set[int]:
        """Return the tables whose modules say that their gradients are sparse."""
        return {tables[table] for table in of_sparse_modules(tables)} if tables else set()

    def update(self) -> None:
        """Rebuild the buckets if that is due, and move the gradients into them. Collective when due.

        Raises ValueError on all ranks if they have different parameters.
        """
        if self._choice is None and (auto := self._setup.policy.auto) is not None:
            self._choice = Choice(self._combination, auto, self.parameters[0].device.type if self.parameters else "cpu")
        if not self.is_due:
            return
        trainable = self._trainable()
        self._is_stale = False
        if self._choice is not None:
            self._choice.sizes.clear()
        _check_dtypes((self.names[index], self.parameters[index]) for index in trainable)
        known = dict.fromkeys([*(self._arrivals or ()), *self._order, *reversed(trainable)])
        self.is_learning = not self._laid_out() | set(self._arrivals or ()) >= set(trainable)
        self._arrivals = None
        wanted = set(trainable)
        index_of = {self.names[index]: index for index in known if index in wanted}
        parameters = [self.parameters[index] for index in index_of.values()]
        names = agree_on_parameters(self._combination.communicator, list(index_of), parameters)
        agreed = [index_of[name] for name in names]
        if tables := self._new_tables(agreed):
            expected = sorted(self.names[index] for index in self._sparse_among(tables))
            everyones = map(set, self._combination.communicator.allgather_record(expected))
            self.known_sparse |= {index_of[name] for name in set.intersection(*everyones)}
        dense = [index for index in self.sparse.items if index not in self.known_sparse]
        self._order = [index for index in agreed if index not in self.known_sparse]
        self.sparse = self.sparse_gradients([index for index in agreed if index in self.known_sparse])
        for buffer in self.coded:
            self.residuals.export(buffer)
        self._replace(self._made(self._order))
        self._release_removed()
        self._note_exchanged()
        for index in dense:
            result = self._sparse_results.pop(index, None)
            if result is not None and result is self.parameters[index].grad:
                number, slot = self.places[index]
                self.buckets[number].collect([slot])

    def _release_removed(self) -> None:
        """Release the memory of parameters that are no longer the optimizer's."""
        for index in self.removed:
            self.parameters[index] = _REMOVED
            self._sparse_results.pop(index, None)
        self.residuals.discard(self.removed)

    def follow(self, step: int, *, counts: bool) -> None:
        """Correct the choice of codecs by the time of the last step; the next update() applies the correction. Collective in
        some steps. step: the number of earlier exchanges. counts: see Choice.follow()."""
        if self._choice is not None:
            exchange_s = sum(bucket.buffer.seconds for bucket in self.buckets)
            self._is_stale |= self._choice.follow(step, exchange_s, counts=counts)

    def _replace(self, buckets: list[Bucket]) -> None:
        """Replace the buckets with these, and move the gradients."""
        before = {index: (self.buckets[number], slot) for index, (number, slot) in self.places.items()}
        self.buckets, self.places = [], {}
        self._take_in(buckets)
        for index in self.places.keys() & before:
            number, slot = self.places[index]
            if self.buckets[number] is not before[index][0]:
                self.buckets[number].take_over(slot, *before[index])

    def _laid_out(self) -> set[int]:
        """Return the parameters whose gradients are exchanged."""
        return self.places.keys() | set(self.sparse.items)

    def _trainable(self) -> list[int]:
        parameters, removed = self.parameters, self.removed
        return [index for index in range(len(parameters)) if parameters[index].requires_grad and index not in removed]

    def _items(self, encodings: Sequence[Hashable]) -> list[Item]:
        items = []
        for parameter, code in zip(self.parameters, encodings, strict=True):
            held, group = held_here(parameter), self._setup.groups.get(parameter)
            kind = (held.dtype, held.device, code, group)
            is_small = held.is_cpu and isinstance(code, Cast)
            most = self._setup.bucket_bytes or (SMALL_BUCKET_BYTES if is_small else LARGE_BUCKET_BYTES)
            items.append(Item(held.numel(), held.element_size(), kind, most, grouped=group is not None))
        return items

    def _made(self, order: Sequence[int], first_number: int = 0) -> list[Bucket]:
        """Return new buckets for parameters in this order."""
        self._choose(order)
        plans = self._plans(order, self._encodings)
        return [self._bucket(plan, number) for number, plan in enumerate(plans, first_number)]

    def _plans(self, order: Sequence[int], encodings: Sequence[Hashable]) -> tuple[BucketPlan, ...]:
        return plan_buckets(self._items(encodings), order)

    def _choose(self, order: Sequence[int]) -> None:
        """Choose the encodings of the parameters that the policy leaves to predictions, for the buckets that they would fill
        together. Parameters with the same choice are then laid out as if the user had given that encoding."""
        if self._choice is None:
            return
        pairs = zip(self._is_chosen, self._encodings, strict=True)
        for plan in self._plans(order, [AUTO if is_chosen else kind for is_chosen, kind in pairs]):
            if self._is_chosen[plan.items[0]]:
                size = plan.presence_offset, held_here(self.parameters[plan.items[0]]).dtype
                kind = self._choice.choose(size)
                for index in plan.items:
                    self._encodings[index] = kind

    def _bucket(self, plan: BucketPlan, number: int) -> Bucket:
        return Bucket(
            self._setup, plan, self.names, self.parameters, self._encodings[plan.items[0]], number, self.densified
        )

    def _take_in(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets, with the exported residuals of their parameters."""
        for bucket in buckets:
            self.places |= {index: (len(self.buckets), slot) for slot, index in enumerate(bucket.items)}
            self.buckets.append(bucket)
        self.presence = presence_of(self.buckets, self._combination.communicator)
        self._import_residuals()

    def _import_residuals(self) -> None:
        for buffer in self.coded:
            self.residuals.import_into(buffer)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next exchanges need, beside the parameters and the optimizer."""
        return {
            "order": list(self._order),
            "learning": self.is_learning,
            "arrivals": self._arrivals,
            "sparse": list(self.sparse.items),
            "buckets": [
                {"parameters": list(bucket.items)} if bucket.coded is None else bucket.coded.state_dict()
                for bucket in self.buckets
            ],
            "waiting": dict(self.residuals.exported),
        }

    def restored(self, state: dict[str, Any]) -> list[Bucket] | None:
        """Return saved buckets with their state, for restore(); None if parameters, codecs or ranks differ from the saved
        ones."""
        items, saved = self._items(self._encodings), state["buckets"]
        for members in (entry["parameters"] for entry in saved):
            if max(members) >= len(items) or len({items[index].kind for index in members}) > 1:
                return None
        buckets = [self._bucket(lay_out(items, entry["parameters"]), number) for number, entry in enumerate(saved)]
        for buffer, entry in zip((bucket.coded for bucket in buckets), saved, strict=True):
            if (buffer is not None) != ("tensors" in entry) or not (buffer is None or buffer.load_state_dict(entry)):
                return None
        return buckets

    def restore(self, state: dict[str, Any], buckets: list[Bucket]) -> None:
        """Continue from a state_dict(). buckets: from restored()."""
        self._restart_choice()
        self.residuals.replace(state["waiting"])
        self._order, self.is_learning, self._arrivals = list(state["order"]), state["learning"], state["arrivals"]
        self.sparse = self.sparse_gradients(state.get("sparse", ()))
        self.known_sparse = set(self.sparse.items)
        self._replace(buckets)
        self._note_exchanged()

    def restart(self, exported: dict[int, Exported]) -> None:
        """Keep the buckets, and replace all residuals. exported: the new ones by parameter, the same on all ranks."""
        for buffer in self.coded:
            buffer.restart()
        self._restart_choice()
        self.residuals.replace(exported)
        self._import_residuals()

    def _restart_choice(self) -> None:
        """Discard the measured steps, and measure anew."""
        if self._choice is not None:
            self._choice.restart()

    def described(self) -> list[tuple[Any, ...]]:
        """Return the name of every parameter and the shape of this rank's part; of a sharded parameter also shard_of()."""
        named = zip(self.names, self.parameters, strict=True)
        return [(name, tuple(held_here(p).shape), *filter(None, [shard_of(p)])) for name, p in named]


def _check_dtypes(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError for a parameter of a dtype that cannot be exchanged."""
    for name, parameter in named:
        if parameter.dtype not in EXCHANGEABLE_DTYPES:
            raise ValueError(
                f"{here()}parameter {name!r} has dtype {parameter.dtype}; gradients can be exchanged for "
                f"{', '.join(map(str, EXCHANGEABLE_DTYPES))}"
            )
