"""ElasticSampler: each rank's share of an epoch, which may be divided anew in the middle of it."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from gradwire.trainer.world.world import here, rank, size


class ElasticSampler(Sampler[int]):
    """Yields this rank's share of the samples of an epoch that are not processed yet; the interface is Horovod's.

    Call record_batch() or record_indices() after each step, and set_epoch() at the end of each epoch. If the number of ranks
    changes within an epoch, or a checkpoint is loaded, load_state_dict() or reset() divides the remaining samples among the
    current ranks. As with DistributedSampler, every rank has the same number of samples, so some may be repeated.

    processed_indices has what this rank has recorded. Before a change, unite it over the ranks:
    sampler.record_indices(set().union(*hvd.allgather_object(sampler.processed_indices))).

    dataset: anything with a length.
    shuffle: whether the samples are in an order drawn from seed and epoch, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that this rank's batch of this number, counted from 0 since the last reset, was processed."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Note that these samples of the dataset were processed."""
        new = array("q", indices)
        self.processed_indices.update(new)
        self._since.extend(new)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of this rank's batch of this number. Raises ValueError where there can be none such."""
        if batch_idx < 0 or batch_size < 1:
            raise ValueError(
                f"{here()}batch_idx must be >= 0 and batch_size >= 1, not {batch_idx!r} and {batch_size!r}"
            )
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and what this rank knows to be processed of it."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where state_dict() was taken, with as many ranks as there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def progress(self) -> dict[str, Any]:
        """Return the epoch, what was processed of it when it was divided last, and what this rank has recorded since, in order:
        what go_on() takes."""
        since = torch.frombuffer(self._since, dtype=torch.int64).clone() if self._since else torch.empty(0).long()
        return {"epoch": self.epoch, "before": self._before, "since": since}

    def go_on(self, progress: dict[str, Any]) -> None:
        """Go on with the rest of this rank's samples, in their order: where progress() was taken on the same rank of as many."""
        self.load_state_dict({"epoch": progress["epoch"], "processed_indices": progress["before"].tolist()})
        self.record_indices(progress["since"].tolist())
        self.indices: list[int] = [index for index in self.indices if index not in self.processed_indices]
        self.num_samples = len(self.indices)

    def reset(self) -> None:
        """Divide what is not processed yet among the ranks there are now."""
        self._before = torch.tensor(sorted(self.processed_indices), dtype=torch.int64)
        self._since = array("q")
        self.rank, self.num_replicas = rank(), size()
        self.remaining_indices = [i for i in range(len(self.dataset)) if i not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        order = list(self.remaining_indices)
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        filled = itertools.islice(itertools.cycle(order), self.total_size)
        self.indices = list(filled)[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
