"""Calls of verbs with CUDA tensors: on the communication streams, or through the host's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any

import torch

from gradwire.collectives import torch_internals
from gradwire.collectives.engine.host_copies import HostCopies
from gradwire.collectives.engine.operations import Operations
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.engine.streams import DeviceOperation, Streams, cpu_tensors, on_gpus
from gradwire.collectives.engine.work import Work

#: (source, destination, tag, deadline) -> None: runs a call in its turn.
_Body = Callable[[Any, Any, int, float], None]


class GpuCalls:
    """Runs the calls of one Communicator that have CUDA tensors. via_host: whether the transport moves CPU tensors only."""

    def __init__(self, operations: Operations, rank: int, *, via_host: bool) -> None:
        self.streams = Streams()
        self._operations, self._rank, self._via_host = operations, rank, via_host
        self._crossings: list[Crossing] = []  # those that are issued and have not ended
        self._threads: set[int] = set()

    def operation(
        self, text: str, tensors: Iterable[torch.Tensor], devices: tuple[torch.device, ...]
    ) -> DeviceOperation:
        """Return what orders a call with these tensors on GPUs."""
        operation = DeviceOperation(self.streams, devices, self._rank, text)
        operation.uses(tensors, early=self._via_host)
        return operation

    def run(
        self,
        call: PreparedCall,
        run: _Body,
        source: Any,
        destination: Any,
        *,
        async_op: bool,
        timeout_s: float | None,
        recorded: Callable[[_Body], _Body],
    ) -> Work:
        """Run a call with CUDA tensors. With async_op=False, the current streams continue after it. recorded: returns what runs
        and records a call."""
        operation = self.operation(call.text, on_gpus(source, destination), call.devices)
        crossing = self._crossing(operation, call, source, destination) if self._via_host else None
        seconds = self._operations.timeout_s if timeout_s is None else timeout_s

        def enqueue(source: Any, destination: Any, tag: int, deadline: float) -> None:
            operation.run(run, source, destination, tag, deadline)
            self._operations.in_flight.add(operation, seconds)

        try:
            return self._operations.run(
                call,
                recorded(enqueue if crossing is None else partial(crossing.run, run)),
                source,
                destination,
                async_op=async_op,
                timeout_s=timeout_s,
                device=operation,
                enqueues=crossing is None and not cpu_tensors(source, destination),  # whose exchange the host waits for
                around=None if crossing is None else partial(self._around, operation, crossing),
            )
        except Exception:  # after an interrupt, the call is still queued
            if crossing is not None:
                self._end(crossing)
            raise
        finally:
            if not async_op:
                operation.order()

    def _crossing(self, operation: DeviceOperation, call: PreparedCall, source: Any, destination: Any) -> Crossing:
        """Begin a call of which the host moves copies, or codes."""
        crossing = Crossing(operation, call, source, destination)
        # Before ranks have agreed on a call, nothing may change.
        is_agreed = self._operations.usable and call.signature in self._operations.monitor.agreement.known
        if is_agreed and not crossing.meets(self._crossings):
            crossing.start(follows=False)
        self._crossings.append(crossing)
        return crossing

    def _around(self, operation: DeviceOperation, crossing: Crossing, turn: Callable[[], None]) -> None:
        """Make the turn of a call of which the host moves copies, once its tensors have been computed."""
        self._allow_captures()
        try:
            with suppress(RuntimeError):  # of the device, which the turn finds again
                operation.await_producers(lambda: self._operations.monitor.is_hopeless)
            turn()
        finally:
            self._end(crossing)

    def _end(self, crossing: Crossing) -> None:
        with suppress(ValueError):
            self._crossings.remove(crossing)
        crossing.end()

    def _allow_captures(self) -> None:
        """Let a thread of ours wait for events while other threads capture CUDA graphs."""
        thread = get_ident()
        if thread not in self._threads and thread != threading.main_thread().ident:
            self._threads.add(thread)
            torch_internals.allow_captures()


class Crossing:
    """One call whose CUDA tensors, or codes of them, cross the host's memory, because the transport moves CPU tensors only.

    start() enqueues what precedes the first message; run() exchanges, in the call's turn, and enqueues the rest. The host waits
    in run() only.
    """

    def __init__(self, operation: DeviceOperation, call: PreparedCall, source: Any, destination: Any) -> None:
        self._operation = operation
        self._begin = None if call.begin is None else partial(call.begin, source, destination)
        self._copies = HostCopies(operation.streams.early_copies, source, destination) if call.begin is None else None
        self._rest: Callable[[int, float], None] | None = None
        self._has_started = False
        self._reads = {_memory(tensor) for tensor in on_gpus(source)}
        self._writes = {_memory(tensor) for tensor in on_gpus(destination if call.begin is None else source)}

    def meets(self, others: Iterable[Crossing]) -> bool:
        """Return whether this call must follow one of the others, because one of both writes memory that the other uses."""
        uses = self._reads | self._writes
        return any(uses & other._writes or self._writes & other._reads for other in tuple(others))

    def start(self, *, follows: bool) -> None:
        """Enqueue what precedes the first message. follows: after all earlier operations."""
        self._has_started = True
        if self._begin is not None:
            self._rest = self._operation.start(self._begin, follows=follows)
        elif self._copies is not None:
            self._operation.start(self._copies.copy_out, follows=follows)

    def run(self, run: _Body, _source: Any, _destination: Any, tag: int, deadline: float) -> None:
        """Exchange, in the turn of the call. run: of the call, on CPU tensors in place of those on GPUs."""
        if not self._has_started:
            self.start(follows=True)
        self._operation.turn_began_s = time.perf_counter()
        if (rest := self._rest) is not None:
            self._operation.run(rest, tag, deadline)
        else:
            copies = self._copies
            assert copies is not None, "a call that has ended"
            copies.await_out(deadline)
            run(copies.source, copies.destination, tag, deadline)
            self._operation.run(copies.copy_back)

    def end(self) -> None:
        """Release the memory."""
        self._begin = self._rest = self._copies = None


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
