"""Ranks that call different things are told so at once: what each called, and where; and they go on where no data has moved."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations

import pytest
import torch

from gradwire.collectives import CollectiveError, Communicator, Mismatch
from gradwire.collectives.compression.dense import Int8
from gradwire.collectives.compression.sparse import DGC
from gradwire.collectives.engine.point_to_point import MessageWork
from tests.harness import ON_EVERY_TRANSPORT, Worlds, wide
from tests.ranks.training import on_ranks

pytestmark = ON_EVERY_TRANSPORT

SOON_S = 2.0  # within which a mismatch is to be told
FAR_S = 40.0  # the deadline of an operation, which nothing here is to run into

#: How many cases may take longer, or cost the Communicator, because this machine did not let a rank run.
ALLOWANCE = 0.01


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def run(result: object) -> None:
    if result is not None:
        result.wait()  # type: ignore[attr-defined]


def prepared(comm: Communicator, tensor: torch.Tensor, *, start: bool) -> None:
    operation = comm.prepare_allreduce(tensor)
    if start:
        operation.start()
        operation.wait()
    else:
        operation()


def parts(comm: Communicator, numel: int) -> list[torch.Tensor]:
    return [ones(numel) for _ in range(comm.size)]


def with_feedback(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.allreduce(tensor, compression="int8", feedback=comm.new_feedback("int8", tensor.numel()))


def alltoall_by_splits(comm: Communicator, tensor: torch.Tensor) -> None:
    splits = [6 // comm.size + (rank < 6 % comm.size) for rank in range(comm.size)]
    mine = splits[comm.rank]
    comm.alltoall(ones(mine * comm.size), tensor, [mine] * comm.size, splits)


#: (what the error is to quote, the tensor that must stay as it is, the call)
Way = tuple[str, Callable[[], torch.Tensor], Callable[[Communicator, torch.Tensor], object]]

WAYS: list[Way] = [
    ("allreduce(float32[6], sum, ", lambda: ones(6), lambda comm, t: comm.allreduce(t)),
    ("allreduce(float32[7], sum, ", lambda: ones(7), lambda comm, t: comm.allreduce(t, async_op=True)),
    ("allreduce(float32[2, 3], sum, ", lambda: ones(2, 3), lambda comm, t: comm.allreduce(t)),
    ("allreduce(float32[70000], sum, ", lambda: ones(70000), lambda comm, t: comm.allreduce(t)),
    ("allreduce(float64[6], ", lambda: ones(6, dtype=torch.float64), lambda comm, t: comm.allreduce(t)),
    ("allreduce(int32[6], ", lambda: ones(6, dtype=torch.int32), lambda comm, t: comm.allreduce(t, async_op=True)),
    ("allreduce(bfloat16[6], ", lambda: ones(6, dtype=torch.bfloat16), lambda comm, t: comm.allreduce(t)),
    ("allreduce(float32[6], max, ", lambda: ones(6), lambda comm, t: comm.allreduce(t, "max")),
    ("allreduce(float32[6], average, ", lambda: ones(6), lambda comm, t: comm.allreduce(t, "average", async_op=True)),
    ("allreduce(float32[8], sum, ring", lambda: ones(8), lambda comm, t: comm.allreduce(t, algorithm="ring")),
    ("allreduce(float32[8], sum, rsag", lambda: ones(8), lambda comm, t: comm.allreduce(t, algorithm="rsag")),
    ("prescale=2.0", lambda: ones(6), lambda comm, t: comm.allreduce(t, prescale=2.0)),
    ("int8(block=256", lambda: ones(6), lambda comm, t: comm.allreduce(t, compression="int8", step=0)),
    (
        "int8(block=64",
        lambda: ones(6),
        lambda comm, t: comm.allreduce(t, compression=Int8(block=64), step=0, async_op=True),
    ),
    ("fp16(", lambda: ones(6), lambda comm, t: comm.allreduce(t, compression="fp16")),
    ("error feedback", lambda: ones(6), with_feedback),
    ("allreduce(float32[9], ", lambda: ones(9), lambda comm, t: prepared(comm, t, start=False)),
    ("allreduce(float32[10], ", lambda: ones(10), lambda comm, t: prepared(comm, t, start=True)),
    ("float32[6], float32[2], sum", lambda: ones(6), lambda comm, t: comm.grouped_allreduce([t, ones(2)])),
    ("float32[2], float32[6], sum", lambda: ones(6), lambda comm, t: comm.grouped_allreduce([ones(2), t])),
    ("broadcast(float32[6], src=0", lambda: ones(6), lambda comm, t: comm.broadcast(t, 0)),
    ("broadcast(float32[6], src=1", lambda: ones(6), lambda comm, t: comm.broadcast(t, 1, async_op=True)),
    ("broadcast(int64[1]", lambda: ones(1), lambda comm, t: comm.broadcast_object("object", 0)),
    ("reduce(float32[6], dst=0", lambda: ones(6), lambda comm, t: comm.reduce(t, 0)),
    ("reduce(float32[6], dst=1", lambda: ones(6), lambda comm, t: comm.reduce(t, 1)),
    ("reduce_scatter(", lambda: ones(6), lambda comm, t: comm.reduce_scatter(t, parts(comm, 6))),
    ("allgather(", lambda: ones(6), lambda comm, t: comm.allgather(parts(comm, 6), t, async_op=True)),
    ("gather(", lambda: ones(6), lambda comm, t: comm.gather(t, parts(comm, 6) if comm.rank == 0 else None, 0)),
    ("scatter(", lambda: ones(6), lambda comm, t: comm.scatter(t, parts(comm, 6) if comm.rank == 1 else None, 1)),
    ("alltoall(float32, float32[12]", lambda: ones(12), lambda comm, t: comm.alltoall(ones(12), t)),
    ("alltoall(float32, splits", lambda: ones(6), alltoall_by_splits),
    ("barrier(", lambda: ones(1), lambda comm, t: comm.barrier()),
]
#: Calls that only a step tells apart.
OF_STEPS: list[Way] = [
    ("step=3", lambda: ones(3000), lambda comm, t: comm.allreduce(t, compression="randomk", step=3)),
    ("step=4", lambda: ones(3000), lambda comm, t: comm.allreduce(t, compression="randomk", step=4)),
    ("dgc(ratio=0.25", lambda: ones(3000), lambda comm, t: comm.allreduce(t, compression=DGC(ramp_steps=9))),
    ("dgc(ratio=0.0039", lambda: ones(3000), lambda comm, t: comm.allreduce(t, compression=DGC(ramp_steps=9), step=8)),
]
PAIRS = list(combinations(range(len(WAYS)), 2))


@dataclass
class Tally:
    """What a rank saw of many cases: what was wrong, how many took long, and how many cost the Communicator."""

    cases: int = 0
    wrong: list[str] = field(default_factory=list)
    slow: int = 0
    spoiled: int = 0

    def judge(self, case: str, call: Callable[[], object], quoted: dict[int, str]) -> Mismatch | None:
        """Call what must be a Mismatch that quotes so much of what each rank called."""
        self.cases += 1
        started = time.monotonic()
        try:
            call()
        except Mismatch as error:
            self.slow += time.monotonic() - started > SOON_S
            told = error.calls.keys() == quoted.keys() and all(quoted[rank] in error.calls[rank] for rank in quoted)
            if not told or any(quote not in str(error) for quote in quoted.values()):
                self.wrong.append(f"{case}: {error}")
            return error
        except CollectiveError as error:
            self.wrong.append(f"{case}: {error!r}")
        else:
            self.wrong.append(f"{case}: no error")
        return None


def differ(pairs: list[tuple[int, int]]) -> Tally:
    """Call each pair of ways, one of them on one rank and the other on all others."""
    comm = Communicator(timeout_s=FAR_S)
    comm.allreduce(ones(3))  # which may compile kernels
    tally = Tally()
    for number, pair in enumerate(pairs):
        odd = number % comm.size
        ways = [WAYS[pair[rank == odd]] for rank in range(comm.size)]
        _, make, call = ways[comm.rank]
        tensor = make()
        case = f"rank {comm.rank} of {comm.size}, pair {pair}"
        error = tally.judge(case, lambda: run(call(comm, tensor)), {r: way[0] for r, way in enumerate(ways)})  # noqa: B023
        places = error.places if error is not None else {}
        if places.keys() != set(range(comm.size)) or not all("test_mismatch.py:" in place for place in places.values()):
            tally.wrong.append(f"{case}: places {places}")
        if not torch.equal(tensor, make()):
            tally.wrong.append(f"{case}: the tensor is {tensor}")
        right = torch.tensor([number, comm.rank])
        try:
            comm.allreduce(right)
            if right.tolist() != [number * comm.size, sum(range(comm.size))]:
                tally.wrong.append(f"{case}: afterwards the sum is {right}")
        except CollectiveError:  # all see it, for none can do it without the others
            tally.spoiled += 1
            comm.close()
            comm = Communicator(timeout_s=FAR_S)
    comm.close()
    return tally


@pytest.mark.parametrize("pairs", [PAIRS[::7], *wide(PAIRS)], ids=["some pairs", "all pairs"])
def test_ranks_that_call_something_new_and_different_are_told_and_go_on(
    ranks: Worlds, pairs: list[tuple[int, int]]
) -> None:
    for tally in ranks(3).run(differ, pairs):
        assert tally.cases == len(pairs)
        assert not tally.wrong, "\n".join(tally.wrong[:20])
        assert tally.slow <= ALLOWANCE * tally.cases
        assert tally.spoiled <= ALLOWANCE * tally.cases


#: Pairs of WAYS and OF_STEPS, and which of them all ranks have called before.
KNOWN = [
    *((pair, pair) for pair in ((0, 1), (0, 4), (0, 7), (9, 10), (0, 20), (20, 21), (23, 31), (12, 13), (26, 0))),
    *((pair, pair) for pair in ((31, 20), (29, 25), (16, 18), (17, 3), (32, 33), (34, 35))),
    *((pair, pair[:1]) for pair in ((0, 1), (20, 0), (31, 12))),
]


def differ_in_known_ways() -> list[Tally]:
    comms, every = [Communicator(timeout_s=FAR_S) for _ in KNOWN], WAYS + OF_STEPS

    def differ_in_the_third_call(comm: Communicator, pair: tuple[int, int], known: tuple[int, ...], odd: int) -> Tally:
        tally = Tally()
        for which in (*known, *known):
            _, make, call = every[which]
            run(call(comm, make()))
        ways = [every[pair[rank == odd]] for rank in range(comm.size)]
        _, make, call = ways[comm.rank]
        case = f"rank {comm.rank} of {comm.size}, pair {pair} of which {known} are known"
        quoted = {rank: way[0] for rank, way in enumerate(ways)}
        if tally.judge(case, lambda: [run(call(comm, make())) for _ in range(3)], quoted) is not None:
            with pytest.raises(Mismatch, match="broken"):
                comm.barrier()
        comm.close()
        return tally

    with ThreadPoolExecutor(len(KNOWN)) as pool:
        odds = [number % comms[0].size for number in range(len(KNOWN))]
        pairs, known = zip(*KNOWN, strict=True)
        return list(pool.map(differ_in_the_third_call, comms, pairs, known, odds))


def test_ranks_that_call_what_is_known_in_another_order_are_told_too(ranks: Worlds) -> None:
    for tallies in ranks(3).run(differ_in_known_ways):
        wrong = [text for tally in tallies for text in tally.wrong]
        assert not wrong, "\n".join(wrong)
        assert sum(tally.slow for tally in tallies) <= 3  # of ranks that are all busy at the same time


@on_ranks(3, initialized=False)
def test_what_is_in_flight_is_told_apart() -> None:
    """Of five operations in flight, the third and the fourth come in another order on rank 0."""
    with Communicator(timeout_s=FAR_S) as comm:
        numels = [11, 12, 14, 13, 15] if comm.rank == 0 else [11, 12, 13, 14, 15]
        tensors = [ones(numel) for numel in numels]
        works = [comm.allreduce(tensor, async_op=True) for tensor in tensors]
        for position, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            if position in (2, 3):
                with pytest.raises(Mismatch) as caught:
                    work.wait()
                assert [call.partition(",")[0] for call in caught.value.calls.values()] == [
                    f"allreduce(float32[{14 - (rank > 0) if position == 2 else 13 + (rank > 0)}]"
                    for rank in range(comm.size)
                ]
                assert tensor.eq(1).all()
            else:
                work.wait()
                assert tensor.eq(comm.size).all()


@on_ranks(3, initialized=False)
def test_who_comes_late_to_a_mismatch_is_told_at_once() -> None:
    """The last rank comes when the others have long been told; it is told at once. Of calls that are new, and that are known."""

    def come(comm: Communicator, known: Iterable[int]) -> float:
        for numel in known:
            comm.allreduce(ones(numel))
        if comm.rank == comm.size - 1:
            time.sleep(SOON_S)
        started = time.monotonic()
        with pytest.raises(Mismatch) as caught:
            comm.allreduce(ones(20 + comm.rank))
        seconds = time.monotonic() - started
        assert "rank 0 called allreduce(float32[20]" in str(caught.value)
        assert "rank 1 called allreduce(float32[21]" in str(caught.value)
        assert str(caught.value).endswith("they differ in shape")
        comm.close()
        return seconds

    comms = [Communicator(timeout_s=FAR_S) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        waits_s = [*pool.map(come, comms, [(), range(20, 20 + comms[0].size)])]
    assert all(wait_s < 2 * SOON_S for wait_s in waits_s), waits_s  # on a machine that is busy


@on_ranks(3, initialized=False)
def test_messages_move_on_while_a_new_call_is_compared() -> None:
    with Communicator(timeout_s=FAR_S) as comm:
        large = ones(1 << 21)
        for number, (sends_later, receives_later) in enumerate([(True, False), (False, True)]):
            work = None
            if comm.rank == 0:
                work = (comm.isend if sends_later else comm.send)(large, 1)
            elif comm.rank == 1:
                work = (comm.irecv if receives_later else comm.recv)(large.zero_(), 0)
            summed = ones(30 + number)
            comm.allreduce(summed)
            assert summed.eq(comm.size).all()
            if isinstance(work, MessageWork):
                work.wait()
            assert large.eq(1).all()


@on_ranks(2, initialized=False)
def test_splits_that_differ_are_told_with_their_places() -> None:
    with Communicator(timeout_s=FAR_S) as comm:
        splits = [1] * comm.size if comm.rank else [1] * (comm.size - 1) + [2]  # what rank 0 expects of rank 1
        call = lambda: comm.alltoall(ones(comm.size), ones(sum(splits)), [1] * comm.size, splits)  # noqa: E731
        with pytest.raises(Mismatch) as caught:
            call()
        comm.barrier()
    line = call.__code__.co_firstlineno
    assert caught.value.calls.keys() == caught.value.places.keys() == {0, 1}
    assert all(place.endswith(f"test_mismatch.py:{line}") for place in caught.value.places.values())


@on_ranks(2, initialized=False)
def test_the_line_of_a_known_call_is_told() -> None:
    with Communicator(timeout_s=FAR_S) as comm:
        for numel in (3, 4, 3, 4):
            comm.allreduce(ones(numel))
        call = lambda: comm.allreduce(ones(3 if comm.rank == 0 else 4))  # noqa: E731
        with pytest.raises(Mismatch) as caught:
            call()
        assert str(caught.value).count(f"test_mismatch.py:{call.__code__.co_firstlineno}") == 2
