"""ElasticSampler: each rank's share of the samples of an epoch, which can be divided again within the epoch."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from gradwire.trainer.world.world import names_rank, rank, size


class ElasticSampler(Sampler[int]):
    """Yields this rank's share of the samples of an epoch that are not processed yet; the interface is Horovod's.

    Call record_batch() or record_indices() after each step, and set_epoch() at the end of each epoch. If the number of ranks
    changes within an epoch, call reset(), which divides the remaining samples among the current ranks; so does
    load_state_dict(). As with DistributedSampler, every rank has the same number of samples, so some may be repeated.

    processed_indices holds the samples recorded on this rank. Before the number of ranks changes, unite it over the ranks:
    sampler.record_indices(set().union(*hvd.allgather_object(sampler.processed_indices))).

    dataset: anything with a length.
    shuffle: whether the order of the samples is random. It depends on seed and epoch, and is the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with no samples processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that this rank has processed batch number batch_idx, counted from 0 at the last reset."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that these samples of the dataset were processed."""
        new = array("q", indices)
        self.processed_indices.update(new)
        self._since.extend(new)

    @names_rank
    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of this rank's batch number batch_idx. Raises ValueError if batch_idx < 0 or batch_size < 1."""
        if batch_idx < 0 or batch_size < 1:
            raise ValueError(f"batch_idx must be >= 0 and batch_size >= 1, not {batch_idx!r} and {batch_size!r}")
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the set of its samples that this rank knows to be processed."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state that state_dict() returned, with the current number of ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def progress(self) -> dict[str, Any]:
        """Return the argument of go_on(): the epoch, its samples that were processed when it was last divided, and the samples
        that this rank has recorded since, in order."""
        since = torch.tensor(self._since, dtype=torch.int64, device="cpu")
        return {"epoch": self.epoch, "before": self._before, "since": since}

    def go_on(self, progress: dict[str, Any]) -> None:
        """Continue with the rest of this rank's samples, in the same order. progress: what progress() returned on this rank,
        with the same number of ranks."""
        self.load_state_dict({"epoch": progress["epoch"], "processed_indices": progress["before"].tolist()})
        self.record_indices(progress["since"].tolist())
        self.indices: list[int] = [index for index in self.indices if index not in self.processed_indices]
        self.num_samples = len(self.indices)

    def reset(self) -> None:
        """Divide the samples that are not processed yet among the current ranks."""
        self._before = torch.tensor(sorted(self.processed_indices), dtype=torch.int64, device="cpu")
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
