"""Epochs of an elastic job: what a worker does that waits for the next one."""

from __future__ import annotations

import threading
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire.trainer.world.epochs import WORKER, Epoch, Epochs
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
