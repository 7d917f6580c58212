"""What stands in for torch.cuda: devices, streams and events."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from tests.simulated_gpu import clocks
from tests.simulated_gpu.clocks import Clock, Timeline, closed_gates, known, learn, merged, pass_gates
from tests.simulated_gpu.waits import queries, waits

DEVICES = 2


def index_of(device: Any) -> int:
    """Return the index of a device, as torch.cuda's functions take it: None and 'cuda' mean the current one."""
    if device is None:
        return current.device
    if isinstance(device, int):
        return device if device >= 0 else current.device
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return current.device if device.index is None else int(device.index)


class Stream(Timeline):
    """Stands in for torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", **_: Any) -> None:
        super().__init__(torch.device("cuda", index_of(device)), name)
        self.priority = priority
        self.cuda_stream = self.stream_id = self.number
        self.device_index = self.device.index
        self.device_type = 1

    def wait_event(self, event: Event) -> None:
        self.wait_for(merged(event.clock, known()))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        synchronize_with(self.clock, "Stream.synchronize()")

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


class Event:
    """Stands in for torch.cuda.Event."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        self.clock: Clock = {}
        self.device: torch.device | None = None
        self.asked_by: Counter[int] = Counter()  # how often each thread has asked for it
        self._timed = enable_timing
        self._recorded_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        self.asked_by.clear()
        self.clock, self.device, self._recorded_s = merged(stream.clock, known()), stream.device, time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        if not self.clock:  # not recorded
            return True
        is_early = queries(self)  # as from a device that is slow
        if is_early or closed_gates(self.clock):
            return False
        learn(self.clock)
        return True

    def synchronize(self) -> None:
        synchronize_with(self.clock, "Event.synchronize()")

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if closed_gates(merged(self.clock, end.clock)):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end._recorded_s - self._recorded_s) * 1e3


def synchronize_with(clock: Clock, what: str) -> None:
    """Let the calling thread wait for all work before a time."""
    waits(what, clock)
    pass_gates(clock)
    learn(clock)


DEFAULT = [Stream(index, name="default stream") for index in range(DEVICES)]


class _Current(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams = list(DEFAULT)


current = _Current()


def current_stream(device: Any = None) -> Stream:
    return current.streams[index_of(device)]


class StreamContext:
    """Stands in for torch.cuda.stream(): also makes the stream's device the current one, as torch does."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._before = current.device, list(current.streams)
        if self.stream is not None:
            set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        current.device, current.streams = self._before


def set_stream(stream: Stream) -> None:
    current.device = stream.device.index
    current.streams[stream.device.index] = stream


class DeviceContext:
    """Stands in for torch.cuda.device()."""

    def __init__(self, device: Any) -> None:
        self.idx = index_of(device) if device is not None and device != -1 else -1

    def __enter__(self) -> None:
        self.prev_idx, current.device = current.device, current.device if self.idx < 0 else self.idx

    def __exit__(self, *_: object) -> None:
        current.device = self.prev_idx


class DeviceOf(DeviceContext):
    """Stands in for torch.cuda.device_of()."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.get_device() if tensor.is_cuda else -1)


def set_device(device: Any) -> None:
    if 0 <= index_of(device) < DEVICES:
        current.device = index_of(device)


def synchronize(device: Any = None) -> None:
    """Wait for all streams of a device; the stand-in waits for what any of its streams waits for."""
    index = index_of(device)
    with clocks.LOCK:
        clock: Clock = {}
        for stream in clocks.TIMELINES:
            if stream.device.index == index:
                clock = merged(clock, stream.clock)
    synchronize_with(clock, "torch.cuda.synchronize()")


def _properties(device: Any = None) -> Any:
    return SimpleNamespace(name="simulated", major=9, minor=0, total_memory=1 << 34, multi_processor_count=132)


def install() -> None:
    """Put the stand-ins in the places of torch.cuda's."""
    cuda: Any = torch.cuda
    generator = torch.default_generator
    for name, stand_in in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: DEVICES,
        "current_device": lambda: current.device,
        "set_device": set_device,
        "device": DeviceContext,
        "device_of": DeviceOf,
        "Stream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "set_stream": set_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: DEFAULT[index_of(device)],
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "a simulated GPU",
        "get_device_properties": _properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (1 << 33, 1 << 34),
        "empty_cache": lambda: None,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
    }.items():
        setattr(cuda, name, stand_in)
    torch.version.cuda = "13.0"
