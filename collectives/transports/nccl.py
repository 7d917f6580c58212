"""NCCL's communicators, which its backend makes in the first operation on a device, in a call without a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import torch

from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.errors import LinkError
from gradwire.collectives.torch_internals import Backend

#: The timeout of backends whose operations have gradwire's deadlines.
NEVER = timedelta(days=365)

_POLL_S = 0.05


class NcclConnections:
    """The devices on which the ranks of a backend over NCCL are connected. is_over: returns whether to stop waiting."""

    def __init__(self, backend: Backend, is_over: Callable[[], bool] = lambda: False) -> None:
        self._backend = backend
        self._is_over = is_over
        self._devices: set[torch.device] = set()

    def connect(self, device: torch.device, deadline: float) -> None:
        """Connect the ranks on a device, once. Collective. Raises LinkError if they are not connected by the deadline
        (time.monotonic()); the backend cannot be used then."""
        if device in self._devices:
            return
        thread = DaemonThread("gradwire-nccl")  # it cannot be ended
        connecting = thread.submit(partial(self._connect, device))
        thread.close()
        while not wait([connecting], min(_POLL_S, max(0.0, deadline - time.monotonic()))).done:
            if self._is_over() or time.monotonic() >= deadline:
                why = "NCCL has not connected the ranks"
                raise LinkError(None, timed_out=not self._is_over(), detail=why)
        if (error := connecting.exception()) is not None:
            raise LinkError(None, timed_out=False, detail=f"NCCL cannot connect the ranks: {error}")
        self._devices.add(device)

    def _connect(self, device: torch.device) -> None:
        # Each thread has a current device of its own.
        with torch.cuda.device(device) if torch.cuda.is_available() else nullcontext():
            self._backend.eager_connect_single_device(device)
