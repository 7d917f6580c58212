"""The executor on threads: exact for any sizes and segments, whether messages are delivered as early or as late as allowed."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.errors import LinkError
from collectives.plan.algorithms import PLANNERS
from collectives.plan.program import Instruction, Kind, Program
from collectives.plan.schedule import Place, Schedule, receive, send
from collectives.plan.spans import Span, consecutive, segments_of_blocks, segments_of_buffer
from collectives.reduction import COMBINE
from collectives.run.executor import Scratch, execute
from tests.unit.in_process import Hub, InProcessTransport, run_ranks

SIZES = st.integers(1, 7)
LENGTHS = st.integers(0, 200)
SEGMENTS = st.integers(1, 40)


def hosts_of(size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(a, min(a + 2, size))) for a in range(0, size, 2))


def contribution(rank: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int64) * 7 + 1000 * (rank + 1)


@pytest.mark.parametrize("algorithm", list(PLANNERS["allreduce"]))
@settings(max_examples=30, deadline=None)
@given(size=SIZES, numel=LENGTHS, segment=SEGMENTS, eager=st.booleans())
def test_allreduce(algorithm: str, size: int, numel: int, segment: int, eager: bool) -> None:
    hub = Hub(size, eager=eager)
    expected = torch.stack([contribution(rank, numel) for rank in range(size)]).sum(0)
    results = [contribution(rank, numel) for rank in range(size)]

    def body(rank: int) -> None:
        schedule = PLANNERS["allreduce"][algorithm](Place(rank, size, 0, hosts_of(size)))
        program = Program(schedule, segments_of_buffer(numel, schedule.blocks, segment))
        buffer = results[rank]
        transport = InProcessTransport(hub, rank)
        deadline = time.monotonic() + 20
        execute(program, buffer, buffer, COMBINE["sum"], transport, tag=5, deadline=deadline, scratch=Scratch())

    run_ranks(size, body)
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("algorithm", list(PLANNERS["allgather"]))
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6), segment=SEGMENTS, eager=st.booleans())
def test_allgather_and_reduce_scatter_of_unequal_blocks(
    algorithm: str, lengths: list[int], segment: int, eager: bool
) -> None:
    size, layout = len(lengths), consecutive(lengths)
    total = layout[-1].stop
    expected = torch.stack([contribution(rank, total) for rank in range(size)]).sum(0)
    results = [contribution(rank, total) for rank in range(size)]
    hub = Hub(size, eager=eager)

    def body(rank: int) -> None:
        buffer = results[rank]
        for tag, collective in ((100, "reduce_scatter"), (900, "allgather")):
            schedule = PLANNERS[collective][algorithm](Place(rank, size))
            program = Program(schedule, segments_of_blocks(layout, segment))
            transport = InProcessTransport(hub, rank)
            deadline = time.monotonic() + 20
            execute(program, buffer, buffer, COMBINE["sum"], transport, tag=tag, deadline=deadline, scratch=Scratch())

    run_ranks(size, body)
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("algorithm", list(PLANNERS["allreduce"]))
def test_zeros_of_both_signs_come_out_alike_everywhere(algorithm: str, op: str) -> None:
    size = 5
    hub = Hub(size, eager=True)
    results = [torch.tensor([0.0, -0.0]).roll(rank) for rank in range(size)]

    def body(rank: int) -> None:
        schedule = PLANNERS["allreduce"][algorithm](Place(rank, size, 0, hosts_of(size)))
        program = Program(schedule, segments_of_buffer(2, schedule.blocks, 2))
        transport = InProcessTransport(hub, rank)
        deadline = time.monotonic() + 20
        execute(
            program,
            results[rank],
            results[rank],
            COMBINE[op],
            transport,
            tag=5,
            deadline=deadline,
            scratch=Scratch(),
        )

    run_ranks(size, body)
    assert len({tuple(result.view(torch.int32).tolist()) for result in results}) == 1


def test_a_message_that_never_comes_ends_at_the_deadline() -> None:
    schedule = PLANNERS["allreduce"]["ring"](Place(0, 3))
    buffer = torch.ones(30)
    program = Program(schedule, segments_of_buffer(30, 3, 10))
    transport = InProcessTransport(Hub(3, eager=True), 0)
    started = time.monotonic()
    with pytest.raises(LinkError) as caught:
        execute(
            program,
            buffer,
            buffer,
            COMBINE["sum"],
            transport,
            tag=1,
            deadline=started + 0.2,
            scratch=Scratch(),
        )
    assert (caught.value.peer, caught.value.timed_out) == (2, True)


def test_a_receive_is_not_posted_while_its_memory_is_still_to_be_sent() -> None:
    """Rank 0 passes its block to rank 1, then takes rank 2's, which could arrive long before."""
    block = [Span(0, 1)]
    schedules = [
        Schedule(0, 3, 1, (send(1, block), receive(2, block))),
        Schedule(1, 3, 1, (receive(0, block), ())),
        Schedule(2, 3, 1, ((), send(0, block))),
    ]
    results = [contribution(rank, 4) for rank in range(3)]
    hub = Hub(3, eager=True)
    sent = threading.Event()

    def body(rank: int) -> None:
        if rank == 0:
            assert sent.wait(10)
        program = Program(schedules[rank], segments_of_buffer(4, 1, 4))
        deadline = time.monotonic() + 20
        transport = InProcessTransport(hub, rank)
        if rank == 2:
            threading.Timer(0.2, sent.set).start()
        execute(
            program,
            results[rank],
            results[rank],
            COMBINE["sum"],
            transport,
            tag=1,
            deadline=deadline,
            scratch=Scratch(),
        )

    run_ranks(3, body)
    assert torch.equal(results[1], contribution(0, 4))
    assert torch.equal(results[0], contribution(2, 4))


@pytest.mark.parametrize("algorithm", list(PLANNERS["allreduce"]))
@pytest.mark.parametrize("numel", [0, 5, 5000])
def test_a_program_is_the_same_whether_it_is_kept_or_laid_out_while_it_runs(
    algorithm: str, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(rank: int) -> tuple[list[Instruction], tuple[int, int]]:
        schedule = PLANNERS["allreduce"][algorithm](Place(rank, 5, 0, hosts_of(5)))
        program = Program(schedule, segments_of_buffer(numel, schedule.blocks, 100))
        return list(program), program.sent()

    kept = [rows(rank) for rank in range(5)]
    monkeypatch.setattr("collectives.plan.program._KEPT", -1)
    assert [rows(rank) for rank in range(5)] == kept
    for instructions, (messages, elements) in kept:
        assert np.array(instructions, dtype=np.int64).size == len(instructions) * len(Instruction._fields)
        sends = [row for row in instructions if row.kind == Kind.SEND]
        assert (messages, elements) == (len(sends), sum(row.length for row in sends))
        numbers = [row.message for row in instructions if row.kind in (Kind.SEND, Kind.RECEIVE)]
        assert numbers == list(range(len(numbers)))
        assert sorted(row.message for row in instructions if row.kind == Kind.WAIT) == numbers


def test_a_ring_among_very_many_ranks_is_planned_for_one_of_them() -> None:
    schedule = PLANNERS["allreduce"]["ring"](Place(5000, 10_000))
    program = Program(schedule, segments_of_buffer(1 << 20, schedule.blocks, 1 << 16))
    assert program.sent() == (19_998, 2_096_942)
