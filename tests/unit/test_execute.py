"""The executor on threads: exact for any sizes and segments, whether messages are delivered as early or as late as allowed."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.collectives.errors import LinkError
from gradwire.collectives.reduction import COMBINE
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.coded import CodedProgram
from gradwire.collectives.schedules.program import Instruction, Kind, Program
from gradwire.collectives.schedules.schedule import Place, Planner, Schedule, receive, send
from gradwire.collectives.schedules.spans import Span, consecutive, segments_of_blocks, segments_of_buffer
from gradwire.collectives.transports.loop import Numbers, Scratch, execute
from tests.unit.in_process import Hub, InProcessTransport, hosts_of, run_ranks

SIZES = st.integers(1, 7)
LENGTHS = st.integers(0, 200)
SEGMENTS = st.integers(1, 40)


def contribution(rank: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int64) * 7 + 1000 * (rank + 1)


def follow(
    program: Program, buffer: torch.Tensor, op: str, transport: InProcessTransport, *, timeout_s: float = 20
) -> None:
    numbers = Numbers(program, buffer, buffer, COMBINE[op], transport.rank, Scratch())
    execute(program, numbers, transport, tag=5, deadline=time.monotonic() + timeout_s)


def run(
    planner: Planner,
    segments: Callable[[int], Sequence[Sequence[Span]]],
    results: Sequence[torch.Tensor],
    op: str = "sum",
    *,
    eager: bool = True,
) -> None:
    """Let all ranks follow their programs at the same time, each on its result. segments: how so many blocks are cut."""
    size, hub = len(results), Hub(len(results), eager=eager)

    def body(rank: int) -> None:
        schedule = planner(Place(rank, size, 0, hosts_of(size)))
        program = Program(schedule, segments(schedule.blocks))
        follow(program, results[rank], op, InProcessTransport(hub, rank))

    run_ranks(size, body)


@pytest.mark.parametrize("algorithm", list(PLANNERS["allreduce"]))
@settings(max_examples=12)
@given(size=SIZES, numel=LENGTHS, segment=SEGMENTS, eager=st.booleans())
def test_allreduce(algorithm: str, size: int, numel: int, segment: int, eager: bool) -> None:
    results = [contribution(rank, numel) for rank in range(size)]
    expected = torch.stack(results).sum(0)
    run(
        PLANNERS["allreduce"][algorithm],
        lambda blocks: segments_of_buffer(numel, blocks, segment),
        results,
        eager=eager,
    )
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("algorithm", list(PLANNERS["allgather"]))
@settings(max_examples=12)
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6), segment=SEGMENTS, eager=st.booleans())
def test_allgather_and_reduce_scatter_of_unequal_blocks(
    algorithm: str, lengths: list[int], segment: int, eager: bool
) -> None:
    layout = consecutive(lengths)
    results = [contribution(rank, layout[-1].stop) for rank in range(len(lengths))]
    expected = torch.stack(results).sum(0)
    for collective in ("reduce_scatter", "allgather"):
        planner = PLANNERS[collective][algorithm]
        run(planner, lambda blocks: segments_of_blocks(layout, segment), results, eager=eager)
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("algorithm", list(PLANNERS["allreduce"]))
def test_zeros_of_both_signs_come_out_alike_everywhere(algorithm: str, op: str) -> None:
    results = [torch.tensor([0.0, -0.0]).roll(rank) for rank in range(5)]
    run(PLANNERS["allreduce"][algorithm], lambda blocks: segments_of_buffer(2, blocks, 2), results, op)
    assert len({tuple(result.view(torch.int32).tolist()) for result in results}) == 1


def test_a_message_that_never_comes_ends_at_the_deadline() -> None:
    schedule = PLANNERS["allreduce"]["ring"](Place(0, 3))
    buffer = torch.ones(30)
    program = Program(schedule, segments_of_buffer(30, 3, 10))
    transport = InProcessTransport(Hub(3, eager=True), 0)
    with pytest.raises(LinkError) as caught:
        follow(program, buffer, "sum", transport, timeout_s=0.2)
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
        transport = InProcessTransport(hub, rank)
        if rank == 2:
            threading.Timer(0.2, sent.set).start()
        follow(program, results[rank], "sum", transport)

    run_ranks(3, body)
    assert torch.equal(results[1], contribution(0, 4))
    assert torch.equal(results[0], contribution(2, 4))


@pytest.mark.parametrize("algorithm", list(PLANNERS["allreduce"]))
@pytest.mark.parametrize("numel", [0, 5, 5000])
def test_a_program_is_the_same_whether_it_is_kept_or_laid_out_while_it_runs(
    algorithm: str, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(rank: int) -> tuple[list[Instruction], int]:
        schedule = PLANNERS["allreduce"][algorithm](Place(rank, 5, 0, hosts_of(5)))
        program = Program(schedule, segments_of_buffer(numel, schedule.blocks, 100))
        return list(program), program.sent_bytes(lambda length: length)

    kept = [rows(rank) for rank in range(5)]
    monkeypatch.setattr("gradwire.collectives.schedules.program._KEPT", -1)
    assert [rows(rank) for rank in range(5)] == kept
    for instructions, elements in kept:
        assert np.array(instructions, dtype=np.int64).size == len(instructions) * len(Instruction._fields)
        assert elements == sum(row.length for row in instructions if row.kind == Kind.SEND)
        numbers = [row.number for row in instructions if row.kind in (Kind.SEND, Kind.RECEIVE)]
        assert numbers == list(range(len(numbers)))
        assert sorted(row.number for row in instructions if row.kind == Kind.WAIT) == numbers


def directed(programs: Sequence[Program], kind: Kind) -> Counter[tuple[int, int, int, int]]:
    """How many messages of a segment and a length go from one rank to another, by what one of the two ends does."""
    return Counter(
        (rank, row.peer, row.segment, row.length) if kind == Kind.SEND else (row.peer, rank, row.segment, row.length)
        for rank, program in enumerate(programs)
        for row in program
        if row.kind == kind
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("collective", "algorithm"), [(verb, name) for verb in PLANNERS for name in PLANNERS[verb]])
def test_whoever_only_receives_answers_and_nobody_else(collective: str, algorithm: str, size: int) -> None:
    """An answer is an empty message, the only one there is, and each has its receiver, also where messages are left out."""

    def programs(root: int, *, answered: bool, numel: int = 360) -> list[Program]:
        places = [Place(rank, size, root, hosts_of(size)) for rank in range(size)]
        schedules = [PLANNERS[collective][algorithm](place) for place in places]
        segment = 360 if collective == "alltoall" else 30  # what two ranks give each other there is of one length
        segments = segments_of_buffer(numel, schedules[0].blocks, segment)
        return [Program(schedule, segments, answered=answered) for schedule in schedules]

    for root in range(size) if collective in ("broadcast", "reduce", "gather", "scatter") else (0,):
        plain, answering = (programs(root, answered=answered) for answered in (False, True))
        sent = directed(plain, Kind.SEND)
        talks = {(sender, receiver) for sender, receiver, _, _ in sent}
        answers = Counter((receiver, sender, 0, 0) for sender, receiver in talks if (receiver, sender) not in talks)
        assert directed(plain, Kind.RECEIVE) == sent
        assert directed(answering, Kind.SEND) == directed(answering, Kind.RECEIVE) == sent + answers
        for rows in map(list, answering):
            numbers = [row.number for row in rows if row.kind in (Kind.SEND, Kind.RECEIVE)]
            assert sorted(row.number for row in rows if row.kind == Kind.WAIT) == sorted(numbers)
            assert len(set(numbers)) == len(numbers)
        for numel in (0, 2) if collective != "alltoall" else ():
            few = programs(root, answered=True, numel=numel)
            assert directed(few, Kind.SEND) == directed(few, Kind.RECEIVE)


def test_a_ring_among_very_many_ranks_is_planned_for_one_of_them() -> None:
    schedule = PLANNERS["allreduce"]["ring"](Place(5000, 10_000))
    program = Program(schedule, segments_of_buffer(1 << 20, schedule.blocks, 1 << 16))
    assert (program.sent_bytes(lambda length: 1), program.sent_bytes(lambda length: length)) == (19_998, 2_096_942)


@pytest.mark.parametrize("algorithm", list(PLANNERS["allreduce"]))
@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("coded", [False, True])
def test_without_lookahead_the_two_ends_of_every_message_are_posted_together(
    algorithm: str, size: int, coded: bool
) -> None:
    """Messages that are posted as one group, as NCCL wants them, wait for each other's ends."""

    def groups(rank: int) -> list[Counter[tuple[int, int]]]:
        schedule = PLANNERS["allreduce"][algorithm](Place(rank, size, 0, hosts_of(size)))
        segments = segments_of_buffer(5000, schedule.blocks, 100)
        program = Program(schedule, segments, lookahead=0)
        if coded:
            program = CodedProgram(schedule, segments, 1, range(size), lookahead=0)
        posted: list[Counter[tuple[int, int]]] = [Counter()]
        for row in program:
            if row.kind in (Kind.SEND, Kind.RECEIVE):
                ends = (rank, row.peer) if row.kind == Kind.SEND else (row.peer, rank)
                posted[-1][ends] += 1
            elif row.kind == Kind.POST:
                posted.append(Counter())
        return [group for group in posted if group]

    waiting = [groups(rank) for rank in range(size)]
    while any(waiting):
        done = [
            rank
            for rank in range(size)
            if waiting[rank]
            and all(
                waiting[peer] and waiting[peer][0][ends] == count
                for ends, count in waiting[rank][0].items()
                for peer in set(ends) - {rank}
            )
        ]
        together = [rank for rank in done if all(set(ends) <= set(done) for ends in waiting[rank][0])]
        assert together, f"nobody gets on: {[group[:1] for group in waiting]}"
        for rank in together:
            waiting[rank].pop(0)
