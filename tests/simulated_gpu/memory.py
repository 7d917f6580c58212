"""The memory of the GPUs, and pinned memory: what has used it, and whether the next use is ordered after that."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests.simulated_gpu import clocks
from tests.simulated_gpu.clocks import LOCK, Clock, Timeline, known, report, where


class Use(NamedTuple):
    """One use of a range of bytes by work on a stream."""

    begin: float
    end: float
    is_write: bool
    stream: Timeline
    at: int
    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what} on {self.stream} at {self.place}"


class Shadow:
    """Beside a storage: the device of its memory, None for pinned memory of the host, and the uses that still matter.

    owner: the stream on which it was allocated, on which it may be used again at once when it is given back. recorded: the
    streams that the allocator waits for before that.
    """

    def __init__(self, device: torch.device | None, owner: Timeline | None, nbytes: int) -> None:
        self.device, self.owner = device, owner
        self.recorded: set[Timeline] = set()
        self.name = f"{nbytes} bytes {'pinned' if device is None else f'on {device}'}, allocated at {where()}"
        self.uses: list[Use] = []
        if owner is not None and owner.count > 0:  # what used the memory before may still run there
            self.uses.append(Use(0, nbytes, True, owner, owner.count, "what used the memory before", where()))

    def used(self, use: Use, clock: Clock) -> None:
        """Compare a use with those before it. clock: what is ordered before it."""
        for each in self._against(use.begin, use.end, use.is_write):
            if each.stream is not use.stream and clock.get(each.stream, 0) < each.at:
                report("order", f"{use} is not ordered after {each}: {self.name}")
        self.uses = [
            each
            for each in self.uses
            if not (use.begin <= each.begin and each.end <= use.end)
            or not (use.is_write or (each.stream is use.stream and not each.is_write))
        ]
        self.uses.append(use)

    def used_by_host(self, begin: float, end: float, is_write: bool, what: str) -> None:
        """Compare a use by this thread with those before it."""
        for each in self._against(begin, end, is_write):
            if known().get(each.stream, 0) < each.at:
                report("host", f"{what} of the host at {where()} is not ordered after {each}: {self.name}")

    def _against(self, begin: float, end: float, is_write: bool) -> list[Use]:
        return [each for each in self.uses if each.begin < end and begin < each.end and (is_write or each.is_write)]

    def __del__(self) -> None:
        if getattr(threading.current_thread(), "is_simulator", False):
            return  # the program has given it back before, and the stand-in has kept it
        with LOCK:
            done = known() if self.owner is None else clocks.merged(self.owner.clock, known())
            for each in self.uses:
                if each.stream not in (self.owner, *self.recorded) and done.get(each.stream, 0) < each.at:
                    report("freed", f"given back before the end of {each}: {self.name}")


def shadow(tensor: torch.Tensor) -> Shadow | None:
    """Return what is beside a tensor's storage: None for ordinary memory of the host."""
    try:
        return getattr(tensor.untyped_storage(), "_shadow", None)
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or one without memory
        return shadow(tensor._values()) if tensor.layout is torch.sparse_coo else None


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """Return the GPU on which a tensor is."""
    found = shadow(tensor)
    return None if found is None else found.device


def put(tensor: torch.Tensor, device: torch.device | None, owner: Timeline | None) -> Shadow | None:
    """Put a new tensor on a GPU, or in pinned memory."""
    if tensor.layout is torch.sparse_coo:
        put(tensor._indices(), device, owner)
        return put(tensor._values(), device, owner)
    storage = tensor.untyped_storage()
    storage._shadow = made = Shadow(device, owner, storage.nbytes())  # type: ignore[attr-defined]
    return made


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a tensor lies between."""
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset())
    return begin * size, (begin + int(last) + 1) * size


def _touched(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else [tensor]


def record(
    what: str, stream: Timeline, clock: Clock, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
) -> None:
    """Record that work on a stream, which `clock` includes, uses tensors."""
    place = where()
    with LOCK:
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in (each for given in tensors for each in _touched(given)):
                beside, (begin, end) = shadow(tensor), extent(tensor)
                if beside is not None and begin < end:
                    beside.used(Use(begin, end, is_write, stream, clock[stream], what, place), clock)


def record_host(what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
    """Record that this thread itself uses tensors."""
    with LOCK:
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                beside, (begin, end) = shadow(tensor), extent(tensor)
                if beside is not None and beside.uses and begin < end:
                    beside.used_by_host(begin, end, is_write, what)
