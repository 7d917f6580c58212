"""Hogwild: ranks of one host train the same parameters in shared memory, and do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.engine.buffers import refusal
from gradwire.collectives.torch_internals import share_hooks, uncompiled
from gradwire.trainer.optimizers.wrapped import WrappingOptimizer, tensors_of
from gradwire.trainer.reducer.agreement import agree_on_parameters, check_settings
from gradwire.trainer.reducer.arguments import check_named_parameters, check_optimizer
from gradwire.trainer.reducer.bucket import dense_strides
from gradwire.trainer.world.process_sets import ProcessSetLike, global_process_set
from gradwire.trainer.world.world import communicator_of, names_rank

_LINE_BYTES = 64
"""The size of a cache line. Each parameter begins on a new cache line."""


class Hogwild(WrappingOptimizer):
    """Wraps an optimizer so that all ranks of a host step the same parameters, without locks (Niu, Recht, Ré, Wright 2011).

    The constructor moves the parameters, with rank 0's values, to memory that all ranks share; model and optimizer keep their
    Parameter objects. Each rank steps with its own gradients at any time, without communication, and the other ranks use the
    result in their next forward. The optimizer's state, such as momentum, and the buffers of the model, such as running
    statistics, remain separate on each rank.

    If two ranks change the same number at the same moment, one change may be lost. Other ranks may also change parameters
    between the forward and the step of a rank. The paper shows that both do little harm if each gradient changes few
    parameters: with an embedding of sparse=True, SGD writes only the rows of the batch, while a dense gradient writes all rows.
    Runs with several ranks are not reproducible. docs/guides/hogwild.md is the guide.

    optimizer: any torch optimizer that changes parameters in place, as those of torch do.
    named_parameters: as in DistributedOptimizer.
    process_set: ranks of one host; default: all.

    If a rank dies, the others continue with the values that it has written. Checkpoints: between two calls of hvd.barrier(),
    save the model of any rank, and on each rank the state_dict() of this optimizer.

    The constructor is collective. Raises ValueError or TypeError for invalid arguments; ValueError on all ranks if they are on
    several hosts, share no memory, or do not train the same parameters with the same layout; CollectiveError if there is too
    little memory.
    """

    @names_rank
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        *,
        process_set: ProcessSetLike = global_process_set,
    ) -> None:
        check_optimizer(optimizer)
        if isinstance(optimizer, WrappingOptimizer):
            raise TypeError(f"optimizer is distributed already: it is a {type(optimizer).__name__}")
        parameters = tensors_of(optimizer.param_groups)
        named = {} if named_parameters is None else check_named_parameters(named_parameters, parameters)
        self._parameters = {
            named.get(parameter, f"parameter {number}"): parameter for number, parameter in enumerate(parameters)
        }
        for name, parameter in self._parameters.items():
            _check(name, parameter)
        self.optimizer = optimizer
        share_hooks(self, optimizer)
        self._addresses = self._move(process_set)
        self._is_closed = False

    def _move(self, process_set: ProcessSetLike) -> dict[str, int]:
        """Move all parameters into memory that the ranks share, and return the address of each, by name."""
        communicator = communicator_of(process_set)
        order = agree_on_parameters(communicator, list(self._parameters), list(self._parameters.values()))
        parameters = [self._parameters[name] for name in order]
        strides = [dense_strides(parameter) for parameter in parameters]
        check_settings(
            communicator, "Hogwild", {f"{name}.stride()": str(each) for name, each in zip(order, strides, strict=True)}
        )
        sizes = [-(-parameter.nbytes // _LINE_BYTES) * _LINE_BYTES for parameter in parameters]
        starts = accumulate(sizes, initial=0)
        memory = communicator.shared_empty(sum(sizes), dtype=torch.uint8)
        places = [
            memory[start : start + parameter.nbytes].view(parameter.dtype).as_strided(parameter.shape, stride)
            for start, parameter, stride in zip(starts, parameters, strides, strict=False)
        ]
        if communicator.rank == 0:
            for place, parameter in zip(places, parameters, strict=True):
                place.copy_(parameter.detach())
        communicator.barrier()
        for place, parameter in zip(places, parameters, strict=True):
            parameter.data = place
        return {name: place.data_ptr() for name, place in zip(order, places, strict=True)}

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer on the shared parameters, with this rank's gradients, and return its result.

        Raises RuntimeError if a parameter is no longer in the shared memory, as after model.to().
        """
        self._before_method("step")
        return self.optimizer.step(closure)

    @names_rank
    def _before_method(self, name: str) -> None:
        """Raise RuntimeError if a parameter is no longer in the shared memory."""
        if self._is_closed:
            raise RuntimeError("this optimizer is closed")
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != self._addresses[name]:
                raise RuntimeError(
                    f"{name!r} is no longer in the memory that the ranks share: something, such as model.to() or "
                    "parameter.data = ..., has given it memory of its own. Copy into it instead, by copy_()"
                )

    @names_rank
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: the shared memory is laid out when the optimizer is made."""
        raise ValueError("parameters cannot be added to a Hogwild optimizer once it is made")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into this rank's wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def close(self) -> None:
        """Copy the current parameters from the shared memory to memory of this rank. The wrapped optimizer remains usable.

        Not collective: for equal copies on all ranks, call hvd.barrier() before.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() == self._addresses[name]:
                parameter.data = parameter.detach().clone()


def _check(name: str, parameter: Tensor) -> None:
    """Raise TypeError or ValueError for a parameter that shared memory cannot hold."""
    if parameter.device.type != "cpu":
        raise ValueError(f"{name!r} is on {parameter.device}; Hogwild trains parameters on the CPU")
    if reason := refusal(parameter):
        raise TypeError(f"{name!r} cannot be trained by Hogwild: {reason}")
