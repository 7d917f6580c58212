"""The streams of a Communicator on GPUs, and the events that order an operation between the streams of its callers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gradwire.collectives.errors import CollectiveError, LinkError
from gradwire.collectives.transports.base import DONE_POLL_S
from gradwire.collectives.transports.crossing import PRIORITY, CopyStreams, event_after

if TYPE_CHECKING:
    from gradwire.collectives.engine.in_flight import InFlight

_Result = TypeVar("_Result")


class Streams:
    """One Communicator's streams: on each device, the *communication stream*, on which its operations run in their order, and the
    *copy stream* (copies), on which tensors are copied to pinned memory beside them. They are made when they are first used."""

    def __init__(self, copies: CopyStreams) -> None:
        self.copies = copies
        self._communication: dict[torch.device, torch.cuda.Stream] = {}

    def communication(self, device: torch.device) -> torch.cuda.Stream:
        """Return the communication stream of a device."""
        found = self._communication.get(device)
        return found or self._communication.setdefault(device, torch.cuda.Stream(device, priority=PRIORITY))


class DeviceOperation:
    """Orders one operation on GPUs: it begins after what is on the current streams when this object is made (the *producers*),
    and order() lets other streams continue after it. The host waits for nothing.

    devices: those of the operation's tensors. text: the call. sequence, timeout_s, peers: see watch(). Raises RuntimeError
    while a CUDA graph is captured, in which the operation would not be replayed.
    """

    def __init__(self, streams: Streams, devices: Sequence[torch.device], rank: int, text: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"rank {rank}: {text}: a CUDA graph is being captured, which cannot contain an exchange between ranks: capture "
                "forward and backward without it, and call it after the replay"
            )
        self.devices, self.text = devices, text
        self.streams = streams
        self.sequence, self.timeout_s, self.peers = -1, 0.0, frozenset[int]()
        self._among: InFlight | None = None  # while the watchdog looks at it
        self._deadline: float | None = None
        self._error: CollectiveError | None = None
        self._issued = [event_after(torch.cuda.current_stream(device)) for device in devices]
        self._waits = True
        self._began: torch.cuda.Event | None = None
        self._finished: list[torch.cuda.Event] = []

    def run(self, function: Callable[..., _Result], *given: Any) -> _Result:
        """Call a function with the communication streams current. The first call lets them wait for the producers. What the last
        call has enqueued ends the operation."""
        return self._within(0, function, given)

    def _within(self, index: int, function: Callable[..., _Result], given: tuple[Any, ...]) -> _Result:
        stream = self.streams.communication(self.devices[index])
        with torch.cuda.stream(stream):
            if self._waits:
                stream.wait_event(self._issued[index])
            if index + 1 < len(self.devices):
                result = self._within(index + 1, function, given)
            else:
                self._waits = False
                if self._began is None:
                    self._began = event_after(stream, timed=True)
                self._finished = []
                result = function(*given)
            self._finished.append(event_after(stream, timed=index + 1 == len(self.devices)))
        return result

    def uses(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the memory of tensors of any streams until the communication streams have used it, also if the tensors are
        deleted before."""
        for tensor in tensors:
            tensor.record_stream(self.streams.communication(tensor.device))

    def await_producers(self) -> None:
        """Let the host wait until the tensors have been computed: a wait for this rank's own work, not for other ranks."""
        for event in self._issued:
            event.synchronize()

    def watch(self, among: InFlight, sequence: int, timeout_s: float, peers: frozenset[int]) -> None:
        """Note that the operation is in flight. sequence: its number. timeout_s: seconds that it may take once the devices have
        reached it. peers: the other ranks of a message; empty for an operation of all ranks."""
        self._among, self.sequence, self.timeout_s, self.peers = among, sequence, timeout_s, peers

    def deadline(self) -> float | None:
        """Return when the operation must be done, in time.monotonic() seconds; None before the devices have reached it."""
        if self._deadline is None and self._began is not None and self._began.query():
            self._deadline = time.monotonic() + self.timeout_s
        return self._deadline

    def end(self, error: CollectiveError | None = None) -> None:
        """Note that the operation in flight is over, with an error or without."""
        self._error, self._among = error, None

    def is_over(self) -> bool:
        """Return whether the devices have finished the operation, or it has failed."""
        has_finished = self.has_finished
        self._learn()  # after that look: what was aborted ends on the devices, too
        return has_finished or self._error is not None

    def check(self) -> None:
        """Raise the operation's error if it has failed."""
        self._learn()
        if self._error is not None:
            raise self._error

    def _learn(self) -> None:
        if (among := self._among) is not None and among.is_broken:
            among.look()

    @property
    def has_finished(self) -> bool:
        """Return whether the devices have done what was enqueued."""
        return all(event.query() for event in self._finished)

    @property
    def seconds(self) -> float | None:
        """Return how long the operation ran on the first device; None until it has finished."""
        if self._began is None or not self._finished or not self.has_finished:
            return None
        milliseconds: float = self._began.elapsed_time(self._finished[0])
        return milliseconds / 1e3

    def order(self) -> None:
        """Let the current stream of each device continue after the operation."""
        for device, event in zip(reversed(self.devices), self._finished, strict=True):
            torch.cuda.current_stream(device).wait_event(event)


def devices_of(*given: Any) -> tuple[torch.device, ...]:
    """Return the GPUs of tensors, or of lists of tensors."""
    return tuple(dict.fromkeys(tensor.device for tensor in on_gpus(*given)))


def on_gpus(*given: Any) -> list[torch.Tensor]:
    """Return the CUDA tensors among tensors, or lists of tensors, each once."""
    found: dict[int, torch.Tensor] = {}
    for each in given:
        for tensor in each if isinstance(each, list) else (each,):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                found[id(tensor)] = tensor
    return list(found.values())


def wait_on_host(deadline: float) -> None:
    """Let the host wait until the current stream has done what is on it, as an operation whose result the host reads. Raises
    LinkError once the deadline (time.monotonic() seconds) passes."""
    event = event_after(torch.cuda.current_stream())
    while not event.query():
        if time.monotonic() >= deadline:
            raise LinkError(None, timed_out=True, detail="no completion from NCCL")
        time.sleep(DONE_POLL_S)
