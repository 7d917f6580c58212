"""What a run does in silence, and what not: no kernel is compiled within a deadline, and a healthy run prints nothing."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.collectives.compression.registry import CODECS, make_codec
from gradwire.collectives.diagnostics.timeline import Timeline
from gradwire.collectives.engine.operations import Operations
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.kernels.files import KernelFiles
from gradwire.collectives.reduction import DTYPES
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.transports.base import Transport
from gradwire.collectives.transports.loop import Payload, execute
from tests.harness import EXCHANGE_TIMEOUT_S, World, Worlds, wide_rows
from tests.ranks.exact import on_host
from tests.ranks.training import perceptron, share

SIZE = 3


def prepared_inside_operations() -> list[str]:
    """Return, as it fills, in which calls a kernel is compiled or loaded. In a process that has used few kernels so far."""
    running = threading.local()
    found: list[str] = []

    def noting(take: Callable[..., None]) -> Callable[..., None]:
        def noted(self: Operations, call: PreparedCall, *args: Any, **kwargs: Any) -> None:
            running.call = call.text
            try:
                take(self, call, *args, **kwargs)
            finally:
                running.call = None

        return noted

    kept = KernelFiles.kept

    def noted_kept(self: KernelFiles, file: str) -> Any:  # every kernel looks first whether it is kept
        if (call := getattr(running, "call", None)) is not None:
            found.append(call)
        return kept(self, file)

    Operations._take_turn = noting(Operations._take_turn)  # type: ignore[method-assign]
    KernelFiles.kept = noted_kept  # type: ignore[method-assign]
    return found


def use_every_kernel(hosts: str) -> list[str]:
    found = prepared_inside_operations()
    with on_host(hosts[dist.get_rank()]):
        comm = Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    with comm:
        verbs = ("allreduce", "reduce", "reduce_scatter")
        for number, dtype in enumerate(DTYPES):
            for verb in verbs[number % 3 :] + verbs[: number % 3]:  # each is the first to use some dtype
                for algorithm in comm.algorithms(verb):
                    many, one = torch.ones(SIZE * 5).to(dtype), torch.empty(5, dtype=dtype)
                    if verb == "allreduce":
                        comm.allreduce(many, "max", algorithm=algorithm)
                    elif verb == "reduce":
                        comm.reduce(many, 0, "max", algorithm=algorithm)
                    else:
                        comm.reduce_scatter(one, many, "max", algorithm=algorithm)
            comm.allgather(many, one)
            comm.alltoall(many, many.clone())
            comm.alltoall(many, many.clone(), [5] * SIZE, [5] * SIZE)
            comm.isend(one, (comm.rank + 1) % SIZE)
            comm.recv(one, (comm.rank - 1) % SIZE)
        for codec in CODECS.values():
            if codec().name == "none":
                continue
            comm.allreduce(torch.ones(5000), compression=codec(), step=0)
            if codec().takes_feedback:
                feedback = comm.new_feedback(codec(), 5000)
                comm.allreduce(torch.ones(5000), compression=codec(), feedback=feedback)
    return found


@pytest.mark.parametrize(
    ("ranks", "hosts"),
    [
        ("shared_memory", "aaa"),
        ("shared_memory", "aab"),
        *wide_rows(("sockets", "aab"), ("process_group", "aab")),
    ],
    indirect=["ranks"],
)
def test_no_kernel_is_compiled_within_a_deadline(failing_world: Callable[[int], World], hosts: str) -> None:
    for found in failing_world(SIZE).run(use_every_kernel, hosts):
        assert not found


def exchange_without_python(hosts: str) -> tuple[list[str], set[str]]:
    """Return the payloads of the programs that the loop in Python has run, and the names of recorded events."""
    executed = []

    def noting(program: Program, payload: Payload, transport: Transport, **_: Any) -> None:
        executed.append(type(payload).__name__)
        execute(program, payload, transport, **_)

    with pytest.MonkeyPatch.context() as patch, on_host(hosts[dist.get_rank()]):
        patch.setattr("gradwire.collectives.transports.loop.execute", noting)
        patch.setattr(
            "gradwire.collectives.transports.requests._FIRST_ROWS", 1
        )  # tables grow in the middle of programs
        with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
            expected = exchange(comm)
            timeline = Timeline()
            comm.record(timeline)
            assert all(map(torch.equal, exchange(comm), expected))
    return executed, {name for _, name, *_ in timeline.recording().events}


def exchange(comm: Communicator) -> list[torch.Tensor]:
    many, one = torch.arange(SIZE * 5000.0) + comm.rank, torch.ones(5000)
    results = []
    for algorithm in comm.algorithms("allreduce"):
        results.append(many.clone())
        comm.allreduce(results[-1], algorithm=algorithm)
    comm.allgather(many, one)
    comm.reduce_scatter(one, many)
    comm.alltoall(many, many.clone())
    comm.broadcast(many, 1)
    comm.barrier()
    comm.allgather_object("some text")
    for name in ("int8", "chunktopk"):
        comm.allreduce(many, "average", compression=make_codec(name), step=0)
        results.append(many.clone())
    return results


@pytest.mark.parametrize(
    ("ranks", "hosts"), [("shared_memory", "aaa"), ("shared_memory", "aab"), ("sockets", "abc")], indirect=["ranks"]
)
def test_no_python_runs_between_messages(failing_world: Callable[[int], World], hosts: str) -> None:
    """Compiled loops run the programs of all links of CPU tensors, recorded or not, and give the same bits."""
    executed, events = zip(*failing_world(SIZE).run(exchange_without_python, hosts), strict=True)
    assert not any(executed)
    assert set.union(*events) >= {"allreduce", "send", "wait", "reduce", "encode", "decode", "divide"}


def compare_recorded_calls() -> None:
    """Recorded calls pass the functions that others pass, and those that record."""
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        tensor = torch.ones(1 << 16)
        for call in (
            lambda: comm.allreduce(tensor),
            lambda: comm.allreduce(tensor, algorithm="ring"),
            lambda: comm.allreduce(tensor, compression="int8"),
            comm.prepare_allreduce(tensor),
        ):
            call()
            alone = functions_of(call)
            comm.record(Timeline())
            recorded = functions_of(call)
            comm.record(None)
            assert recorded >= alone
            more = (
                recorded - alone - {("engine.py", "run")}
            )  # the entry of calls that are recorded, asynchronous, or in inference mode
            assert all("record" in name or file == "timeline.py" for file, name in more), more


def functions_of(call: Callable[[], object]) -> set[tuple[str, str]]:
    """Return the functions of gradwire that a call passes in this thread: their files and names."""
    seen = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and "collectives" in path.parts:
            seen.add((path.name, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_recording_only_observes(ranks: Worlds) -> None:
    ranks(2).run(compare_recorded_calls)


def train_a_little() -> str:
    """Return what this process prints on stderr while it trains and moves tensors, after the first operation."""
    with Communicator() as comm:
        comm.allreduce(torch.ones(5))
    read, write = os.pipe()
    kept = os.dup(2)
    os.dup2(write, 2)
    try:
        hvd.init()
        model = perceptron()
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(120):  # more than there are between two reports
            optimizer.zero_grad()
            inputs, targets = share(step)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        hvd.allgather_object({"loss": 1.0})
        hvd.shutdown()
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(write)
    with os.fdopen(read) as said:
        return said.read()


def test_a_healthy_run_prints_nothing(ranks: Worlds) -> None:
    assert ranks(2).run(train_a_little) == ["", ""]
