"""Copies in pinned memory of CUDA tensors, for transports that move CPU tensors only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradwire.collectives.engine.streams import on_gpus
from gradwire.collectives.torch_internals import plain
from gradwire.collectives.transports.crossing import SideStreams, await_copies, event_after


class HostCopies:
    """Stands for the CUDA tensors of a call with CPU tensors in pinned memory: copy_out() fills them, and copy_back() brings the
    results to the GPU. The host waits in await_out() only.

    source, destination: what the call is given, with CPU tensors in place of CUDA tensors; the same object if it is in place.
    """

    def __init__(self, streams: SideStreams, source: Any, destination: Any) -> None:
        self._streams = streams
        self._out = [_Copy(part) for part in _alike(on_gpus(source))]
        given = {id(tensor) for copy in self._out for tensor in copy.given}
        only_written = [tensor for tensor in on_gpus(destination) if id(tensor) not in given]
        self._back = self._out if destination is source else [_Copy(part) for part in _alike(only_written)]
        self.source = self._of(source)
        self.destination = self.source if destination is source else self._of(destination)
        self._events: list[torch.cuda.Event] = []

    def _of(self, given: Any) -> Any:
        if isinstance(given, list):
            return [self._of(each) for each in given]
        for copy in (*self._out, *self._back):
            for tensor, view in zip(copy.given, copy.views, strict=True):
                if tensor is given:
                    return view
        return given

    def copy_out(self) -> None:
        """Enqueue the copies of the source, after what is on the current streams."""
        for copy in self._out:
            device = copy.tensors[0].device
            stream = self._streams.of(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                copy.out()
            for tensor in copy.tensors:
                tensor.record_stream(stream)
            self._events.append(event_after(stream))

    def await_out(self, deadline: float) -> None:
        """Let the host wait until the source has been copied. Raises LinkError at the deadline (time.monotonic() seconds)."""
        await_copies(self._events, deadline)

    def copy_back(self) -> None:
        """Enqueue the copies of the results on the current streams."""
        for copy in self._back:
            with torch.cuda.device(copy.tensors[0].device):
                copy.back()


class _Copy:
    """A copy of tensors of one dtype and device, end to end in pinned memory. given: the tensors; tensors: without history.
    views: by tensor, its part of the copy."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.given = tensors
        self.tensors = [plain(tensor) for tensor in tensors]
        numels = [tensor.numel() for tensor in tensors]
        first = tensors[0]
        self._pinned = torch.empty(sum(numels), dtype=first.dtype, device="cpu", pin_memory=True)
        parts = self._pinned.split(numels)
        self.views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def out(self) -> None:
        # torch would negate or conjugate the copy at once, on the host, before it arrives.
        resolved = [tensor.resolve_conj().resolve_neg() for tensor in self.tensors]
        if len(resolved) == 1:
            self.views[0].copy_(resolved[0], non_blocking=True)
        else:  # one copy from the device is quicker than many
            self._pinned.copy_(torch.cat([tensor.reshape(-1) for tensor in resolved]), non_blocking=True)

    def back(self) -> None:
        if len(self.tensors) == 1:
            self.tensors[0].copy_(self.views[0], non_blocking=True)
            return
        there = self._pinned.to(self.tensors[0].device, non_blocking=True)
        parts = there.split([tensor.numel() for tensor in self.tensors])
        torch._foreach_copy_(self.tensors, [part.view(t.shape) for part, t in zip(parts, self.tensors, strict=True)])


def _alike(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors by dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())
