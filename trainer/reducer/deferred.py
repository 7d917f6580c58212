"""The wait of rules.NextForward: backward() launches the buckets and does not wait, and gradients wait when they are used."""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradwire.collectives.torch_internals import map_only, plainly
from gradwire.trainer.reducer.bucket import Bucket
from gradwire.trainer.reducer.planner import BucketLayout
from gradwire.trainer.reducer.reducer import Reducer

_MEASURED, _MORE, _KEPT = 3, 4, 48
"""After _MEASURED steps with one layout, the ranks agree on the order in which they launch its buckets. They do so again after
_MORE times as many steps, and so on, since each order changes the times a little. They use the times of the last _KEPT
steps."""

_MOVED = (
    "rank {}: {!r} has been moved to {} on {} while its gradient was being exchanged: with rules.NextForward, call settle() of "
    "the distributed optimizer before"
)
_DELETED = (
    "rank {}: a gradient is used whose exchange was not complete when the DistributedOptimizer was deleted: with "
    "rules.NextForward, call its settle() before"
)


class AwaitedGradient(Tensor):
    """A gradient that is being exchanged. Any torch function that takes it completes the exchange first, and then takes
    `exchanged`, the gradient that parameter.grad is from then on, in its place."""

    pending: Pending
    exchanged: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = map_only(AwaitedGradient, _settled, (args, kwargs))
        return plainly(func, args, kwargs or {})

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Give the gradient other memory; torch does not call __torch_function__ for this method."""
        return self.__torch_function__(Tensor.set_, (), (self, *args), kwargs)  # type: ignore[no-any-return]


def _settled(awaited: AwaitedGradient) -> Tensor:
    awaited.pending.settle()
    return awaited.exchanged


def is_awaited(gradient: Tensor | None) -> bool:
    """Return whether a gradient is being exchanged."""
    return type(gradient) is AwaitedGradient


@dataclass(eq=False)
class Pending:
    """Says whether an exchange has operations that have not been waited for. AwaitedGradients have it, and it does not keep the
    optimizer alive. complete: completes the exchange, and does nothing once the optimizer is deleted."""

    complete: Callable[[], None]
    rank: int
    is_pending: bool = False

    def settle(self) -> None:
        """Complete the exchange. Raises RuntimeError if the optimizer was deleted before it was complete."""
        self.complete()
        if self.is_pending:
            raise RuntimeError(_DELETED.format(self.rank))


class DeferredWait:
    """The Deferral of a Reducer whose backward() returns when all buckets are launched, and sets AwaitedGradients.

    backward() waits nevertheless while the order of arrival is being learned, and if operations depend on others: with sparse
    gradients, a codec of matrices, or a parameter that got no gradient on this rank.

    After some exchanges with one layout of the buckets, all ranks agree on the order in which they launch the buckets from then
    on. The order depends on when the buckets were full and how long their exchanges took: see order_by_need(). Buckets on GPUs
    are launched in the order in which they are full.

    settle: completes the exchange and the update that depends on it; does nothing once the optimizer is deleted. before_gradient:
    called with the index of a parameter whose gradient arrives while the exchange is pending.

    waiting: the buckets whose exchange has not been waited for, in the order in which they were launched, the same on all ranks.
    exchange: says whether there are any.
    """

    def __init__(self, reducer: Reducer, settle: Callable[[], None], before_gradient: Callable[[int], None]) -> None:
        self.waiting: list[Bucket] = []
        self.exchange = Pending(settle, reducer.setup.communicator.rank)
        self._reducer: Reducer = weakref.proxy(reducer)  # it has this as its deferral
        self._before_gradient = before_gradient
        self._layout: BucketLayout | None = None  # of which the rest is known
        self._order: list[Bucket] = []
        self._full_s: dict[Bucket, float] = {}
        self._last_full: tuple[int, list[float]] = (-1, [])  # the step of an exchange, and when its buckets were full
        self._ready: deque[list[float]] = deque(maxlen=_KEPT)
        self._taken: deque[list[float]] = deque(maxlen=_KEPT)
        self._steps, self._agree_after = 0, _MEASURED

    def before_pass(self, index: int) -> None:
        if self.exchange.is_pending:
            self._before_gradient(index)

    def on_full(self, bucket: Bucket) -> None:
        # Before the bucket is launched, since its exchange may end before this thread continues.
        self._full_s[bucket] = time.perf_counter()

    @property
    def order(self) -> Sequence[Bucket]:
        return self._order if self._order and self._layout is self._reducer.layout else self._reducer.buckets

    def defers(self) -> bool:
        reducer, buckets = self._reducer, self._reducer.buckets
        if not reducer.is_completing:  # else a thread is writing the times of this exchange
            self._measure_last()
        now = time.perf_counter()
        self._last_full = reducer.step, [self._full_s.get(bucket, now) for bucket in buckets]
        self._full_s.clear()
        # What the program keeps in memory of its own may be read there, which nothing would notice.
        keeps = any(bucket.own_grads for bucket in buckets)
        if reducer.is_completing or reducer.planner.is_learning or keeps:
            return False
        for bucket in buckets:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients_in_memory(), strict=True):
                awaited = gradient.as_subclass(AwaitedGradient)
                awaited.pending, awaited.exchanged = self.exchange, gradient
                parameter.grad = awaited
        self.waiting = [*self.order]
        self.exchange.is_pending = bool(buckets)
        reducer.close_window()
        return True

    def wait_for(self, bucket: Bucket) -> None:
        """Wait until a bucket is exchanged, and assign its gradients. Raises the error of the exchange, at every call until
        abandon()."""
        reducer = self._reducer
        begin_ns = time.perf_counter_ns()
        try:
            bucket.buffer.complete()
            bucket.finalize()
            bucket.in_flight = False
            for slot, parameter in enumerate(bucket.parameters):
                if is_awaited(parameter.grad):
                    if parameter.dtype is not bucket.memory.dtype or parameter.device != bucket.memory.device:
                        rank, name = reducer.setup.communicator.rank, bucket.names[slot]
                        raise RuntimeError(_MOVED.format(rank, name, parameter.dtype, parameter.device))
                    parameter.grad = bucket.gradients[slot]
            self.waiting.remove(bucket)
            if not self.waiting:
                self.exchange.is_pending = False
                reducer.complete()
        finally:
            reducer.wait_s += (time.perf_counter_ns() - begin_ns) / 1e9
        if not self.exchange.is_pending:
            reducer.times.exchange_ends(begin_ns)

    def abandon(self) -> None:
        """Discard an exchange that has failed."""
        for bucket in self.waiting:
            bucket.in_flight = False
        self.waiting.clear()
        self.exchange.is_pending = False

    def agree_on_order(self) -> None:
        """Agree on the order in which to launch the buckets of this layout, if enough steps are measured. Call this after each
        step. Collective when due."""
        reducer = self._reducer
        if reducer.layout.gpus:  # the host does not know when a GPU has filled a bucket
            return
        if self._layout is not reducer.layout:
            self._layout, self._order, self._steps, self._agree_after = reducer.layout, [], 0, _MEASURED
            self._last_full = -1, []
            self._ready.clear()
            self._taken.clear()
            return
        self._steps += 1
        if self._steps < self._agree_after:
            return
        self._agree_after *= _MORE
        steps = filter(None, (self._ready, self._taken))
        mine = [[*map(statistics.median, zip(*each, strict=True))] for each in steps]
        measured = [*filter(None, reducer.setup.communicator.allgather_record(mine))]
        if measured:  # empty if no backward() has reached a parameter
            # An exchange starts when the bucket is full on the last rank. Its time on that rank includes no wait for others.
            ready, taken = (zip(*ranks, strict=True) for ranks in zip(*measured, strict=True))
            numbers = order_by_need([*map(max, ready)], [*map(min, taken)])
            self._order = [reducer.buckets[number] for number in numbers]

    def _measure_last(self) -> None:
        """Add the times of the exchange before to the measurements, if it had the same buckets."""
        step, full_s = self._last_full
        buffers = [bucket.buffer for bucket in self._reducer.buckets]
        if self._ready and len(self._ready[0]) != len(buffers):
            self._ready.clear()
            self._taken.clear()
        if buffers and step == self._reducer.step - 1 and len(full_s) == len(buffers):
            # The exchange of the first bucket (of CPU tensors) ends at about the same time on all ranks: each counts from there.
            first_s = min(buffer.ended_s for buffer in buffers)
            self._ready.append([each - first_s for each in full_s])
            self._taken.append([buffer.exchange_s for buffer in buffers])


def order_by_need(ready_s: Sequence[float], exchange_s: Sequence[float]) -> list[int]:
    """Return the order in which to exchange buckets one after the other: of the full buckets, always the one that the next
    forward needs first (P3, Jayarajan et al. 2019). So of buckets that are full at the same time, the one needed last is
    exchanged last, and the network has work for as long as possible.

    ready_s: when each bucket is full, in seconds since one moment; may be negative. exchange_s: how long its exchange takes.
    Buckets are numbered as backward() fills them, so the forward needs those with the highest numbers first.
    """
    waiting, order, now_s = set(range(len(ready_s))), [], -math.inf
    while waiting:
        now_s = max(now_s, min(ready_s[number] for number in waiting))
        following = max(number for number in waiting if ready_s[number] <= now_s)
        now_s += exchange_s[following]
        waiting.remove(following)
        order.append(following)
    return order
