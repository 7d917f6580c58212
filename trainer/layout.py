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
    """The buckets of the parameters that require gradients.

    Begins with the parameters in reverse, as backward tends to reach them, and is rebuilt once in the order in which they
    were seen to arrive on rank 0; so again after parameters were frozen, thawed or added. Parameters go by their index.
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
        """More parameters, to be laid out by the next update(). Raises ValueError for dtypes that cannot be exchanged."""
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

    def update(self) -> None:
        """Rebuild the buckets where that is due. Gradients in them move along. Collective when due, else only a look.

        Raises ValueError on all ranks alike where they do not have the same parameters.
        """
        trainable = [index for index, parameter in enumerate(self.parameters) if parameter.requires_grad]
        changed = self.places.keys() != set(trainable)
        if not changed and self._arrivals is None:
            return
        known = dict.fromkeys([*(self._arrivals or ()), *self._order, *reversed(trainable)])
        wanted = set(trainable)
        self._order = self._agree([index for index in known if index in wanted])
        self._learning = changed
        self._arrivals = None
        self._build()

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

    def _build(self) -> None:
        items = [
            Item(parameter.numel(), parameter.element_size(), (parameter.dtype, parameter.device))
            for parameter in self.parameters
        ]
        plans = plan_buckets(items, self._order, bucket_bytes=self._bucket_bytes)
        held = [index for index, (bucket, slot) in self.places.items() if self.buckets[bucket].holds_gradient(slot)]
        self.buckets = [Bucket(plan, self._names, self.parameters, self._compression) for plan in plans]
        self.places = {
            index: (number, slot) for number, plan in enumerate(plans) for slot, index in enumerate(plan.items)
        }
        for index in self.places.keys() & held:
            number, slot = self.places[index]
            self.buckets[number].collect(slot)
