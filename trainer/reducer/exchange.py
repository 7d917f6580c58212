"""The exchange of gradients while backward runs. Afterwards, the gradients are equal on all ranks."""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwire.collectives import Work
from gradwire.collectives.daemon import DaemonThread
from gradwire.collectives.diagnostics.timeline import now_ns
from gradwire.collectives.torch_internals import (
    OUTSIDE_BACKWARD,
    graph_task,
    hook_runs_last,
    run_hook_last,
    when_backward_ends,
)
from gradwire.trainer.optimizers.wrapped import uncompiled
from gradwire.trainer.reducer.arguments import Sum
from gradwire.trainer.reducer.bucket import Bucket
from gradwire.trainer.reducer.bucketing import Bucketing
from gradwire.trainer.reducer.combination import OperationChain
from gradwire.trainer.reducer.moments import Moments
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.reducer.sparse import SparseGradients

_IN_FLIGHT = (
    "a gradient of {!r} arrived while its last one was being exchanged: either an earlier backward() failed midway (call "
    "synchronize(), then zero_grad()), or one backward() reached the parameter twice, as a checkpoint with "
    "use_reentrant=True can"
)
_ON_A_SUM = (
    "a gradient of {!r} was accumulated onto one already summed over ranks: call zero_grad() of the distributed optimizer "
    "before, or accumulate by backward_passes_per_step or no_sync()"
)
_OF_A_SHARE = (
    "the gradient of {!r} is that of an earlier exchange, of which each rank has its shard only: call zero_grad() of the "
    "distributed optimizer before the next backward(), or accumulate by backward_passes_per_step or no_sync()"
)


_OF_A_GRAPH = (
    "the gradient of {!r} requires a gradient itself: backward(create_graph=True) cannot be exchanged; use "
    "torch.autograd.grad(..., create_graph=True) for the inner derivative"
)

_requires_grad = operator.attrgetter("requires_grad")


class GradientExchange:
    """Hooks parameters, fills buckets, and exchanges them in the same order on all ranks.

    A *pass* is one backward() that reaches at least one of the parameters. A *window* ends in an exchange of every
    bucket: in the pass that is due by `passes`, or in flush(). Ranks may differ in the parameters that their backward()
    reaches, even in whether it reaches any, but must go through the same windows.

    The exchange is done when backward() returns: buckets start as soon as they are full, and callbacks at the end of backward
    start the others and wait. A thread of this exchange begins operations that depend on others: one backward() may reach
    parameters of several exchanges, for which ranks may wait in different orders.

    step: the number of exchanges so far. wait_s: seconds for which callers have waited for unfinished exchanges. has_unreduced:
    whether gradients were accumulated that have not been exchanged.
    """

    def __init__(self, bucketing: Bucketing, setup: Setup) -> None:
        self.step = 0
        self.wait_s = 0.0
        self.has_unreduced = False
        self.moments = Moments(setup.communicator)
        self._bucketing = bucketing
        self._combination = setup
        self._passes = setup.passes
        self._hooks: dict[int, RemovableHandle] = {}
        self._unhooked: dict[int, Tensor] = {}
        # For torch.compile, which compiles hooks of a backward() that it compiles.
        self._on_gradient = torch.compiler.disable(GradientExchange._handle)
        self._lock = threading.Lock()  # autograd calls hooks from one thread per device

        self._graph_task = OUTSIDE_BACKWARD
        self._pass_is_open = False
        self._arrived: dict[int, None] = {}
        self._missing: list[int] = []
        # Parameters with hooks that run after this one, so that their gradients may change.
        self._overtaken: list[int] = []
        self._started, self._counting, self._sparse_started = 0, False, False
        self._found: SparseGradients | None = None
        self._completing: Work | None = None
        self._thread: DaemonThread | None = None

        self._exchanged = False
        self._reduced: set[int] = set()
        self._filled: dict[int, Tensor] = {}

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Add parameters. The exchange of this window includes them."""
        first = len(self._bucketing.parameters)
        self._bucketing.add(names, parameters)
        self._unhooked |= enumerate(parameters, first)
        for index in self._bucketing.removed:
            self._unhooked.pop(index, None)
            if index in self._hooks:
                self._hooks[index].remove()
        self._exchanged = False
        self._watch()

    def flush(self) -> None:
        """Exchange now, unless this window's exchange is done and nothing was accumulated since."""
        with self._lock:
            self._empty()
            if self.has_unreduced or not self._exchanged:
                if self._started == 0:
                    self._bucketing.extend()
                    for bucket in self._bucketing.buckets:
                        bucket.note_programs()
                self._pass_is_open = False
                self.moments.ready_ns = now_ns()
                self._start_all()
                self._finish()

    def renew(self, *, forget: bool = False) -> None:
        """Open a new window. forget: whether the gradients have been reset, so that nothing is accumulated."""
        self._exchanged = False
        self._passes.ended = 0
        if forget:
            self.has_unreduced = False
            self._reduced.clear()
            self._bucketing.sparse.forget()
            self._empty()
        self._watch()

    def fill(self) -> None:
        """Give zeros to the parameters that have no gradient, for programs that read gradients before the first backward().

        To the exchange, these zeros are no gradients. Those to which backward() adds nothing are removed again when it ends, and
        all are removed when gradients are reset, or exchanged without a backward(), unless the program has written other values
        into them.
        """
        for bucket in self._bucketing.buckets:
            filled = bucket.fill()
            self._filled |= filled
            self._reduced -= filled.keys()

    def _empty(self, arrived: Container[int] = ()) -> None:
        """Remove the zeros of fill() from the parameters whose gradients have not arrived."""
        for index, zeros in self._filled.items():
            if index not in arrived and index in self._bucketing.places:
                number, slot = self._bucketing.places[index]
                self._bucketing.buckets[number].empty(slot, zeros)
        self._filled.clear()

    def close(self) -> None:
        """Stop exchanging, and remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        if self._thread is not None:
            self._thread.close()

    def _watch(self) -> None:
        """Hook every parameter that requires a gradient and has no hook. (Torch refuses hooks on the others.)"""
        if not any(map(_requires_grad, self._unhooked.values())):
            return
        exchange = weakref.ref(self)
        for index in [index for index, parameter in self._unhooked.items() if parameter.requires_grad]:
            hook = partial(self._on_gradient, exchange, index)
            self._hooks[index] = self._unhooked.pop(index).register_post_accumulate_grad_hook(hook)

    # While gradients arrive

    @staticmethod
    def _handle(exchange: weakref.ref[GradientExchange], index: int, parameter: Tensor) -> None:
        """Handle the gradient that autograd has just accumulated in parameter.grad. This is the hook of the parameter, and does
        not keep the exchange alive."""
        self = exchange()
        if self is None:
            return
        with self._lock:
            task = graph_task()
            if task != self._graph_task:
                self._enter_pass(task, index)
            if index not in self._bucketing.places:
                self._on_sparse_gradient(index)
                return
            number, slot = self._bucketing.places[index]
            bucket = self._bucketing.buckets[number]
            if bucket.in_flight:
                raise RuntimeError(_IN_FLIGHT.format(bucket.names[slot]))
            gradient = parameter.grad
            if gradient is not None and gradient.requires_grad:
                raise RuntimeError(_OF_A_GRAPH.format(bucket.names[slot]))
            if index in self._reduced:
                self._check_new(bucket, slot)
                self._reduced.discard(index)
            self.has_unreduced = True
            is_final = hook_runs_last(parameter, self._hooks[index])
            if not is_final:
                self._overtaken.append(index)
            elif bucket.at_once[slot]:
                bucket.collect((slot,))
            if index not in self._arrived:
                self._arrived[index] = None
                self._missing[number] -= is_final
                if not self._missing[number]:
                    self._on_full(number)

    def _check_new(self, bucket: Bucket, slot: int) -> None:
        """Raise RuntimeError if a gradient was accumulated onto the result of an exchange that it cannot be added to."""
        if self._is_old(bucket, slot):
            if self._combination.in_shares:
                raise RuntimeError(_OF_A_SHARE.format(bucket.names[slot]))
            if self._combination.op == Sum:
                raise RuntimeError(_ON_A_SUM.format(bucket.names[slot]))

    def _on_full(self, number: int) -> None:
        """Start a bucket whose gradients have all arrived, and the full ones after it, if it is the next one and the exchange
        is due; without an exchange, collect its gradients."""
        if self._passes.is_due():
            self._start(only_full=True)
        else:
            self._collect(number)

    def _collect(self, number: int) -> None:
        bucket = self._bucketing.buckets[number]
        bucket.collect(range(len(bucket.items)))

    def _on_sparse_gradient(self, index: int) -> None:
        """Handle a gradient that is not for a bucket, if it is exchanged."""
        name, sparse = self._bucketing.names[index], self._bucketing.sparse
        if index not in sparse.items:
            return
        if sparse.in_flight:
            raise RuntimeError(_IN_FLIGHT.format(name))
        gradient = self._bucketing.parameters[index].grad
        if self._combination.op == Sum and index in self._reduced and sparse.is_result(index, gradient):
            raise RuntimeError(_ON_A_SUM.format(name))
        self._reduced.discard(index)
        self.has_unreduced = True

    def _is_old(self, bucket: Bucket, slot: int) -> bool:
        """Return whether a gradient in its bucket was exchanged before and not changed by a backward() since."""
        return bucket.items[slot] in self._reduced and bucket.holds_gradient(slot)

    def _enter_pass(self, task: int, index: int) -> None:
        """Begin a pass, with the first gradient of a backward(). task: its graph task. index: of the gradient's parameter."""
        self._graph_task = task
        when_backward_ends(self._on_backward_end)
        if self._started == 0:
            self._watch()
            self._bucketing.extend()
            self._pass_is_open = True
            self.moments.began_ns = now_ns()
            self._arrived.clear()
            self._missing = [len(bucket.items) for bucket in self._bucketing.buckets]
            arrived_in, arrived = self._bucketing.places.get(index, (None, 0))
            for number, bucket in enumerate(self._bucketing.buckets):
                bucket.note_programs(arrived if number == arrived_in else None)

    # When backward() ends

    @uncompiled
    def _on_backward_end(self) -> None:
        # Do not start here: another callback, such as fully_shard's, may have gradients to assign first.
        when_backward_ends(self._on_all_arrived)

    @uncompiled
    def _on_all_arrived(self) -> None:
        with self._lock:
            if not self._pass_is_open:
                return
            self._pass_is_open = False
            while self._overtaken:
                index = self._overtaken.pop()
                run_hook_last(self._bucketing.parameters[index], self._hooks[index])
            self.moments.gradients_end()
            self._empty(self._arrived)
            is_due = self._passes.is_due()
            if not is_due:  # the full ones are collected already
                for number in [number for number, missing in enumerate(self._missing) if missing]:
                    self._collect(number)
            self._passes.ended += not self._passes.paused
            if is_due:
                self._start_all()
                # Do not wait here: another optimizer's callback may follow, and all must have started before one waits.
                when_backward_ends(self._on_all_started)

    @uncompiled
    def _on_all_started(self) -> None:
        with self._lock:
            self._finish()

    def _start(self, *, only_full: bool = False) -> None:
        """Start the buckets that are not started yet, in order. only_full: stop at the first one that lacks a gradient."""
        buckets = self._bucketing.buckets
        for number in self._order()[self._started :]:
            if only_full and self._missing[number]:
                break
            bucket = buckets[number]
            if self._reduced:
                self._prepare_old(bucket)
            self.moments.bucket_ready(number, bucket.buffer.values.nbytes)
            bucket.start(self.step, self._bucketing.residuals)
            self._started += 1
        if self._started == len(buckets) and not self._counting:
            for presence in self._bucketing.presence:
                presence.start(self.step)
            self._counting = True

    def _order(self) -> Sequence[int]:
        """Return the numbers of the buckets in the order in which all ranks start them."""
        return range(len(self._bucketing.buckets))

    def _prepare_old(self, bucket: Bucket) -> None:
        """Prepare gradients that were exchanged before and to which nothing was added: divide a sum, so that summing again
        gives the same result. Raises RuntimeError for a share."""
        if not self._combination.in_shares and self._combination.op != Sum:
            return
        for slot in (slot for slot in range(len(bucket.items)) if self._is_old(bucket, slot)):
            if self._combination.in_shares:
                raise RuntimeError(_OF_A_SHARE.format(bucket.names[slot]))
            bucket.scale(slot, 1 / self._combination.communicator.size)

    def _start_all(self) -> None:
        """Start the buckets that are not started yet; if operations depend on others, a thread completes them."""
        self._start()
        if self._sparse_started:
            return
        if self._bucketing.sparse.items:
            self._bucketing.sparse.start(self.step)
        self._sparse_started = True
        incomplete = any(bucket.is_incomplete for bucket in self._bucketing.buckets)  # other ranks may find sparse ones
        if incomplete or any(each.chained for each in self._operations()):
            self._thread = self._thread or DaemonThread("gradwire-exchange")
            work = Work(self._combination.communicator.rank, "exchange of gradients", self._complete)
            self._thread.submit(work.run)
            self._completing = work

    def _operations(self) -> list[OperationChain]:
        """Return the operations of the exchange, in the order in which all ranks begin them."""
        buckets, sparse = self._bucketing.buckets, self._bucketing.sparse
        return [*(bucket.buffer for bucket in buckets), *self._bucketing.presence, *([sparse] if sparse.items else [])]

    def _complete(self) -> None:
        """Wait for the operations that were started, and run those that depend on them."""
        operations = self._operations()
        for each in operations:
            each.wait()
        for each in operations:
            each.complete()
        found = [index for bucket in self._bucketing.buckets for index in bucket.found_sparse()]
        if found:
            self._found = self._bucketing.sparse_gradients(found)
            self._found.start(self.step)
            self._found.complete()
        self._bucketing.known_sparse.update(found)
        self._bucketing.known_sparse -= self._bucketing.sparse.found_dense

    def _finish(self) -> None:
        """Wait for all buckets, assign the gradients, and close the window."""
        buckets, sparse = self._bucketing.buckets, self._bucketing.sparse
        begin_ns = time.perf_counter_ns()
        try:
            if self._completing is None:
                self._complete()
            else:
                self._completing.wait()
            for bucket in buckets:  # when nothing can fail any more
                bucket.finish()
            if self._combination.in_shares:
                for bucket in buckets:
                    bucket.take_note()
            sparse.finish()
            if self._found is not None:
                self._found.finish()
        finally:
            self.wait_s += (time.perf_counter_ns() - begin_ns) / 1e9
            for bucket in buckets:
                bucket.in_flight = False
            sparse.in_flight = False
            self._completing = self._found = None
            self._reset()
        self.moments.exchange_ends(begin_ns)
        self._close_window()

    def _reset(self) -> None:
        """Begin the next window with nothing started."""
        self._started, self._counting, self._sparse_started = 0, False, False
        self._passes.ended = 0

    def _close_window(self) -> None:
        """Record that all gradients are exchanged."""
        self.step += 1
        self._combination.traffic.count(exchanges=1)
        self.has_unreduced = False
        self._exchanged = True
        self._reduced = {*self._bucketing.places, *self._bucketing.sparse.items}
        self._bucketing.learn(self._arrived)


@dataclass(frozen=True, eq=False)
class Weakly:
    """A hook of a module or optimizer that calls a method. It does not keep the method's object alive, and does nothing in a copy
    of the hooked object."""

    method: weakref.WeakMethod[Callable[..., None]] | None = None

    @classmethod
    def of(cls, method: Callable[..., None]) -> Weakly:
        return cls(weakref.WeakMethod(method))

    @uncompiled
    def __call__(self, *args: object) -> None:
        method = self.method() if self.method is not None else None
        if method is not None:
            method(*args)

    def __reduce__(self) -> tuple[type[Weakly], tuple[()]]:
        return Weakly, ()
