"""The rule of the next forward: gradients are exchanged in every step, with waits and updates deferred to the next forward.

The update of a step has the same bits as if not deferred: each parameter is updated with the gradients of all ranks and the
settings at the time of step(), before the first module that uses the parameter computes. Earlier modules compute while
gradients are on the wire (ByteScheduler, Peng et al. 2019).
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwire.collectives import CollectiveError, torch_internals
from gradwire.collectives.torch_internals import has_step_hooks, runs_hooks, without_step_hooks
from gradwire.trainer.optimizers.wrapped import tensors_of
from gradwire.trainer.reducer.bucket import Bucket
from gradwire.trainer.reducer.deferred import DeferredWait, is_awaited
from gradwire.trainer.reducer.dtensors import shard_of
from gradwire.trainer.reducer.hooks import Weakly, remove_all
from gradwire.trainer.reducer.plans import USUAL, ExchangePlan
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.rules.rule import Rule
from gradwire.trainer.rules.synchronous import Synchronous
from gradwire.trainer.world.world import names_rank

_READ_BEFORE = (
    "rank {}: a gradient of {!r} arrived, and the parameter has not been updated by the step() before: it does not belong to a "
    "module whose forward was called since. With rules.NextForward, call settle() of the distributed optimizer before "
    "parameters are used outside of their module's forward"
)
_TWICE = (
    "rank {}: a gradient of {!r} arrived while that of the backward() before was being exchanged: with rules.NextForward, call "
    "settle() of the distributed optimizer between two calls of backward(), or accumulate by backward_passes_per_step or "
    "no_sync()"
)


@dataclass(frozen=True)
class NextForward:
    """The rule with which backward() and step() do not wait for the exchange: a module's parameters are updated before its next
    forward, with bitwise the same result as without this rule and with the same bucket_bytes. Call settle() of the optimizer
    before parameters are used outside of a forward of the model. docs/guides/optimizer.md lists what this rule supports.

    model: the model that is trained. The optimizer hooks the forward of each of its modules.

    Raises TypeError unless model is a torch.nn.Module.
    """

    model: nn.Module

    @names_rank
    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(
                f"model must be the torch.nn.Module whose forward() the updates precede, not {self.model!r}"
            )

    def __call__(self, setup: Setup) -> DeferredSteps:
        return DeferredSteps(setup, self.model)


class DeferredSteps(Synchronous):
    """backward() starts the exchange, and step() records that an update is due. Before a module computes, this rule waits for
    the buckets of its parameters, and updates the parameters in them.

    model: the rule hooks the forward of its modules. If the forward of a module is never called, because its parent reads its
    parameters, the rule waits for these parameters before the forward of the module around it. It waits for parameters that are
    in no module of the model before the first forward.

    settle() completes the update. These call it: any use of a gradient (AwaitedGradient), state_dict() and load_state_dict() of
    model and optimizer, a forward without gradients, the next backward(), step() and synchronize().

    step() does not defer the update if the gradients have arrived already, as after clipping; if the buckets must be rebuilt;
    or if there are step hooks, of the optimizer or of all optimizers, which would run once for every bucket.
    """

    can_stand_in = False

    def __init__(self, setup: Setup, model: nn.Module) -> None:
        if isinstance(setup.optimizer, torch.optim.LBFGS):
            raise ValueError(
                "rules.NextForward is for optimizers that update each parameter by itself; LBFGS does not: leave out "
                "rule="
            )
        if not runs_hooks(setup.optimizer):
            raise ValueError(
                f"rules.NextForward needs torch's optimizer hooks, which {type(setup.optimizer).__name__} does not "
                "run, as it does not call the __init__ of torch.optim.Optimizer: leave out rule="
            )
        if not setup.gradient_as_bucket_view:
            raise ValueError(
                "rules.NextForward does not support gradient_as_bucket_view=False: gradients are in their buckets until "
                "the next forward"
            )
        plan = setup.plan or USUAL
        if not isinstance(plan, ExchangePlan) or plan.at_end:
            raise ValueError(
                f"exchange_plan={str(plan)!r}: rules.NextForward exchanges gradients beside backward() and later: give an "
                "ExchangePlan with at_end=False"
            )
        super().__init__(replace(setup, plan=plan))
        self.times = None  # waits end when this rank needs a result, so ranks' waits cannot be compared
        self._wait = DeferredWait(self.reducer, Weakly.of(self.settle), Weakly.of(self._before_gradient))
        self.reducer.deferral = self._wait
        self._model = model
        self._lock = threading.RLock()  # autograd calls hooks from one thread per device
        self._settings: list[dict[str, Any]] = []  # of the param groups at the due step; empty if no update is due
        self._failed = False
        # By bucket on a GPU: the end of its last update, and the stream on which it ran.
        self._updated: dict[Bucket, tuple[torch.cuda.Event, int]] = {}
        self._called: set[nn.Module] = set()
        self._needed: dict[nn.Module | None, list[Bucket]] = {}
        self._needed_by: tuple[int, object] = (0, None)  # the inputs from which _needed was made
        self._watched: set[nn.Module] = set()
        reads, loads = Weakly.of(self.settle), Weakly.of(self._before_load)
        optimizer = setup.optimizer
        self._hooks: list[RemovableHandle] = [
            optimizer.register_state_dict_pre_hook(reads),
            optimizer.register_load_state_dict_pre_hook(loads),
        ]
        self._when_deleted = weakref.finalize(self, _delete, self.communicator.rank, self._hooks, self._settings)
        self._when_deleted.atexit = False

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        for name, parameter in zip(names, parameters, strict=True):
            if shard_of(parameter):
                raise ValueError(f"rules.NextForward needs whole parameters, and {name!r} is sharded")
        super().add(names, parameters)
        forward, reads = Weakly.of(self._before_forward), Weakly.of(self.settle)
        loads = Weakly.of(self._before_load)
        for module in set(self._model.modules()) - self._watched:
            self._watched.add(module)
            self._hooks.append(module.register_forward_pre_hook(forward, prepend=True))
            self._hooks.append(module.register_state_dict_pre_hook(reads))
            self._hooks.append(module.register_load_state_dict_pre_hook(loads))

    def synchronize(self) -> None:
        self.settle()
        super().synchronize()

    def take_step(self) -> Any:
        """Record that an update is due, if it can be deferred. Raises TypeError if the optimizer's step changes the settings of
        its param groups, or numbers among its attributes, so that it cannot step some parameters later than others."""
        groups = self.setup.optimizer.param_groups
        if not self._can_defer():
            before = [dict(group) for group in groups], _numbers(self.setup.optimizer)
            result = super().take_step()
            if before != ([dict(group) for group in groups], _numbers(self.setup.optimizer)):
                raise TypeError(
                    f"rank {self.communicator.rank}: rules.NextForward is for optimizers that keep what changes in a step in the "
                    f"state of each parameter; {type(self.setup.optimizer).__name__} changes its param groups or attributes: "
                    "leave out rule="
                )
            return result
        self._find_needed()
        self._updated.clear()
        self._settings[:] = [
            {name: _kept(value) for name, value in group.items() if name != "params"} for group in groups
        ]
        in_buckets = {parameter for bucket in self.buckets for parameter in bucket.parameters}
        others = [parameter for parameter in tensors_of(groups) if parameter not in in_buckets]
        if any(parameter.grad is not None for parameter in others):
            self._update(others)
        return None

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        self.settle()
        return super().evaluate(closure)

    def before_method(self, name: str) -> None:
        Rule.before_method(self, name)  # gradients are not those of all ranks when backward() returns

    def after_step(self) -> None:
        super().after_step()
        self._wait.agree_on_order()

    def settle(self, *_: object) -> None:
        with self._lock:
            while self._wait.waiting:
                self._finish_next()

    def load_state_dict(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        self._before_load()
        super().load_state_dict(state_dict, also)

    def close(self) -> None:
        """Complete the due update, unless an error has made that impossible, and remove the hooks of the model."""
        try:
            if not self._failed:
                self.settle()
        finally:
            self._when_deleted.detach()
            remove_all(self._hooks)
            super().close()

    def _can_defer(self) -> bool:
        """Return whether all gradients are being exchanged, and have not been used since."""
        return (
            self._wait.exchange.is_pending
            and not self._settings
            and not self.reducer.has_unreduced
            and not self.reducer.planner.is_due
            and not has_step_hooks(self.setup.optimizer)
            and all(is_awaited(parameter.grad) for bucket in self.buckets for parameter in bucket.parameters)
        )

    def _find_needed(self) -> None:
        """Find the buckets that each module needs before it computes, if modules have been called for the first time."""
        made_of = len(self._called), self.reducer.layout
        if self._needed_by[0] == made_of[0] and self._needed_by[1] is made_of[1]:
            return
        bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self._needed, self._needed_by = {}, made_of
        self._find_needed_in(self._model, None, bucket_of)
        elsewhere = bucket_of.keys() - set(self._model.parameters())
        self._needed.setdefault(None, []).extend({bucket_of[parameter] for parameter in elsewhere})

    def _find_needed_in(self, module: nn.Module, caller: nn.Module | None, bucket_of: Mapping[Tensor, Bucket]) -> None:
        """Find the buckets that a module needs, and those inside it. caller: the innermost one around it that has been called."""
        caller = module if module in self._called else caller
        needed = self._needed.setdefault(caller, [])
        for parameter in module.parameters(recurse=False):
            bucket = bucket_of.get(parameter)  # None if the optimizer does not have it, or it is frozen
            if bucket is not None and bucket not in needed:
                needed.append(bucket)
        for child in module.children():
            self._find_needed_in(child, caller, bucket_of)

    def _before_forward(self, module: nn.Module, _: object) -> None:
        self._called.add(module)
        if self._wait.exchange.is_pending:
            if not self._settings or not torch.is_grad_enabled():
                self.settle()
            else:
                with self._lock:
                    for bucket in (*self._needed.get(None, ()), *self._needed.get(module, ())):
                        while bucket in self._wait.waiting:
                            self._finish_next()
        if self._updated:
            self._follow_updates(module)

    def _follow_updates(self, module: nn.Module) -> None:
        """Let the current stream continue after the updates of a module's parameters that ran on others, before modules there."""
        for bucket in (*self._needed.get(None, ()), *self._needed.get(module, ())):
            device = bucket.memory.device
            event, stream = self._updated.get(bucket, (None, 0))
            if event is not None and torch_internals.current_stream_handle(device) != stream:
                torch.cuda.current_stream(device).wait_event(event)

    def _before_gradient(self, index: int) -> None:
        """Complete the update of the last step at the first gradient of backward(). Raises RuntimeError if its parameter was
        used before it was updated."""
        with self._lock:
            if self.reducer.layout.places.get(index, (None,))[0] in self._wait.waiting:
                message = _READ_BEFORE if self._settings else _TWICE
                raise RuntimeError(message.format(self.communicator.rank, self.reducer.names[index]))
            self.settle()

    def _before_load(self, *_: object) -> None:
        """Complete the update of the last step; a failed one is skipped, since the loaded state replaces it."""
        try:
            self.settle()
        except CollectiveError:
            self._wait.abandon()
            self._settings.clear()
            self._failed = False

    def _finish_next(self) -> None:
        """Wait for the bucket that was started first, and update its parameters if an update is due.

        A module that waits for a later bucket finishes all earlier ones before it: they arrive first, so their parameters are
        updated while the later bucket is in transit. The order is the same on all ranks, as an optimizer needs that calls
        collectives."""
        bucket = self._wait.waiting[0]
        try:
            self._wait.wait_for(bucket)
        except CollectiveError:
            self._failed = True
            raise
        if not self._settings:
            return
        kept = [
            parameter.grad for parameter in bucket.parameters
        ]  # None after zero_grad(); the update uses the gradients before it
        try:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                parameter.grad = gradient
            self._update(bucket.parameters)
        finally:
            for parameter, gradient_now in zip(bucket.parameters, kept, strict=True):
                parameter.grad = gradient_now
            if not self._wait.waiting:
                self._settings.clear()
            if bucket.streams is not None:
                stream = torch.cuda.current_stream(bucket.memory.device)
                self._updated[bucket] = stream.record_event(), stream.cuda_stream

    def _update(self, parameters: Collection[Tensor]) -> None:
        """Step some of the optimizer's parameters, with the settings at the time of step()."""
        optimizer, wanted = self.setup.optimizer, set(parameters)
        groups = optimizer.param_groups
        now = [dict(group) for group in groups]
        devices = {parameter.device.type for parameter in wanted}
        try:
            for group, settings in zip(groups, self._settings, strict=True):
                group.update(settings, params=[parameter for parameter in group["params"] if parameter in wanted])
            # step() defers only without hooks. Hooks registered since then belong to later steps.
            with _outside_of_modes(devices), without_step_hooks(optimizer), self.sparse_again(wanted):
                optimizer.step()
        finally:
            for group, settings in zip(groups, now, strict=True):
                group.update(settings)


def _delete(rank: int, hooks: Iterable[RemovableHandle], settings: Sequence[object]) -> None:
    """Remove the hooks of a rule that is deleted without close(), and warn if an update is due, which can no longer be made."""
    remove_all(hooks)
    if settings:
        warnings.warn(
            f"rank {rank}: a DistributedOptimizer with rules.NextForward was deleted before the update of its last step() was "
            "made: call settle() before",
            stacklevel=3,
        )


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the attributes of an optimizer that are numbers, such as a count of its steps."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _kept(value: Any) -> Any:
    """Return the current value of a setting; a tensor, which may be changed in place, is copied."""
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def _outside_of_modes(devices: Iterable[str]) -> Iterator[None]:
    """Compute without autocast and inference_mode(), inside which a forward may run."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
