"""An elastic job for tests: a store, worker processes that may be killed, and the generations that a launcher would begin for
them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire.collectives.environment import HOST_ID
from gradwire.trainer.elastic import watcher
from gradwire.trainer.elastic.memory import Agent
from gradwire.trainer.world.generations import WORKER, Departure, Generation, Generations
from tests.harness import RUN_TIMEOUT_S, connected, wait_until


class Job:
    """Workers that run a function. `with` ends them, and removes their commits."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        """function: runs in each worker with args and a function that sends something to take()."""
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
        self._function, self._args = function, args
        self._workers: dict[int, tuple[BaseProcess, Connection]] = {}
        self.generations = Generations(self._store)
        self.generation = Generation(-1, (), ())
        self._hosts: dict[int, int] = {}
        self._agents: dict[int, tuple[Agent, subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _ in self._workers.values():
            process.kill()
            process.join()
        for agent, process in self._agents.values():
            watcher.remove(agent.prefix)
            process.kill()
            process.wait()

    def start(self, *numbers: int, host: int = 0) -> None:
        """Start workers, on this host or what they take for others."""
        for number in numbers:
            environment = {
                WORKER: str(number),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{self._store.port}",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "LOCAL_RANK": str(number),
                HOST_ID: f"host {host}",
            }
            self._hosts[number] = host
            arguments = (environment, self._agent(host), self._function, self._args)
            self._workers[number] = connected(_work, *arguments, name=f"worker {number}")

    def begin(self, *workers: int, leave: Iterable[int] = ()) -> None:
        """Begin a generation of these workers, when all have arrived, and those have left that are to leave the generation
        before."""
        wait_until(lambda: all(map(self.generations.has_arrived, workers)))
        wait_until(lambda: all(self.departure(number) is not None for number in leave))
        self.generation = Generation(
            self.generation.number + 1, workers, tuple(self._hosts[number] for number in workers)
        )
        self.generations.begin(self.generation)

    def _agent(self, host: int) -> Agent:
        """Return the process that commits of a host are named after. While it runs, no other job removes them."""
        if host not in self._agents:
            process = subprocess.Popen(["sleep", "infinity"])
            self._agents[host] = Agent(process.pid, watcher.started_at(process.pid)), process
        return self._agents[host][0]

    def departure(self, worker: int) -> Departure | None:
        """Return why a worker has left the generation of now; None where it has not."""
        return self.generations.departure(worker, self.generation.number)

    def kill(self, worker: int) -> None:
        self._workers[worker][0].kill()
        self._workers[worker][0].join()

    def allow(self, name: str) -> None:
        """Let workers go on that wait for this name."""
        self._store.set(name, "")

    def take(self, worker: int) -> Any:
        """Return what a worker has sent next. Raises AssertionError where it has raised or ended, or sends nothing in time."""
        connection = self._workers[worker][1]
        assert connection.poll(RUN_TIMEOUT_S), f"worker {worker} says nothing"
        kind, value = connection.recv()
        assert kind == "sent", f"worker {worker}: {value}"
        return value

    def pid(self, worker: int) -> int | None:
        return self._workers[worker][0].pid


def await_permission(name: str) -> None:
    """Wait in a worker until the test allows it to go on."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    TCPStore(host, port, is_master=False, timeout=timedelta(seconds=RUN_TIMEOUT_S)).wait([name])


def _work(
    environment: dict[str, str],
    agent: Agent,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    connection: Connection,
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    # The process that has forked this one is no agent, and outlives the job.
    sys.modules["gradwire.trainer.elastic.run"].find_agent = lambda: agent  # type: ignore[attr-defined]
    Agent.watch = lambda self: None  # type: ignore[method-assign]
    try:
        function(*args, partial(_send, connection, "sent"))
    except BaseException as error:
        _send(connection, "raised", f"{type(error).__name__}: {error}")
        raise


def _send(connection: Connection, kind: str, value: Any) -> None:
    # Connection.send() would send a reference to a tensor's memory, which a worker that has ended could not serve.
    connection.send_bytes(pickle.dumps((kind, value)))
