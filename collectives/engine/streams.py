"""The streams of a Communicator on GPUs, and the events that order an operation between the streams of its callers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gradwire.collectives.errors import CollectiveError, LinkError
from gradwire.collectives.transports.crossing import SideStreams, event_after, wait_for

if TYPE_CHECKING:
    from gradwire.collectives.engine.in_flight import InFlight

_Result = TypeVar("_Result")


class Streams:
    """One Communicator's streams on each device: the *communication stream*, on which its operations run in their order; the
    *early stream*, on which what precedes the first message of an operation runs, beside the operations before it; and the
    stream of early_copies, on which that is copied to pinned memory. They are made when they are first used."""

    def __init__(self) -> None:
        self.early_copies = SideStreams()
        self.communication: Callable[[torch.device], torch.cuda.Stream] = SideStreams().of
        self.early: Callable[[torch.device], torch.cuda.Stream] = SideStreams().of


class DeviceOperation:
    """Orders one operation on GPUs: it begins after what is on the current streams when this object is made (the *producers*),
    and order() lets other streams continue after it. The host waits for nothing.

    devices: those of the operation's tensors. text: the call. Attributes sequence, timeout_s, peers: see watch(). Raises
    RuntimeError while a CUDA graph is captured, in which the operation would not be replayed.
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
        self.is_watched = False
        self.turn_began_s: float | None = None
        """When the host began to exchange, by time.perf_counter(), if it does so itself."""
        self.ends: float | None = None
        """When it must be done, in time.monotonic() seconds; None before the devices are known to have reached it."""
        self._among: InFlight | None = None  # while the watchdog looks at it
        self._error: CollectiveError | None = None
        self._issued = [event_after(torch.cuda.current_stream(device)) for device in devices]
        self._before = self._issued
        self._waits = True
        self._began: torch.cuda.Event | None = None
        self._finished: list[torch.cuda.Event] = []

    def run(self, function: Callable[..., _Result], *given: Any) -> _Result:
        """Call a function with the communication streams current. The first call lets them wait for the producers, and for what
        start() has enqueued. What the last call has enqueued ends the operation."""
        self._finished = []
        return self._within(self.streams.communication, self._waits, self._finished, function, given)

    def start(self, function: Callable[..., _Result], *, follows: bool) -> _Result:
        """Call a function with the early streams current, which wait for the producers, before run(). follows: whether they also
        wait for all earlier operations."""

        def started() -> _Result:
            if follows:
                for device in self.devices:
                    self.streams.early(device).wait_stream(self.streams.communication(device))
            return function()

        ended: list[torch.cuda.Event] = []
        result = self._within(self.streams.early, True, ended, started, ())
        self._before = ended[::-1]
        return result

    def _within(
        self,
        stream_of: Callable[[torch.device], torch.cuda.Stream],
        waits: bool,
        ended: list[torch.cuda.Event],
        function: Callable[..., _Result],
        given: tuple[Any, ...],
        index: int = 0,
    ) -> _Result:
        """Call a function with a stream of each device current. ended: gets an event after it for each device, the last first."""
        stream = stream_of(self.devices[index])
        is_last = index + 1 == len(self.devices)
        with torch.cuda.stream(stream):
            if waits:
                stream.wait_event(self._before[index])
            try:
                if not is_last:
                    return self._within(stream_of, waits, ended, function, given, index + 1)
                if ended is self._finished:
                    self._waits = False
                    if self._began is None:
                        self._began = event_after(stream, timed=True)
                return function(*given)
            finally:
                ended.append(event_after(stream, timed=is_last))

    def uses(self, tensors: Iterable[torch.Tensor], *, early: bool) -> None:
        """Keep the memory of tensors of any streams until this operation has used it, also if the tensors are deleted before.
        early: whether start() uses them."""
        for tensor in tensors:
            tensor.record_stream(self.streams.communication(tensor.device))
            if early:
                tensor.record_stream(self.streams.early(tensor.device))

    def await_producers(self, until: Callable[[], bool]) -> None:
        """Let the host wait until the tensors have been computed, or until() returns True: a wait for this rank's own work.
        Others that wait for it meanwhile end at their deadline, which lets until() return True."""
        for event in self._issued:
            if not wait_for(event, until):
                return

    def watch(self, among: InFlight, sequence: int, timeout_s: float, peers: frozenset[int]) -> None:
        """Note that the operation is in flight. sequence: its number. timeout_s: seconds that it may take once the devices have
        reached it. peers: the other ranks of a message; empty for an operation of all ranks."""
        self._among, self.sequence, self.timeout_s, self.peers = among, sequence, timeout_s, peers
        self.is_watched = True

    def look(self) -> bool:
        """Return whether the devices have done what was enqueued. Note when they have reached the operation. Raises RuntimeError
        once a device has failed."""
        if self.has_finished:
            return True
        if self.ends is None and self._began is not None and self._began.query():
            self.ends = time.monotonic() + self.timeout_s
        return False

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
        """Return how long the operation ran on the last device; None until it has finished."""
        if self._began is None or not self._finished or not self.has_finished:
            return None
        milliseconds: float = self._began.elapsed_time(self._finished[0])
        return milliseconds / 1e3

    def order(self) -> None:
        """Let the current stream of each device continue after what was enqueued of the operation."""
        events = self._finished or self._before[::-1]
        for device, event in zip(reversed(self.devices), events, strict=False):
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


def cpu_tensors(*given: Any) -> bool:
    """Return whether there are CPU tensors among tensors, or lists of tensors."""
    every = (tensor for each in given for tensor in (each if isinstance(each, list) else (each,)))
    return any(isinstance(tensor, torch.Tensor) and tensor.is_cpu for tensor in every)


def wait_on_host(deadline: float, is_broken: Callable[[], bool]) -> None:
    """Let the host wait until the current stream has done what is on it, as an operation whose result the host reads. Raises
    LinkError once the deadline (time.monotonic() seconds) passes, or the operation was aborted."""
    event = event_after(torch.cuda.current_stream())
    if not wait_for(event, lambda: time.monotonic() >= deadline):
        raise LinkError(None, timed_out=True, detail="no completion from NCCL")
    if is_broken():  # what is aborted ends, too
        raise LinkError(None, timed_out=False, detail="the wait was ended")
