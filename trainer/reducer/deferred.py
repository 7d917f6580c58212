"""An exchange of gradients that backward() starts and does not wait for, and gradients that wait for it when used."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradwire.collectives.torch_internals import map_only, plainly
from gradwire.trainer.optimizers.wrapped import uncompiled
from gradwire.trainer.reducer.bucket import Bucket
from gradwire.trainer.reducer.bucketing import Bucketing
from gradwire.trainer.reducer.exchange import GradientExchange
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.world.world import here

_MEASURED, _MORE, _KEPT = 3, 4, 48
"""After _MEASURED steps with one layout, the ranks agree on the order in which they start its buckets. They do so again after
_MORE times as many steps, and so on, since each order changes the times a little. They use the times of the last _KEPT
steps."""


_MOVED = (
    "{}{!r} has been moved to {} on {} while its gradient was being exchanged: with rules.NextForward, call settle() of the "
    "distributed optimizer before"
)


class AwaitedGradient(Tensor):
    """A gradient that is being exchanged. Any torch function that takes it calls `settle` first, and then takes `exchanged`, the
    gradient that parameter.grad is from then on, in its place."""

    settle: Callable[[], None]
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
    awaited.settle()
    return awaited.exchanged


class DeferredExchange(GradientExchange):
    """A GradientExchange in which backward() returns when all buckets are started, and sets AwaitedGradients.

    backward() waits like that of GradientExchange while the order of arrival is being learned, and if operations depend on
    others: with sparse gradients, a codec of matrices, or a parameter that got no gradient on this rank.

    After some exchanges with one layout of the buckets, all ranks agree on the order in which they start the buckets from then
    on. The order depends on when the buckets were full and how long their exchanges took: see order_by_need().

    waiting: numbers of the buckets whose exchange has not been waited for, in the order in which they were started, the same
    on all ranks. is_pending: whether there are operations that have not been waited for. settle: completes the exchange and
    the update that depends on it. before_gradient: called with the index of a parameter whose gradient arrives while the
    exchange is pending.
    """

    settle: Callable[[], None]
    before_gradient: Callable[[int], None]

    def __init__(self, bucketing: Bucketing, setup: Setup) -> None:
        super().__init__(bucketing, setup)
        self.waiting: list[int] = []
        self.is_pending = False
        self._agreed_order: list[int] = []
        self._full_s: dict[int, float] = {}
        self._last_full: tuple[int, list[float]] = (-1, [])  # the step of an exchange, and when its buckets were full
        self._ready: deque[list[float]] = deque(maxlen=_KEPT)
        self._taken: deque[list[float]] = deque(maxlen=_KEPT)
        self._laid_out: list[Bucket] = []
        self._steps, self._agree_after = 0, _MEASURED

    def _enter_pass(self, task: int, index: int) -> None:
        if self.is_pending:
            self.before_gradient(index)
        super()._enter_pass(task, index)

    def _on_full(self, number: int) -> None:
        # Before the bucket starts, since its exchange may end before this thread continues.
        self._full_s[number] = time.perf_counter()
        super()._on_full(number)

    def wait_for(self, number: int) -> None:
        """Wait until a bucket is exchanged, and assign its gradients. Raises the error of the exchange, at every call until
        abandon()."""
        bucket = self._bucketing.buckets[number]
        begin_ns = time.perf_counter_ns()
        try:
            bucket.buffer.complete()
            bucket.finish()
            bucket.in_flight = False
            for slot, parameter in enumerate(bucket.parameters):
                if is_awaited(parameter.grad):
                    if parameter.dtype is not bucket.memory.dtype or parameter.device != bucket.memory.device:
                        raise RuntimeError(_MOVED.format(here(), bucket.names[slot], parameter.dtype, parameter.device))
                    parameter.grad = bucket.gradients[slot]
            self.waiting.remove(number)
            if not self.waiting:
                for presence in self._bucketing.presence:
                    presence.complete()
                self.is_pending = False
        finally:
            self.wait_s += (time.perf_counter_ns() - begin_ns) / 1e9
        if not self.is_pending:
            self.moments.exchange_ends(begin_ns)

    def abandon(self) -> None:
        """Discard an exchange that has failed."""
        for number in self.waiting:
            self._bucketing.buckets[number].in_flight = False
        self.waiting.clear()
        self.is_pending = False

    def agree_on_order(self) -> None:
        """Agree on the order in which to start the buckets of this layout, if enough steps are measured. Call this after each
        step. Collective when due."""
        buckets = self._bucketing.buckets
        if self._laid_out is not buckets:
            self._laid_out, self._agreed_order, self._steps, self._agree_after = buckets, [], 0, _MEASURED
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
        measured = [*filter(None, self._combination.communicator.allgather_record(mine))]
        if measured:  # empty if no backward() has reached a parameter
            # An exchange starts when the bucket is full on the last rank. Its time on that rank includes no wait for others.
            ready, taken = (zip(*ranks, strict=True) for ranks in zip(*measured, strict=True))
            self._agreed_order = order_by_need([*map(max, ready)], [*map(min, taken)])

    def _measure_last(self) -> None:
        """Add the times of the exchange before to the measurements, if it had the same buckets."""
        step, full_s = self._last_full
        buffers = [bucket.buffer for bucket in self._bucketing.buckets]
        if self._ready and len(self._ready[0]) != len(buffers):
            self._ready.clear()
            self._taken.clear()
        if buffers and step == self.step - 1 and len(full_s) == len(buffers):
            # The exchange of the first bucket (of CPU tensors) ends at about the same time on all ranks: each counts from there.
            first_s = min(buffer.ended_s for buffer in buffers)
            self._ready.append([each - first_s for each in full_s])
            self._taken.append([buffer.seconds for buffer in buffers])

    def _order(self) -> Sequence[int]:
        buckets = self._bucketing.buckets
        agreed = self._agreed_order if self._laid_out is buckets else []
        return [*agreed, *range(len(agreed), len(buckets))]

    @uncompiled
    def _on_all_started(self) -> None:
        with self._lock:
            buckets = self._bucketing.buckets
            if self._completing is None:  # else a thread is writing the times of this exchange
                self._measure_last()
            now = time.perf_counter()
            self._last_full = self.step, [self._full_s.get(number, now) for number in range(len(buckets))]
            self._full_s.clear()
            # What the program keeps in memory of its own may be read there, which nothing would notice.
            keeps = any(bucket.programs for bucket in buckets)
            if self._completing is not None or self._bucketing.is_learning or keeps:
                self._finish()
                return
            for bucket in buckets:
                gradients = bucket.gradients_in_memory(range(len(bucket.items)))
                for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
                    awaited = gradient.as_subclass(AwaitedGradient)
                    awaited.settle, awaited.exchanged = self.settle, gradient
                    parameter.grad = awaited
            self.waiting = [*self._order()]
            self.is_pending = bool(buckets)
            self._reset()
            self._close_window()


def is_awaited(gradient: Tensor | None) -> bool:
    """Return whether a gradient is being exchanged."""
    return type(gradient) is AwaitedGradient


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
