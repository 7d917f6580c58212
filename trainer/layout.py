"""Which bucket holds the gradient of which parameter, agreed among ranks and adapted to the order of arrival."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from collectives import Communicator
from trainer.buckets import Bucket, Item, plan_buckets
from trainer.compression import Cast

EXCHANGEABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Layout:
    """The buckets of the parameters that require gradients. Parameters go by their index.

    Begins with the parameters in reverse, as backward tends to reach them, and is rebuilt once in the order in which they
    were seen to arrive on rank 0; so again when parameters were frozen, thawed or added.
    """

    def __init__(self, communicator: Communicator, compression: Cast, bucket_bytes: int) -> None:
        self._communicator = communicator
        self._compression = compression
        self._bucket_bytes = bucket_bytes
        self._names: list[str] = []
        self._order: list[int] = []
        self._learning = True
        self._arrivals: list[int] | None = None
        self.parameters: list[Tensor] = []
        self.buckets: list[Bucket] = []
        self.places: dict[int, tuple[int, int]] = {}
        """Of each parameter laid out: index of its bucket, and its slot there."""

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """More parameters, for the next extend() or update(). Raises ValueError for dtypes that cannot be exchanged."""
        for name, parameter in zip(names, parameters, strict=True):
            if parameter.dtype not in EXCHANGEABLE_DTYPES:
                raise ValueError(
                    f"parameter {name!r} has dtype {parameter.dtype}; gradients can be exchanged for "
                    f"{', '.join(map(str, EXCHANGEABLE_DTYPES))}"
                )
        self._names += names
        self.parameters += parameters

    def learn(self, arrivals: Iterable[int]) -> None:
        """Take note of the order in which gradients arrived in an exchange. Every rank must do so after every exchange."""
        if self._learning:
            self._arrivals = list(arrivals)
            self._learning = False

    def extend(self) -> None:
        """Lay out parameters that require gradients since the last update(), behind the others. Sends nothing."""
        newcomers = [index for index in reversed(self._trainable()) if index not in self.places]
        if newcomers:
            self._order += newcomers
            self._append(newcomers)
            self._learning = True

    def update(self) -> None:
        """Rebuild the buckets where that is due; gradients in them move along. Collective when due, else only a look.

        Raises ValueError on all ranks alike where they do not have the same parameters.
        """
        trainable = self._trainable()
        if self._arrivals is None and self.places.keys() == set(trainable):
            return
        known = dict.fromkeys([*(self._arrivals or ()), *self._order, *reversed(trainable)])
        self._learning = not self.places.keys() >= set(trainable)
        self._arrivals = None
        wanted = set(trainable)
        self._order = self._agree([index for index in known if index in wanted])
        held = {index for index, (bucket, slot) in self.places.items() if self.buckets[bucket].holds_gradient(slot)}
        self.buckets, self.places = [], {}
        self._append(self._order)
        for index in self.places.keys() & held:
            bucket, slot = self.places[index]
            self.buckets[bucket].collect(slot)

    def _trainable(self) -> list[int]:
        return [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]

    def _agree(self, order: Sequence[int]) -> list[int]:
        """Rank 0's order."""
        mine = [(self._names[i], tuple(self.parameters[i].shape), str(self.parameters[i].dtype)) for i in order]
        everyones = self._communicator.allgather_object(mine)
        for rank, theirs in enumerate(everyones):
            if difference := set(theirs) ^ set(everyones[0]):
                name, shape, dtype = min(difference)
                holder = rank if (name, shape, dtype) in theirs else 0
                raise ValueError(
                    f"ranks 0 and {rank} do not train the same parameters: only rank {holder} has "
                    f"{name!r} of shape {list(shape)} and dtype {dtype}"
                )
        index = dict(zip((name for name, _, _ in mine), order, strict=True))
        return [index[name] for name, _, _ in everyones[0]]

    def _append(self, order: Sequence[int]) -> None:
        """Add buckets for parameters in this order."""
        items = [
            Item(parameter.numel(), parameter.element_size(), (parameter.dtype, parameter.device))
            for parameter in self.parameters
        ]
        for plan in plan_buckets(items, order, bucket_bytes=self._bucket_bytes):
            self.places |= {index: (len(self.buckets), slot) for slot, index in enumerate(plan.items)}
            self.buckets.append(Bucket(plan, self._names, self.parameters, self._compression, self._communicator))
