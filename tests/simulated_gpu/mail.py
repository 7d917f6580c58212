"""Messages between the processes of the simulated NCCL, in files, so that a rank that never comes is waited for until end()."""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from tests.simulated_gpu.clocks import report, waiting_inside

_POLL_S = 0.0002
_sleep, _numpy = time.sleep, torch.Tensor.numpy  # not the stand-ins

#: Where the files of all ranks are; install() sets it.
FOLDER = Path()


class Ended(Exception):
    """end() was called while something waited."""


class Mail:
    """The messages of one backend. A thread makes the exchanges, one after the other. store: which the ranks share."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        if rank == 0:
            store.set("folder", uuid.uuid4().hex)
        self._folder = FOLDER / bytes(store.get("folder")).decode()
        self._folder.mkdir(exist_ok=True)
        self._rank, self._size = rank, size
        self._counts: Counter[str] = Counter()
        self._is_over = False
        self._calls: SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = SimpleQueue()
        thread = threading.Thread(target=self._serve, name="simulated NCCL", daemon=True)
        thread.is_simulator = True  # type: ignore[attr-defined]
        thread.start()

    def submit(self, exchange: Callable[[], None], done: Callable[[], None]) -> None:
        """Run an exchange on the thread, and then done(), also where the exchange was ended."""
        self._calls.put((exchange, done))

    def end(self) -> None:
        """End all exchanges, now and later."""
        self._is_over = True
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None or not self._calls.empty():
            if call is None:
                continue
            exchange, done = call
            try:
                exchange()
            except Ended:
                pass
            except Exception:
                report("nccl", f"the stand-in has failed: {traceback.format_exc()}")
            finally:
                done()
            del call, exchange, done  # they keep tensors

    def meet(self, name: str) -> None:
        """Wait, in the calling thread, for all ranks."""
        self._write(f"{name} {self._rank}", b"")
        with waiting_inside():
            for rank in range(self._size):
                self._await(f"{name} {rank}")

    def gather(self, verb: str, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the tensors of all ranks. If a rank is in another verb, wait for ever."""
        number = self._next("collective")
        self._write(f"{number} {self._rank}", _packed(verb, tensors))
        everyone = [_unpacked(self._await(f"{number} {rank}").read_bytes()) for rank in range(self._size)]
        if number > 0:  # all ranks have read it
            (self._folder / f"{number - 1} {self._rank}").unlink()
        if len({theirs for theirs, _ in everyone}) > 1:
            report("nccl", f"hangs, since the ranks are in different verbs: {[theirs for theirs, _ in everyone]}")
            self._await("a rank in the same verb")
        return [given for _, given in everyone]

    def send(self, peer: int | None, tensors: list[torch.Tensor]) -> None:
        number = self._next(f"to {peer}")
        self._write(f"{self._rank} to {peer} {number}", _packed("send", tensors))

    def await_receipt(self, peer: int | None) -> None:
        """Wait until the peer has received the first message that it was not known to have received."""
        number = self._next(f"received by {peer}")
        while (self._folder / f"{self._rank} to {peer} {number}").exists():
            self._pause()

    def receive(self, peer: int | None) -> list[torch.Tensor]:
        path = self._await(f"{peer} to {self._rank} {self._next(f'from {peer}')}")
        _, tensors = _unpacked(path.read_bytes())
        path.unlink()
        return tensors

    def _next(self, name: str) -> int:
        self._counts[name] += 1
        return self._counts[name] - 1

    def _write(self, name: str, content: bytes) -> None:
        beside = self._folder / f"{name} by {self._rank}"
        beside.write_bytes(content)
        os.replace(beside, self._folder / name)

    def _await(self, name: str) -> Path:
        while not (self._folder / name).exists():
            self._pause()
        return self._folder / name

    def _pause(self) -> None:
        if self._is_over:
            raise Ended
        _sleep(_POLL_S)


def _packed(verb: str, tensors: list[torch.Tensor]) -> bytes:
    parts = [(each.dtype, _numpy(each.flatten().view(torch.uint8)).tobytes()) for each in tensors]
    return pickle.dumps((verb, parts))


def _unpacked(content: bytes) -> tuple[str, list[torch.Tensor]]:
    verb, parts = pickle.loads(content)
    return verb, [
        torch.frombuffer(bytearray(each), dtype=dtype) if each else torch.empty(0, dtype=dtype) for dtype, each in parts
    ]
