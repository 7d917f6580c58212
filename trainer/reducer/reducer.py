"""The Reducer: it exchanges gradients while backward runs. Afterwards, the gradients are equal on all ranks."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Container, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwire.collectives import CollectiveError, Mismatch
from gradwire.collectives.diagnostics.timeline import now_ns
from gradwire.collectives.torch_internals import (
    OUTSIDE_BACKWARD,
    graph_task,
    hook_runs_last,
    run_hook_last,
    uncompiled,
    when_backward_ends,
)
from gradwire.trainer.reducer.arguments import Sum, refuse_exchanged_by_ddp
from gradwire.trainer.reducer.bucket import Bucket
from gradwire.trainer.reducer.buffers import Exported
from gradwire.trainer.reducer.hooks import remove_all
from gradwire.trainer.reducer.planner import BucketLayout, BucketPlanner
from gradwire.trainer.reducer.presence import Presence
from gradwire.trainer.reducer.residuals import Residuals
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.reducer.sparse import SparseGradients
from gradwire.trainer.reducer.streams import Background, Running, refuse_capture
from gradwire.trainer.reducer.times import ExchangeTimes
from gradwire.trainer.reducer.weights import Weights, explain

_FAILED = "an earlier backward() failed midway: call synchronize(), then zero_grad()"
_IN_FLIGHT = (
    "a gradient of {!r} arrived while its last one was being exchanged: either an earlier backward() failed midway (call "
    "synchronize(), then zero_grad()), or one backward() reached the parameter twice, as a checkpoint with "
    "use_reentrant=True can"
)
_ON_A_SUM = (
    "a gradient of {!r} was accumulated onto one already summed over ranks: call zero_grad() of the distributed optimizer "
    "before, or accumulate by backward_passes_per_step or no_sync()"
)
_ON_AN_AVERAGE = (
    "several passes with weights were accumulated onto the gradient of {!r}, which is that of an earlier exchange: call "
    "zero_grad() of the distributed optimizer before"
)
_OF_A_SHARE = (
    "the gradient of {!r} is that of an earlier exchange, of which each rank has its shard only: call zero_grad() of the "
    "distributed optimizer before the next backward(), or accumulate by backward_passes_per_step or no_sync()"
)
_OF_A_GRAPH = (
    "the gradient of {!r} requires a gradient itself: backward(create_graph=True) cannot be exchanged; use "
    "torch.autograd.grad(..., create_graph=True) for the inner derivative"
)

_requires_grad, _grad_of = attrgetter("requires_grad"), attrgetter("grad")


class Deferral(Protocol):
    """Decides for a Reducer in which order the buckets are launched, and whether backward() waits for their exchange."""

    def before_pass(self, index: int) -> None:
        """Prepare for a backward(), whose first gradient is that of the parameter with this index."""

    def on_full(self, bucket: Bucket) -> None:
        """Note that all gradients of a bucket have arrived. The bucket is launched after this."""

    @property
    def order(self) -> Sequence[Bucket]:
        """Return the buckets in the order in which all ranks launch them."""

    def defers(self) -> bool:
        """Return whether backward() returns without a wait for the buckets, which are all launched."""


class Reducer:
    """Owns the exchange of the gradients of some parameters: the hooks of the parameters, the buckets with their
    residuals, and the residuals in between.

    It hooks each parameter, fills the buckets, and launches them in the same order on all ranks. A *pass* is one backward() that
    reaches at least one of the parameters. A *window* ends in an exchange of every bucket: in the pass that is due by `passes`,
    or in flush(). Ranks may differ in the parameters that their backward() reaches, even in whether it reaches any, but must go
    through the same windows.

    The exchange is done when backward() returns: buckets are launched as soon as they are full, unless the plan exchanges all of
    them at the end, and callbacks at the end of backward launch the others and wait. A thread of this Reducer begins operations
    that depend on others: one backward() may reach parameters of several Reducers, for which ranks may wait in different orders.

    step: the number of exchanges so far. wait_s: seconds for which callers have waited for unfinished exchanges. has_unreduced:
    whether gradients were accumulated that have not been exchanged. times: of the last exchanges. layout: where each gradient is
    exchanged now. planner: makes the layouts; it has the parameters, which are identified by their index. residuals: those
    that no buffer holds, while buckets are replaced. weights: of this rank's gradients. deferral: None waits for the exchange in
    backward().
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.step = 0
        self.wait_s = 0.0
        self.has_unreduced = False
        self.times = ExchangeTimes(setup.communicator)
        self.planner = BucketPlanner(setup)
        self.layout = self.planner.layout()
        self.residuals = Residuals()
        self.weights = Weights()
        self.deferral: Deferral | None = None
        self._hooks: dict[int, RemovableHandle] = {}
        weakref.finalize(self, remove_all, self._hooks.values())  # if there is no close()
        self._unhooked: dict[int, Tensor] = {}
        self._lock = threading.Lock()  # autograd calls hooks from one thread per device

        self._graph_task = OUTSIDE_BACKWARD
        self._pass_is_open = False
        self._arrived: dict[int, None] = {}
        # Parameters with hooks that run after this one, so that their gradients may change.
        self._overtaken: list[int] = []
        self._launched, self._all_launched, self._is_incomplete = 0, False, False
        self._found: SparseGradients | None = None
        self._unread: Presence | None = None  # that of the last exchange, if this rank had all gradients
        self._completing: Running | None = None
        self._background: Background | None = None

        self._exchanged = False
        # Whether it is known that nothing else exchanges these gradients.
        self._is_alone = setup.communicator.size == 1
        self._is_average = not (setup.in_shares or setup.op == Sum)
        # By parameter, the results to which backward() must not add: sums, shares, and averages with weights in several passes.
        self._results: dict[int, Tensor] = {}
        self._filled: dict[int, Tensor] = {}

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Return the current buckets."""
        return self.layout.buckets

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters, by index."""
        return self.planner.parameters

    @property
    def names(self) -> list[str]:
        """Return the names of the parameters, by index."""
        return self.planner.names

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Add parameters. The exchange of this window includes them. Raises ValueError, with nothing added, if a
        DistributedDataParallel exchanges their gradients."""
        if self.setup.communicator.size > 1:
            refuse_exchanged_by_ddp(self.setup.communicator.rank, names, parameters)
        indices = self.planner.add(names, parameters, self.layout)
        self._unhooked |= zip(indices, parameters, strict=True)
        for index in self.planner.removed:
            self._unhooked.pop(index, None)
            if index in self._hooks:
                self._hooks.pop(index).remove()
        self._exchanged = False
        self._hook_parameters()

    def close(self) -> None:
        """Stop exchanging, and remove the hooks."""
        remove_all(self._hooks.values())
        if self._background is not None:
            self._background.close()
        with suppress(CollectiveError):  # of an exchange that has failed since
            self.check_last()

    def _hook_parameters(self) -> None:
        """Hook every parameter that requires a gradient and has no hook. (Torch refuses hooks on the others.)"""
        if not any(map(_requires_grad, self._unhooked.values())):
            return
        reducer = weakref.ref(self)
        for index in [index for index, parameter in self._unhooked.items() if parameter.requires_grad]:
            hook = partial(Reducer._ready, reducer, index)
            self._hooks[index] = self._unhooked.pop(index).register_post_accumulate_grad_hook(hook)

    # Layouts

    def rebuild(self, *, counts: bool = True) -> None:
        """Replace the layout if that is due, and begin a new window. Collective in some steps. Raises ValueError on all ranks if
        they have different parameters, and after the first exchange if a DistributedDataParallel exchanges their gradients, too.
        counts: False on a rank that has joined, whose steps compression="auto" does not measure."""
        if not self._is_alone and self.setup.traffic.stats.exchanges:
            self._is_alone = True
            refuse_exchanged_by_ddp(self.setup.communicator.rank, self.names, self.parameters)
        if self.planner.is_due:
            self._rebuild()
        if self.planner.choice is not None and not self.planner.choice.settled:
            self.check_last()
            self.planner.follow_choice(self.layout, self.step, counts=counts)
        if self.planner.trials is not None and not self.planner.trials.settled:
            waited_s = 1e-9 * self.times.last[-1].waited_ns if self.times.last else 0.0
            self.planner.follow_trials(self.layout, self.step, waited_s, counts=counts)
        self.open_window()

    def _rebuild(self) -> None:
        """Replace the layout, and move the gradients and residuals. Collective."""
        planner = self.planner
        self.check_last()
        before, layout = self.layout, planner.agreed(self.layout)
        for buffer in before.coded:
            self.residuals.export(buffer)
        self._adopt(layout)
        planner.release_removed()
        self.residuals.discard(planner.removed)
        for index in set(before.sparse.items) & layout.places.keys():  # their gradients are dense
            result = planner.sparse_results.pop(index, None)
            if result is not None and result is self.parameters[index].grad:
                bucket, slot = layout.places[index]
                bucket.copy_slots([slot])

    def _adopt_extended(self, layout: BucketLayout) -> None:
        """Replace the layout by one with buckets for parameters that were unfrozen or moved. Sends nothing."""
        for bucket in self.layout.buckets:
            if bucket.coded is not None and bucket not in layout.buckets:
                self.residuals.export_local(bucket.coded)
        self._adopt(layout)

    def _adopt(self, layout: BucketLayout) -> None:
        """Replace the layout, and move the gradients and the residuals that wait."""
        before, self.layout = self.layout, layout
        self.times.on = layout.gpus[0] if layout.gpus else None
        self.planner.adopt(layout)
        for buffer in layout.coded:
            self.residuals.import_into(buffer)
        for index in layout.places.keys() & before.places.keys():
            bucket, slot = layout.places[index]
            if bucket is not before.places[index][0]:
                gradient = bucket.parameters[slot].grad
                bucket.take_over(slot, *before.places[index])
                moved = bucket.parameters[slot].grad
                if moved is not None and gradient is self._results.get(index):
                    self._results[index] = moved

    # Windows

    def open_window(self, *, forget: bool = False) -> None:
        """Begin a new window. forget: whether the gradients have been reset, so that nothing is accumulated."""
        self._exchanged = False
        self.setup.passes.ended = 0
        if forget:
            self.has_unreduced = False
            if self.weights.is_used:
                self.weights.forget()
            self._results.clear()
            self.planner.sparse_results.clear()
            if self._filled:
                self._empty()
        if self._unhooked:
            self._hook_parameters()

    def weigh(self, samples: float | Tensor) -> None:
        """Set how many samples the gradients of the next pass stand for."""
        with self._lock:
            if self._unhooked:
                self._hook_parameters()
            self.weights.weigh(samples, self._accumulated() if self.has_unreduced else {})

    def _accumulated(self) -> dict[int, Tensor]:
        """Return the existing gradients, by parameter."""
        return {index: grad for index, grad in enumerate(map(_grad_of, self.parameters)) if grad is not None}

    def flush(self) -> None:
        """Exchange now, unless this window's exchange is done and nothing was accumulated since."""
        with self._lock:
            if self._filled:
                self._empty()
            if self.has_unreduced or not self._exchanged:
                if self.layout.gpus:
                    refuse_capture(self.setup.communicator.rank)
                if self._launched == 0:
                    if (layout := self.planner.extended(self.layout)) is not None:
                        self._adopt_extended(layout)
                    for bucket in self.layout.buckets:
                        bucket.open()
                self._pass_is_open = False
                self.times.exchange_begins()
                self._launch_all()
                self.wait()

    def fill(self) -> None:
        """Give zeros to the parameters that have no gradient, for programs that read gradients before the first backward().

        To the exchange, these zeros are no gradients. Those to which backward() adds nothing are removed again when it ends, and
        all are removed when gradients are reset, or exchanged without a backward(), unless the program has written other values
        into them.
        """
        for bucket in self.layout.buckets:
            filled = bucket.fill()
            self._filled |= filled
            for index in filled:
                self._results.pop(index, None)

    def _empty(self, arrived: Container[int] = ()) -> None:
        """Remove the zeros of fill() from the parameters whose gradients have not arrived."""
        for index, zeros in self._filled.items():
            if index not in arrived and index in self.layout.places:
                bucket, slot = self.layout.places[index]
                bucket.empty(slot, zeros)
        self._filled.clear()

    # While gradients arrive

    @staticmethod
    @uncompiled
    def _ready(reducer: weakref.ref[Reducer], index: int, parameter: Tensor) -> None:
        """Take the gradient that autograd has just accumulated in parameter.grad. This is the hook of the parameter, and does
        not keep the Reducer alive."""
        self = reducer()
        if self is None:
            return
        with self._lock:
            task = graph_task()
            if task != self._graph_task:
                self._begin_pass(task, index)
            place = self.layout.places.get(index)
            if place is None:
                self._sparse_ready(index)
                return
            bucket, slot = place
            if bucket.streams is not None:
                bucket.streams.note()
            if bucket.in_flight:
                raise RuntimeError(_IN_FLIGHT.format(bucket.names[slot]))
            gradient = parameter.grad
            if gradient is not None and gradient.requires_grad:
                raise RuntimeError(_OF_A_GRAPH.format(bucket.names[slot]))
            if self._results and self._results.pop(index, None) is gradient is not None and not self._is_average:
                raise RuntimeError((_OF_A_SHARE if self.setup.in_shares else _ON_A_SUM).format(bucket.names[slot]))
            if self.weights.is_used and self.weights.discards_pass and gradient is not None:
                parameter.grad = self.weights.undo_pass(index, gradient)
            self.has_unreduced = True
            is_final = hook_runs_last(parameter, self._hooks[index])
            if not is_final:
                self._overtaken.append(index)
            elif bucket.at_once[slot]:
                bucket.copy_slots((slot,))
            if index not in self._arrived:
                self._arrived[index] = None
                bucket.missing -= is_final
                if not bucket.missing:
                    self._on_full(bucket)

    def _begin_pass(self, task: int, index: int) -> None:
        """Begin a pass, with the first gradient of a backward(). task: its graph task. index: of the gradient's parameter."""
        if self.layout.gpus:
            refuse_capture(self.setup.communicator.rank)
        if self.deferral is not None:
            self.deferral.before_pass(index)
        self._graph_task = task
        when_backward_ends(self._on_backward_end)
        if self._launched == 0:
            if self._unhooked:
                self._hook_parameters()
            if (layout := self.planner.extended(self.layout)) is not None:
                self._adopt_extended(layout)
            self._pass_is_open = True
            self.times.began_ns = now_ns()
            self._arrived.clear()
            arrived_in, slot = self.layout.places.get(index, (None, 0))
            for bucket in self.layout.buckets:
                bucket.open(slot if bucket is arrived_in else None)
            if self.weights.is_used:
                self._weigh_pass()

    def _weigh_pass(self) -> None:
        """Count the samples of a pass. If its gradients are exchanged beside backward(), begin to sum those of all ranks."""
        if self.weights.sum is not None:
            raise RuntimeError(_FAILED)
        self.weights.begin_pass()
        is_due = self.setup.passes.is_due()
        if self._is_average and not (is_due and self.weights.passes == 1):
            self._refuse_results(_ON_AN_AVERAGE)
        if is_due and not self.planner.plan.at_end:
            self.check_last()
            self._begin_sum()

    def _begin_sum(self, *, awaited: bool = False) -> None:
        """Begin to sum the samples of all ranks, unless that has begun. awaited: see PreparedOperation.start()."""
        if self.setup.op == Sum:
            self._refuse_results(_ON_A_SUM)
        self.weights.begin(self.setup.communicator, awaited=awaited)

    def _refuse_results(self, message: str) -> None:
        """Let all ranks raise ValueError if a gradient is that of an earlier exchange, which has other weights."""
        for index, result in self._results.items():
            if self.parameters[index].grad is result:
                self.weights.fail(message.format(self.names[index]))

    def _on_full(self, bucket: Bucket) -> None:
        """Launch a bucket whose gradients have all arrived, and the full ones after it, if it is the next one and the exchange
        is due; without an exchange, copy its gradients in."""
        if self.deferral is not None:
            self.deferral.on_full(bucket)
        weights = self.weights
        is_known = not weights.is_used or weights.are_known
        if self.setup.passes.is_due() and not self.planner.plan.at_end and is_known:
            self._launch(only_full=True)
        else:
            bucket.copy_in()

    def _sparse_ready(self, index: int) -> None:
        """Take a gradient that is not for a bucket, if it is exchanged."""
        name, sparse = self.names[index], self.layout.sparse
        if index not in sparse.items:
            return
        if sparse.in_flight:
            raise RuntimeError(_IN_FLIGHT.format(name))
        parameter = self.parameters[index]
        if self._results.pop(index, None) is parameter.grad is not None and not self._is_average:
            raise RuntimeError(_ON_A_SUM.format(name))
        if self.weights.is_used and self.weights.discards_pass and parameter.grad is not None:
            parameter.grad = self.weights.undo_pass(index, parameter.grad)
        self.has_unreduced = True

    # When backward() ends

    @uncompiled
    def _on_backward_end(self) -> None:
        # Launch nothing here: another callback, such as fully_shard's, may have gradients to assign first.
        when_backward_ends(self._on_all_arrived)

    @uncompiled
    def _on_all_arrived(self) -> None:
        with self._lock:
            if not self._pass_is_open:
                return
            self._pass_is_open = False
            while self._overtaken:
                index = self._overtaken.pop()
                run_hook_last(self.parameters[index], self._hooks[index])
            self.times.gradients_end()
            if self._filled:
                self._empty(self._arrived)
            passes = self.setup.passes
            is_due = passes.is_due()
            passes.ended += not passes.paused
            # Do not wait here: another optimizer's callback may follow, and all must be launched before one waits.
            if is_due and self.weights.is_used:
                self._begin_sum(awaited=True)
                with _in_flight_lock:
                    _in_flight.add(self)
                when_backward_ends(self._on_all_weighed)
            elif is_due:
                self._launch_all()
                when_backward_ends(self._on_all_launched)
            else:  # the full ones are copied already
                for bucket in self.layout.buckets:
                    if bucket.missing:
                        bucket.copy_in()
                if self.weights.is_used:
                    self.weights.end_pass(self._accumulated())

    @uncompiled
    def _on_all_weighed(self) -> None:
        with self._lock:
            self._launch_all()
            when_backward_ends(self._on_all_launched)

    @uncompiled
    def _on_all_launched(self) -> None:
        with self._lock:
            if self.deferral is None or not self.deferral.defers():
                self.wait()

    def _launch(self, *, only_full: bool = False) -> None:
        """Launch the buckets that are not launched yet, in order. only_full: stop at the first one that lacks a gradient."""
        layout = self.layout
        order = layout.buckets if self.deferral is None else self.deferral.order
        may_await = self.deferral is None and not layout.is_chained  # else another thread waits
        if self._unread is not None:
            self.check_last()
        if self.weights.is_used and self._launched == 0:
            self._agree_on_weights()
        while self._launched < len(order):
            bucket = order[self._launched]
            if only_full and bucket.missing:
                return
            if self._results and not self._is_average:
                self._prepare_results(bucket)
            self.times.bucket_ready(bucket.number, bucket.buffer.values.nbytes)
            awaited = may_await and (self.planner.plan.at_end or self._launched + 1 == len(order))
            if not self.weights.factor:
                bucket.discard()
            bucket.launch(self.step, self.residuals, self.weights.factor, awaited=awaited)
            self._is_incomplete |= bool(bucket.absent)
            self._launched += 1
            if self._launched == len(order) and layout.presence.buffers:
                layout.presence.start(self.step, awaited=may_await)

    def _prepare_results(self, bucket: Bucket) -> None:
        """Prepare gradients that were exchanged before and to which nothing was added: divide a sum, so that summing again
        gives the same result. Raises RuntimeError for a share."""
        for slot, (index, parameter) in enumerate(zip(bucket.items, bucket.parameters, strict=True)):
            if parameter.grad is not None and parameter.grad is self._results.get(index):
                if self.setup.in_shares:
                    raise RuntimeError(_OF_A_SHARE.format(bucket.names[slot]))
                bucket.scale(slot, 1 / self.setup.communicator.size)

    def _agree_on_weights(self) -> None:
        """Wait until the samples of all ranks are known."""
        if not self.weights.are_known:
            self._begin_sum(awaited=True)
            self._let_others_begin()
        self.weights.agree(self.setup)

    def _let_others_begin(self) -> None:
        """Let the operations of the other Reducers begin, before this thread waits."""
        with _in_flight_lock:
            _in_flight.discard(self)
            others = list(_in_flight)
        for other in others:
            other.begin()

    def _launch_all(self) -> None:
        """Launch all that is not launched yet; if operations depend on others, a thread completes them."""
        self._launch()
        if self._all_launched:
            return
        layout = self.layout
        if layout.sparse.items:
            if not self.weights.factor:
                layout.sparse.discard()
            layout.sparse.start(self.step, self.weights.factor)
        self._all_launched = True
        with _in_flight_lock:
            _in_flight.add(self)
        if layout.is_chained or self._is_incomplete:  # other ranks may find sparse ones
            self._background = self._background or Background("gradwire-exchange")
            self._completing = self._background.submit(self.complete, layout.gpus)

    def begin(self) -> None:
        """Let all operations that were launched begin, before this thread waits for others."""
        if (summed := self.weights.sum) is not None:
            summed.begin()
        for each in self.layout.operations:
            each.begin()

    @property
    def is_completing(self) -> bool:
        """Return whether a thread completes the exchange."""
        return self._completing is not None

    def complete(self) -> None:
        """Wait for the operations that were launched, and run those that depend on them. Raises ValueError on all ranks if a
        gradient in a bucket is sparse on one rank and dense on another."""
        layout = self.layout
        for each in layout.operations:
            each.wait()
        if layout.is_chained:
            for each in layout.operations:
                each.complete()
        if layout.presence.is_on_gpu:
            layout.presence.copy()
            if not self._is_incomplete:
                self._unread = layout.presence
        # Also if all gradients are dense here, since this rank must take part in what the others do.
        if self._unread is None and (found := layout.presence.read()):
            self._exchange_found(found, was_dense=False)
        if layout.sparse.found_dense:
            self.planner.learn_sparse((), layout.sparse.found_dense)

    def _exchange_found(self, found: Sequence[int], *, was_dense: bool) -> None:
        """Exchange the sparse gradients that ranks have found in buckets, and record that they are sparse. was_dense: whether all
        gradients of this rank were dense."""
        gradients = self.planner.sparse_gradients(found, was_dense)
        gradients.start(self.step, self.weights.factor)
        gradients.complete()
        self._found = gradients
        self.planner.learn_sparse(found, ())

    def check_last(self) -> None:
        """Raise ValueError on all ranks if the last exchange, whose gradients were all dense on this rank, had a sparse one on
        another, which waits for this rank to take part. Does nothing if that is known, as it always is on the CPU."""
        presence, self._unread = self._unread, None
        if presence is not None and (found := presence.read()):
            self._exchange_found(found, was_dense=True)

    def wait(self) -> None:
        """Wait for the exchange of all buckets, assign the gradients, and close the window."""
        layout = self.layout
        begin_ns = time.perf_counter_ns()
        self._let_others_begin()
        try:
            if self._completing is None:
                self.complete()
            else:
                self._completing.wait()
            for bucket in layout.buckets:  # when nothing can fail any more
                bucket.finalize()
            if self.setup.in_shares:
                for bucket in layout.buckets:
                    bucket.record_versions()
            if layout.sparse.items:
                layout.sparse.assign()
            if self._found is not None:
                self._found.assign()
        except Mismatch as error:
            explain(error)
            raise
        finally:
            self.wait_s += (time.perf_counter_ns() - begin_ns) / 1e9
            for bucket in layout.buckets:
                bucket.in_flight = False
            layout.sparse.in_flight = False
            self._completing = self._found = None
            self._launched, self._all_launched, self._is_incomplete = 0, False, False
            self.setup.passes.ended = 0
        self.times.exchange_ends(begin_ns)
        self.close_window()

    def close_window(self) -> None:
        """Record that all gradients are exchanged, or will be when they are used."""
        self._launched, self._all_launched, self._is_incomplete = 0, False, False
        self.setup.passes.ended = 0
        self.step += 1
        self.setup.traffic.count(exchanges=1)
        self.has_unreduced = False
        self._exchanged = True
        if self.weights.is_used:
            self.weights.close()
        if not self._is_average or self.weights.is_used:
            places = self.layout.places.items()
            self._results = {
                **{index: bucket.own_grads.get(slot, bucket.gradients[slot]) for index, (bucket, slot) in places},
                **self.planner.sparse_results,
            }
        if self.planner.is_learning:
            self.planner.learn(self._arrived)

    # Checkpoints

    @property
    def is_idle(self) -> bool:
        """Return whether no gradients are being exchanged."""
        return not any(bucket.in_flight for bucket in self.layout.buckets)

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next exchanges need, beside the parameters and the optimizer."""
        return {
            "step": self.step,
            "parameters": self.planner.described(),
            **self.planner.state_dict(),
            "sparse": list(self.layout.sparse.items),
            "buckets": [
                {"parameters": list(bucket.items)} if bucket.coded is None else bucket.coded.state_dict()
                for bucket in self.layout.buckets
            ],
            "waiting": dict(self.residuals.exported),
        }

    def restored(self, state: dict[str, Any]) -> BucketLayout | None:
        """Return the layout of a state_dict(), with the state of its buckets, for load_state_dict(); None if parameters, codecs
        or ranks differ from the saved ones."""
        buckets = self.planner.restored(state["buckets"])
        return None if buckets is None else self.planner.layout(buckets, state.get("sparse", ()))

    def load_state_dict(self, state: dict[str, Any], layout: BucketLayout) -> None:
        """Continue from a state_dict(). layout: from restored()."""
        self._restart_choice()
        self.step = state["step"]
        self.residuals.replace(state["waiting"])
        self.planner.load_state_dict(state)
        self._adopt(layout)

    def restart(self, step: int, residuals: dict[int, Exported]) -> None:
        """Keep the buckets, and replace all residuals by these, by parameter, the same on all ranks. step: the number of
        earlier exchanges."""
        self.step = step
        for buffer in self.layout.coded:
            buffer.restart()
        self._restart_choice()
        self.residuals.replace(residuals)
        for buffer in self.layout.coded:
            self.residuals.import_into(buffer)

    def _restart_choice(self) -> None:
        """Discard the measured steps, and measure anew."""
        if self.planner.choice is not None:
            self.planner.choice.restart()


#: Those of this process that have launched all buckets, and have not waited for them. One backward() may reach the parameters of
#: several Reducers, and ranks may wait for them in different orders. So before the thread waits for one, and runs its operations,
#: it lets the operations of the others begin. Threads change this: hvd.join() waits for several Reducers in threads.
_in_flight: weakref.WeakSet[Reducer] = weakref.WeakSet()
_in_flight_lock = threading.Lock()
