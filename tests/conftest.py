"""Fixtures that hand out worlds of ranks."""

import gc
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

import gradwire as hvd
from tests.harness import TRANSPORTS, World, Worlds

# A shell lets jobs in the background ignore Ctrl-C, which some tests send; whom these start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("tests", deadline=None)  # no example is wrong for being slow on a busy machine
settings.load_profile("tests")


def pytest_collection_finish() -> None:
    gc.freeze()  # collections of garbage, of which tests make many, need not look through all that is imported


def pytest_sessionfinish() -> None:
    gc.freeze()  # at its end, pytest collects garbage five times, which took half a minute


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """ranks(size).run(function, *args, **kwargs): the list of results by rank, on processes that all tests share."""
    environment = TRANSPORTS[getattr(request, "param", "shared_memory")]
    worlds = Worlds(tmp_path_factory.mktemp("worlds"), environment)
    yield worlds
    worlds.close()


@pytest.fixture
def failing_world(ranks: Worlds) -> Iterator[Callable[[int], World]]:
    """failing_world(size): fresh processes that the test may kill or stop; what is left of them dies with the test."""
    started: list[World] = []

    def start(size: int) -> World:
        started.append(ranks.fresh(size))
        return started[-1]

    yield start
    for world in started:
        world.kill()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have called hvd.init() in a process that no launcher has started."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    yield
    hvd.shutdown()
