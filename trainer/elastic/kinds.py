"""How each kind of value in a state is committed, restored, and synchronized from rank 0."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwire.trainer.elastic.sampler import ElasticSampler
from gradwire.trainer.horovod.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from gradwire.trainer.optimizer import DistributedOptimizer
from gradwire.trainer.optimizers.wrapped import WrappingOptimizer
from gradwire.trainer.world.world import size


class Value:
    """Handles a plain value, or an object with state_dict() and load_state_dict()."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")

    def captured(self, *, are_replicas: bool) -> tuple[Any, Any]:
        """Return the state that all ranks share, and this rank's own state. are_replicas: whether all ranks hold the same
        parameters and optimizer states."""
        return None, self.value.state_dict() if self._has_state else self.value

    def take(self, shared: Any, own: Any, also: list[Any], *, is_same_size: bool) -> Any:
        """Restore the states that captured() returned, and return the value. also: the own states of ranks that no longer
        exist. is_same_size: whether the number of ranks is that of the commit. Collective."""
        return self._set(own if is_same_size else broadcast_object(own, 0))

    def sync(self, root_rank: int) -> Any:
        """Set the value to that of a rank, and return it. Collective."""
        _, own = self.captured(are_replicas=True)
        return self._set(broadcast_object(own, root_rank))

    def _set(self, own: Any) -> Any:
        if not self._has_state:
            return own
        self.value.load_state_dict(own)
        return self.value


class Model(Value):
    """Handles a module: its parameters, and its buffers, which may differ between ranks."""

    def captured(self, *, are_replicas: bool) -> tuple[Any, Any]:
        names = {name for name, _ in self.value.named_parameters(remove_duplicate=False)} if are_replicas else set()
        return _divided(self.value.state_dict(), names)

    def take(self, shared: Any, own: Any, also: list[Any], *, is_same_size: bool) -> Any:
        state = OrderedDict({**shared, **own})
        vars(state).update(getattr(own, "__dict__", {}))
        return self._set(state)

    def sync(self, root_rank: int) -> Any:
        state = self.value.state_dict()
        broadcast_parameters({name: each for name, each in state.items() if isinstance(each, Tensor)}, root_rank)
        return self.value


class Optimizer(Value):
    """Handles an optimizer: its state, and the states of a rule and of error feedback, which are each rank's own."""

    def captured(self, *, are_replicas: bool) -> tuple[Any, Any]:
        return _divided(self.value.state_dict(), {"state", "param_groups"} if are_replicas else set())

    def take(self, shared: Any, own: Any, also: list[Any], *, is_same_size: bool) -> Any:
        if isinstance(self.value, DistributedOptimizer):
            self.value.load_state_dict({**shared, **own}, [{**shared, **each} for each in also])
            return self.value
        return self._set({**shared, **own})

    def sync(self, root_rank: int) -> Any:
        is_wrapped = isinstance(self.value, WrappingOptimizer)
        if not is_wrapped or (isinstance(self.value, DistributedOptimizer) and not self.value.attachment.is_sharded):
            broadcast_optimizer_state(self.value, root_rank)
        return self.value


class Sampler(Value):
    """Handles the progress of a sampler. If the number of ranks has changed, the rest of the epoch is divided again."""

    def captured(self, *, are_replicas: bool) -> tuple[Any, Any]:
        return None, self.value.progress()

    def take(self, shared: Any, own: Any, also: list[Any], *, is_same_size: bool) -> Any:
        if is_same_size:
            self.value.go_on(own)
        else:
            self._divide([own, *also], own["epoch"])
        return self.value

    def sync(self, root_rank: int) -> Any:
        own = self.value.progress()
        self._divide([own], broadcast_object(own["epoch"], root_rank))
        return self.value

    def _divide(self, kept: list[Any], epoch: int) -> None:
        mine = {index for each in kept for name in ("before", "since") for index in each[name].tolist()}
        self.value.load_state_dict({"epoch": epoch, "processed_indices": set().union(*allgather_object(mine))})


class RandomNumbers(Value):
    """Handles the states of the random number generators of Python, NumPy and torch, which are this rank's own."""

    def __init__(self) -> None:
        super().__init__(None)

    def captured(self, *, are_replicas: bool) -> tuple[Any, Any]:
        version, words, gauss = random.getstate()
        numbers = np.random.get_state(legacy=False)
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        python = [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss]
        key = torch.from_numpy(numbers["state"]["key"].astype(np.int64))
        numpy = [numbers["bit_generator"], key, numbers["state"]["pos"], numbers["has_gauss"], numbers["gauss"]]
        return None, {"python": python, "numpy": numpy, "torch": torch.get_rng_state(), "cuda": cuda}

    def take(self, shared: Any, own: Any, also: list[Any], *, is_same_size: bool) -> Any:
        version, words, gauss = own["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        name, key, *rest = own["numpy"]
        np.random.set_state((name, key.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(own["torch"])
        if own["cuda"] is not None:
            torch.cuda.set_rng_state(own["cuda"])
        return None


def kind_of(value: Any) -> Value:
    """Return the Value, or the derived class for its type, that handles a value."""
    for kind, keeper in ((nn.Module, Model), (torch.optim.Optimizer, Optimizer), (ElasticSampler, Sampler)):
        if isinstance(value, kind):
            return keeper(value)
    return Value(value)


def what_binds(value: Any) -> str | None:
    """Return the name of a value's kind if the value is tied to the ranks with which it was made, so that it cannot move to
    another world; None otherwise."""
    modules = value.modules() if isinstance(value, nn.Module) else ()
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules):
        return "a DistributedDataParallel"
    if isinstance(value, WrappingOptimizer) and not isinstance(value, DistributedOptimizer):
        return f"a {type(value).__name__}"
    if isinstance(value, DistributedOptimizer) and not value.attachment.can_move:
        return f"a {type(value).__name__} of some of the ranks, or of a Communicator"
    return None


def are_replicas(values: list[Any]) -> bool:
    """Return whether, for a state of these values, all ranks hold the same parameters and optimizer states after each step: if
    there are optimizers, and each of them ensures that among all ranks."""
    optimizers = [value for value in values if isinstance(value, torch.optim.Optimizer)]
    return bool(optimizers) and all(
        isinstance(each, DistributedOptimizer)
        and each.attachment.rule.keeps_replicas
        and each.communicator.size == size()
        for each in optimizers
    )


def _divided(state: dict[str, Any], names: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries with these names, and the other entries. The latter keep the attributes of the state, such as the
    versions of a model's modules."""
    own = OrderedDict((name, each) for name, each in state.items() if name not in names)
    vars(own).update(getattr(state, "__dict__", {}))
    return {name: each for name, each in state.items() if name in names}, own
