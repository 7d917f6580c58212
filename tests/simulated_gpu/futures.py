"""What torch.futures.Future does with devices, and DDP's waits for such futures, which are in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from tests.simulated_gpu.cuda import Event, current_stream
from tests.simulated_gpu.memory import device_of
from tests.simulated_gpu.operators import making

_make, _set_result, _wait, _then = Future.__init__, Future.set_result, Future.wait, Future.then


def _init(self: Any, *, devices: Any = None) -> None:
    """A future that is made in backward() is waited for at the end of it, as DDP does in C++."""
    _make(self)
    self._devices = [device for each in devices or () if (device := torch.device(each)).type == "cuda"]
    self._events = []
    if self._devices and torch._C._current_graph_task_id() != -1:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _order_after(self))


def _order_after(future: Any) -> None:
    try:
        _wait(future)
    except Exception:
        return  # DDP raises it
    _order(future)


def _order(future: Any) -> None:
    """Let the current streams wait for those that were current in set_result()."""
    for event in getattr(future, "_events", ()):
        current_stream(event.device).wait_event(event)


def _setting(self: Any, result: Any) -> None:
    if getattr(self, "_devices", None):
        self._events = [current_stream(each).record_event() for each in self._devices]
    _set_result(self, result)


def _waiting(self: Any) -> Any:
    value = _wait(self)
    _order(self)
    return value


def _chained(self: Any, callback: Callable[[Any], Any]) -> Any:
    def run(_: Any) -> Any:
        _order(self)
        return callback(self)

    return _then(self, run)


def future_after(event: Event, value: Any) -> Any:
    """Return a future of a value that is there after an event."""
    made: Any = Future(devices=[event.device])  # type: ignore[list-item]
    made._events = [event]
    _set_result(made, value)
    return made


class Reducer(dist.Reducer):  # type: ignore[misc,name-defined]
    """DDP's reducer, whose buckets are on the device of the parameters."""

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._device = device_of(next(iter(params)))
        with making(self._device):
            super().__init__(params, *args, **kwargs)

    def _rebuild_buckets(self) -> Any:
        with making(self._device):
            return super()._rebuild_buckets()


def install() -> None:
    """Put the stand-ins in the places of torch's."""
    kind: Any = Future
    kind.__init__, kind.set_result, kind.wait, kind.then = _init, _setting, _waiting, _chained
    dist.Reducer = Reducer  # type: ignore[attr-defined]
