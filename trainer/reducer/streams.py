"""CUDA streams around an exchange: those that wrote the gradients of a bucket, and those of functions in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import Tensor

from gradwire.collectives import torch_internals
from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.thread_priority import wake_soon


class WritingStreams:
    """The streams that have written gradients of a bucket on a GPU since they were last copied.

    Autograd calls the hook of a parameter on the stream that has written the gradient. That is the stream of its forward; with
    fully_shard, it is the stream of the reduce-scatter. Usually it is the same one for all gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made = torch.cuda.current_stream(device).record_event()  # the memory is zero from here on
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._users: set[int] = set()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of the bucket until the current stream has used it, also if it is deleted before: a layout may be
        made in a hook, on a stream that others do not wait for. tensors: those of the bucket."""
        handle = torch_internals.current_stream_handle(self._device)
        if handle not in self._users:
            self._users.add(handle)
            keep_for(torch.cuda.current_stream(self._device), tensors)

    def note(self) -> None:
        """Note that the current stream has written a gradient."""
        handle = torch_internals.current_stream_handle(self._device)
        if handle not in self._streams:
            self._streams[handle] = stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._made)

    def join(self) -> torch.cuda.Stream | None:
        """Let the current stream continue after the gradients are written. Return it if other streams have written any: their
        memory must then be kept until this stream has used it."""
        self.note()
        handle = torch_internals.current_stream_handle(self._device)
        current = self._streams.pop(handle)
        others, self._streams = self._streams, {handle: current}
        for stream in others.values():
            current.wait_stream(stream)
        return current if others else None


def gpus(devices: Iterable[torch.device]) -> list[torch.device]:
    """Return those of the devices that are GPUs, each once."""
    return [device for device in dict.fromkeys(devices) if device.type == "cuda"]


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait on the host until GPUs have done what is on their current streams."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def refuse_capture(rank: int) -> None:
    """Raise RuntimeError while the current stream captures a CUDA graph, which cannot contain an exchange between ranks."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"rank {rank}: a CUDA graph is being captured, and cannot contain the exchange of gradients: a replay would not run "
            "it. Capture the model without the optimizer's exchange, as torch.cuda.make_graphed_callables() does, and call "
            "backward() and step() of the distributed optimizer outside of the capture"
        )


def keep_for(stream: torch.cuda.Stream, tensors: Iterable[Tensor]) -> None:
    """Keep the memory of CUDA tensors that were made on other streams until a stream has used it, also if the tensors are deleted
    before."""
    for tensor in tensors:
        tensor.record_stream(stream)


class Background:
    """Runs functions for a caller who goes on, one after the other on a thread.

    On GPUs, what a function enqueues comes after what its caller has enqueued before. It goes to the caller's current streams, or
    with own_streams to streams of this object, so that it runs beside what the caller enqueues later.
    """

    def __init__(self, name: str, *, own_streams: bool = False) -> None:
        self._thread = DaemonThread(name)
        self._own: dict[torch.device, torch.cuda.Stream] | None = {} if own_streams else None
        self._last: Running | None = None
        self._thread.submit(wake_soon)

    def submit(self, function: Callable[[], None], devices: Sequence[torch.device]) -> Running:
        """Run a function. devices: the GPUs that it uses. Raises RuntimeError after close()."""
        streams = self.streams(devices)

        def run() -> None:
            with on_streams(streams):
                function()

        self._last = Running(self._thread.submit(run), streams)
        return self._last

    def streams(self, devices: Sequence[torch.device]) -> list[torch.cuda.Stream]:
        """Return the streams of functions that are submitted now, one for each GPU."""
        current = [torch.cuda.current_stream(device) for device in devices]
        if self._own is None:
            return current
        own = [self._own.get(device) or self._own.setdefault(device, torch.cuda.Stream(device)) for device in devices]
        for mine, producer in zip(own, current, strict=True):
            mine.wait_stream(producer)
        return own

    def close(self, timeout_s: float = 0.0) -> None:
        """Refuse further functions, and wait for the last one, for at most timeout_s."""
        self._thread.close()
        if self._last is not None and timeout_s:
            with suppress(Exception):  # wait() of the function's caller raises it
                self._last.future.result(timeout_s)


class Running:
    """A function that runs in the background. future: that of its end on the host."""

    def __init__(self, future: Future[None], streams: Sequence[torch.cuda.Stream]) -> None:
        self.future = future
        self._streams = streams

    def wait(self) -> None:
        """Wait until the function has returned, and let the current streams continue after what it has enqueued on GPUs. Raises
        its error."""
        self.future.result()
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)


@contextmanager
def on_streams(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Make streams the current ones of their devices, and the device of the first the current one."""
    with ExitStack() as stack:
        for stream in reversed(streams):
            stack.enter_context(torch.cuda.stream(stream))
        yield
