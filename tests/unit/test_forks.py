"""What a forked child does for objects of its parent."""

import os
from collections.abc import Callable

import pytest
import torch

import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.collectives.forks import in_forked_child


class Owner:
    pass


def test_an_action_that_fails_leaves_the_others_to_run() -> None:
    fails, writes, gone = Owner(), Owner(), Owner()
    reader, writer = os.pipe()
    in_forked_child(fails, lambda _: 1 / 0)
    in_forked_child(writes, lambda _: os.write(writer, b"done"))
    in_forked_child(gone, lambda _: os.write(writer, b"not deleted"))
    del gone
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as written:
        assert written.read() == b"done"


def raised_in_a_child(*calls: Callable[[], object]) -> list[str]:
    """Fork, make these calls in the child, and return the names of the exceptions that they raise; empty for none."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        for call in calls:
            try:
                call()
                os.write(writer, b"-\n")
            except Exception as error:
                os.write(writer, f"{type(error).__name__}\n".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as written:
        return written.read().split()


def test_a_fork_of_a_rank_finds_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a world of one, whatever a launcher says in the child."""
    hvd.init()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert raised_in_a_child(hvd.init, Communicator, hvd.shutdown, hvd.init) == [
        "RuntimeError",
        "ValueError",
        "-",
        "ValueError",
    ]
    assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1]
    hvd.shutdown()
    monkeypatch.undo()
    assert raised_in_a_child(hvd.init, hvd.shutdown) == ["-", "-"]
