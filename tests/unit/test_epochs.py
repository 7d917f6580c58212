"""Epochs of an elastic job: what a worker does that waits for the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire.trainer.world import epochs as epochs_module
from gradwire.trainer.world.epochs import WORKER, Epoch, Epochs, epochs_of
from gradwire.trainer.world.worker import Worker


def test_a_worker_waits_for_an_epoch_as_long_as_the_launcher_does() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    epochs = Epochs(store)
    epochs.limit_wait(60.0)
    worker = Worker({WORKER: "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}, 10.0)
    begins = threading.Timer(0.5, lambda: epochs.begin(Epoch(0, (3,), (0,))))
    begins.start()
    worker.take_place(0.1)  # its own deadline passes before the epoch begins
    begins.join()
    assert worker.epoch == Epoch(0, (3,), (0,))
    worker.leave()


def test_a_worker_learns_what_its_epoch_has_lost_and_not_what_another_one_has() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    epochs = Epochs(store)
    worker = Worker({WORKER: "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}, 10.0)

    def lost_in(epoch: Epoch, lost: tuple[int, ...]) -> tuple[int, ...]:
        epochs.begin(epoch)
        worker.take_place(10.0)
        assert worker.losses is not None
        epochs.lose(7, (3,))
        time.sleep(0.5)  # long enough for some questions, none of which may find the loss of another epoch
        assert worker.losses.ranks() == ()
        epochs.lose(epoch.number, lost)
        end = time.monotonic() + 10.0
        while not worker.losses.ranks() and time.monotonic() < end:
            time.sleep(0.01)
        return worker.losses.ranks()

    assert lost_in(Epoch(0, (3, 5, 8), (0, 1, 1)), (5, 8)) == (1, 2)
    assert lost_in(Epoch(1, (9, 3), (1, 0)), (9,)) == (0,)
    worker.leave()


def test_a_rank_without_which_the_next_epoch_has_begun_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host was lost, and is used by others now. One that was no rank yet may still become one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    epochs = Epochs(store)
    monkeypatch.setattr(epochs_module, "_LEFT_OUT_S", 0.1)
    epochs.begin(Epoch(1, (5, 8), (0, 1)))
    with pytest.raises(TimeoutError, match="no world after 0 with worker 3"):
        epochs.await_epoch(3, 0, time.monotonic() + 60)
    begins = threading.Timer(0.5, lambda: epochs.begin(Epoch(2, (5, 8, 9), (0, 1, 1))))
    begins.start()
    assert epochs.await_epoch(9, -1, time.monotonic() + 60).number == 2
    begins.join()


LAUNCHER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


def test_a_launcher_that_is_stopped_is_not_waited_for_without_a_limit() -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            epochs = epochs_of({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": launcher.stdout.readline().strip()}, 1.0)
            assert epochs.current() is None
            launcher.send_signal(signal.SIGSTOP)
            os.waitpid(launcher.pid, os.WUNTRACED)  # until all its threads are stopped
            with pytest.raises(RuntimeError, match="the store does not answer"):
                epochs.current()
        finally:
            launcher.kill()
