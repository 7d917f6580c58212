"""Generations of an elastic job: what a worker does that waits for the next one."""

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

from gradwire.collectives.control.key import Key
from gradwire.trainer.world import generations as generations_module
from gradwire.trainer.world.generations import WORKER, Generation, Generations, Worker, generations_of


def test_a_worker_waits_for_an_generation_as_long_as_the_launcher_does() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    generations = Generations(store)
    generations.limit_wait(60.0)
    worker = Worker({WORKER: "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}, 10.0)
    begins = threading.Timer(0.5, lambda: generations.begin(Generation(0, (3,), (0,))))
    begins.start()
    worker.take_place(0.1)  # its own deadline passes before the generation begins
    begins.join()
    assert worker.generation == Generation(0, (3,), (0,))
    worker.leave()


def test_a_worker_learns_what_its_generation_has_lost_and_not_what_another_one_has() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    generations = Generations(store)
    worker = Worker({WORKER: "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}, 10.0)

    def lost_in(generation: Generation, lost: tuple[int, ...]) -> tuple[int, ...]:
        generations.begin(generation)
        worker.take_place(10.0)
        assert worker.losses is not None
        generations.lose(7, (3,))
        time.sleep(0.5)  # long enough for some questions, none of which may find the loss of another generation
        assert worker.losses.ranks() == ()
        generations.lose(generation.number, lost)
        end = time.monotonic() + 10.0
        while not worker.losses.ranks() and time.monotonic() < end:
            time.sleep(0.01)
        return worker.losses.ranks()

    assert lost_in(Generation(0, (3, 5, 8), (0, 1, 1)), (5, 8)) == (1, 2)
    assert lost_in(Generation(1, (9, 3), (1, 0)), (9,)) == (0,)
    worker.leave()


def test_a_rank_without_which_the_next_generation_has_begun_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host was lost, and is used by others now. One that was no rank yet may still become one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    generations = Generations(store)
    monkeypatch.setattr(generations_module, "_LEFT_OUT_S", 0.1)
    generations.begin(Generation(1, (5, 8), (0, 1)))
    with pytest.raises(TimeoutError, match="no generation after 0 with worker 3"):
        generations.await_generation(3, 0, time.monotonic() + 60)
    begins = threading.Timer(0.5, lambda: generations.begin(Generation(2, (5, 8, 9), (0, 1, 1))))
    begins.start()
    assert generations.await_generation(9, -1, time.monotonic() + 60).number == 2
    begins.join()


def test_with_a_key_nobody_else_reads_or_begins_generations() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    key = Key.made()
    generations, stranger = Generations(store, key), Generations(store)
    generations.begin(Generation(1, (5, 8), (0, 1)))
    generations.want_update(1)
    assert Generations(store, key).current() == Generation(1, (5, 8), (0, 1))
    assert Generations(store, key).is_update_wanted(1)
    for reads in (stranger, Generations(store, Key.made()), Generations(store, key, "another run")):
        with pytest.raises(RuntimeError, match="GRADWIRE_KEY_FILE"):
            reads.current()
    stranger.lose(1, (5,))
    with pytest.raises(RuntimeError, match="without a key"):
        generations.lost(1)


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
            generations = generations_of(
                {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": launcher.stdout.readline().strip()}, 1.0
            )
            assert generations.current() is None
            launcher.send_signal(signal.SIGSTOP)
            os.waitpid(launcher.pid, os.WUNTRACED)  # until all its threads are stopped
            with pytest.raises(RuntimeError, match="the store does not answer"):
                generations.current()
        finally:
            launcher.kill()
