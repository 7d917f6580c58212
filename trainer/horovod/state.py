"""Broadcasts of parameters, optimizer state and objects, so that all ranks start equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradwire.collectives import Communicator
from gradwire.collectives.torch_internals import leaves
from gradwire.trainer.optimizer import DistributedOptimizer
from gradwire.trainer.reducer.arguments import check_tensor
from gradwire.trainer.trees import broadcast
from gradwire.trainer.world.process_sets import ProcessSetLike, global_process_set
from gradwire.trainer.world.world import communicator_of, current_world, is_initialized, names_rank, root_in

T = TypeVar("T")


@names_rank
def broadcast_parameters(
    params: Mapping[str, Tensor | None] | Iterable[Tensor | None] | Iterable[tuple[str, Tensor | None]],
    root_rank: int,
    process_set: ProcessSetLike = global_process_set,
) -> None:
    """Overwrite tensors, in place, with those of root_rank.

    params: the tensors, such as model.state_dict(), model.named_parameters() or model.parameters().

    All ranks must give tensors of the same shapes and dtypes in the same order; those of a mapping are sorted by key. None,
    such as the bias of a layer that has no bias, is skipped. Raises TypeError for anything else that is not a tensor, and for
    tensors without their own memory, such as DTensors.
    """
    entries: list[Any] = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    values = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    tensors: list[Tensor] = [value for value in values if value is not None]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"can broadcast tensors, or pairs of a name and a tensor, not {type(tensor).__name__}")
        check_tensor(tensor)
    if is_initialized():
        for optimizer in current_world().optimizers:
            optimizer.settle()
    communicator = communicator_of(process_set)
    root = root_in(communicator, root_rank)
    works = [communicator.broadcast(tensor.detach(), root, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    increment_version(tensors)  # as operations in place do: local updates take these values for the common parameters


@names_rank
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: object = None,
    process_set: ProcessSetLike = global_process_set,
) -> None:
    """Copy the optimizer state and the param group options of root_rank to every rank's optimizer.

    optimizer: any optimizer whose state_dict() consists of dicts, lists, (named) tuples, tensors and picklable values. No step
    is taken: parameters, and the optimizer of root_rank, are unchanged. Of a DistributedOptimizer, the wrapped optimizer's
    state is copied; the state of codecs remains separate on each rank. With its default rule, parameters that have no gradient
    get zeros, as with Horovod. The zeros do not count as gradients: zero_grad() and step() set them to None again, and
    backward() does so where it has added nothing. So no parameter moves that has no gradient on any rank.
    model: Horovod's argument, which is ignored.

    Raises TypeError for an optimizer of DTensors, and ValueError for one with rules.Sharded; ValueError on all ranks if
    root_rank's state has what cannot be sent.
    """
    communicator = communicator_of(process_set)
    share_optimizer_state(optimizer, communicator, root_in(communicator, root_rank))
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.settle()
        optimizer.attachment.rule.fill()


def share_optimizer_state(optimizer: torch.optim.Optimizer, communicator: Communicator, root: int) -> None:
    """Copy the optimizer state of a Communicator's rank `root` to its other ranks; see broadcast_optimizer_state."""
    if isinstance(optimizer, DistributedOptimizer):
        if optimizer.attachment.is_sharded:
            raise ValueError("with rules.Sharded every rank has its own state, which no other rank can load")
        optimizer = optimizer.optimizer
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            check_tensor(parameter)  # of what is no ordinary tensor, neither is the state, and all ranks notice alike
    state = broadcast(optimizer.state_dict(), root, communicator)
    if communicator.rank != root:
        optimizer.load_state_dict(state)
        sent = leaves(Tensor, state)
        for path, kept in leaves(Tensor, optimizer.state_dict()).items():
            # load_state_dict() casts to the dtype of the parameter what the root keeps in another one.
            if path in sent and kept.dtype != sent[path].dtype:
                kept.data = sent[path].to(kept.device)


@names_rank
def broadcast_object(
    obj: T | None = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSetLike = global_process_set
) -> T:
    """Return root_rank's object, which is sent pickled; the others' are ignored. `name` is Horovod's, and unused."""
    communicator = communicator_of(process_set)
    received: T = communicator.broadcast_object(obj, root_in(communicator, root_rank))
    return received


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSetLike = global_process_set) -> list[T]:
    """Return all ranks' objects by rank; they are sent pickled. `name` is Horovod's, and unused."""
    return communicator_of(process_set).allgather_object(obj)
