"""What only shared memory has: tensors in it, the two data paths, and that nothing of it is left behind."""

import gc
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.environment import SHARED_MEMORY
from gradwire.collectives.reduction import DTYPES
from gradwire.collectives.transports.shared_memory.segment import Segment
from tests.harness import World, Worlds, assert_holds, held, segments, wait_until, wide
from tests.ranks.exact import OPS, cover
from tests.ranks.training import assert_survived, on_ranks, without_a_copy

NUMELS = (1, 2047, 2049, 70_001, 600_000)
TIMEOUT_S = 20.0


@lru_cache(maxsize=8)  # of every rank, once for all operations on them
def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 4
    return numbers.to(dtype) if dtype.is_floating_point else numbers.abs().to(dtype)


def in_rank_order(size: int, numel: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    total = contribution(0, numel, dtype).clone()
    for rank in range(1, size):
        other = contribution(rank, numel, dtype)
        if op in ("sum", "average"):
            total = total.logical_or(other) if dtype is torch.bool else total.add_(other)
        else:
            total = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}[op](total, other)
    if op == "average":
        total.div_(size, rounding_mode=None if dtype.is_floating_point else "trunc")
    return total


def assert_adds(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.allreduce(tensor.fill_(1))
    assert torch.equal(tensor, torch.full_like(tensor, float(comm.size)))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


@on_ranks(3, *wide(8), initialized=False)
def test_both_paths_reduce_in_rank_order() -> None:
    rows = [row for row in cover(DTYPES, NUMELS, OPS) if row[::2] != (torch.bool, "average")]
    with Communicator(timeout_s=TIMEOUT_S) as comm:
        for dtype, numel, op in sorted(rows, key=str):  # the operations last: they share the contributions kept above
            expected = in_rank_order(comm.size, numel, dtype, op)
            base = comm.empty(numel + 3, dtype=dtype)
            for tensor in (torch.empty(numel, dtype=dtype), base[3:], base[3:]):
                tensor.copy_(contribution(comm.rank, numel, dtype))
                comm.allreduce(tensor, op, algorithm="shared")
                assert same(tensor, expected), (dtype, op, numel)
            assert numel * dtype.itemsize <= 8192 or without_a_copy(comm)


Case = tuple[int, tuple[torch.dtype, str], bool, bool]


def one_after_the_other(cases: list[Case]) -> None:
    with Communicator(timeout_s=TIMEOUT_S) as comm:
        for numel, (dtype, op), in_memory, asynchronous in cases:
            tensor = (comm.empty if in_memory else torch.empty)(numel, dtype=dtype)
            tensor.copy_(contribution(comm.rank, numel, dtype))
            comm.allreduce(tensor, op, async_op=asynchronous).wait()
            expected = in_rank_order(comm.size, numel, dtype, op)
            assert same(tensor, expected), (numel, dtype, op, in_memory, asynchronous)


NUMBERS = st.one_of(st.integers(0, 70), st.integers(2040, 2060), st.integers(0, 300_000))
REDUCTIONS = [pair for pair in product(DTYPES, OPS) if pair != (torch.bool, "average")]
CASES = st.tuples(NUMBERS, st.sampled_from(REDUCTIONS), st.booleans(), st.booleans())


@settings(max_examples=8)
@given(st.sampled_from((2, 3, 4)), st.lists(CASES, min_size=1, max_size=12))
def test_any_sequence_of_operations(ranks: Worlds, world: int, cases: list[Case]) -> None:
    ranks(world).run(one_after_the_other, cases)


@on_ranks(3, initialized=False)
def test_all_copy_where_a_tensor_of_one_lies_elsewhere() -> None:
    numel = 300_000
    with Communicator(timeout_s=TIMEOUT_S) as comm:
        mine = contribution(comm.rank, numel, torch.float32)
        expected = in_rank_order(comm.size, numel, torch.float32, "sum")
        shared = comm.empty(2 * numel)
        for odd in (*range(comm.size), None, None):
            tensor = torch.empty(numel) if comm.rank == odd else shared[comm.rank * 64 :][:numel]
            tensor.copy_(mine)
            comm.allreduce(tensor)
            assert torch.equal(tensor, expected)
            assert without_a_copy(comm) == (odd is None)


@on_ranks(2, *wide(4), initialized=False)
def test_memory_is_given_back() -> None:
    """Memory of tensors that are gone is given back, here and by the others, and its slots are used again."""
    Communicator(timeout_s=TIMEOUT_S).close()  # the connections of ranks that have met stay
    descriptors, maps = held()
    with Communicator(timeout_s=TIMEOUT_S) as comm:
        group = segments()
        for _ in range(300):
            tensor = comm.empty(4000)
            tensor.fill_(1)
            for _ in range(2):
                comm.allreduce(tensor)
            assert torch.equal(tensor, torch.full_like(tensor, float(comm.size**2)))
        assert without_a_copy(comm)
        assert segments() - group <= 2 * comm.size
        del tensor
        survivor = comm.empty(4000).fill_(3)
        comm.allreduce(torch.ones(1))
        assert segments() - group == comm.size
        closed = Communicator(timeout_s=TIMEOUT_S)
        closed.empty(10)
        closed.close()
        assert closed.empty(10).numel() == 10
    assert torch.equal(survivor, torch.full((4000,), 3.0))
    del survivor
    assert_holds(descriptors, maps)
    for _ in range(3):
        nobody_closes_it = Communicator(timeout_s=TIMEOUT_S)
        nobody_closes_it.allreduce(torch.ones(3))
        nobody_closes_it.barrier()
        del nobody_closes_it
    assert held()[1] == maps


def hindered(reason: str) -> tuple[bool, bool]:
    """Reduce where one rank cannot make or map memory; return whether the ranks share some, and whether the last operation went
    without a copy."""

    def refuse(*_: Any) -> Segment:
        raise OSError("not today")

    rank, limits = dist.get_rank(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.MonkeyPatch.context() as patch:
        if reason == "switched off" and rank == 1:
            patch.setenv(SHARED_MEMORY, "0")
        if reason == "no memory" and rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        if reason == "cannot join" and rank == 1:
            patch.setattr(Segment, "open", refuse)
        try:
            with Communicator(timeout_s=TIMEOUT_S) as comm:
                comm.allreduce(torch.ones(1))
                if reason == "cannot follow" and rank == 1:
                    patch.setattr(Segment, "open", refuse)
                if reason == "no files" and rank == 0:
                    first_free = os.dup(0)
                    os.close(first_free)
                    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
                tensor = comm.empty(5000)
                for _ in range(3):
                    assert_adds(comm, tensor)
                shares = "shared" in comm.algorithms("allreduce")
                return shares, shares and without_a_copy(comm)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("none", (True, True)),
        ("no memory", (False, False)),
        ("switched off", (False, False)),
        ("cannot join", (False, False)),
        ("cannot follow", (True, False)),
        ("no files", (True, False)),
    ],
)
def test_all_fall_back_together(
    ranks: Worlds, failing_world: Callable[[int], World], reason: str, expected: tuple[bool, bool]
) -> None:
    # One of its own: the file of an older world's store may be as large as the limit on files already.
    world = failing_world(3) if reason == "no memory" else ranks(3)
    assert world.run(hindered, reason) == [expected] * 3


@on_ranks(1, 2, 4, initialized=False)
def test_one_tensor_for_all_ranks() -> None:
    """What each rank writes into its part, all read; it outlives the Communicator, and is given back with the last view."""
    Communicator(timeout_s=TIMEOUT_S).close()  # the connections of ranks that have met stay
    descriptors, maps = held()
    with Communicator(timeout_s=TIMEOUT_S) as comm:
        group = segments()
        tensor = comm.shared_empty(comm.size, 1000, dtype=torch.int64)
        assert (tensor.shape, tensor.dtype, segments() - group) == ((comm.size, 1000), torch.int64, 1)
        assert not tensor.any()
        comm.barrier()
        tensor[comm.rank] = comm.rank + 1
        comm.barrier()
        assert tensor.equal(torch.arange(1, comm.size + 1)[:, None].expand(-1, 1000))
        assert comm.shared_empty(0, 3).shape == (0, 3)
        size = comm.size
    part = tensor[-1, 5:]
    del tensor
    gc.collect()
    assert part.eq(size).all()
    del part
    assert_holds(descriptors, maps)


def ask_for_different_memory() -> None:
    """All ranks are told, and the Communicator goes on."""
    with Communicator(timeout_s=TIMEOUT_S) as comm:
        comm.barrier()
        before = held()
        with pytest.raises(
            ValueError, match=r"rank 0 gave \[\[2\], 'torch.float32'\], rank 1 \[\[3\], 'torch.float32'\]"
        ) as kept:  # which keeps what the call had
            comm.shared_empty(2 + comm.rank)
        assert held() == before, kept
        with pytest.raises(
            CollectiveError, match=r"no memory can be shared by all ranks: rank 0: .* are wanted, and \d+ bytes"
        ):
            comm.shared_empty(1 << 50)
        with pytest.raises(TypeError, match="complex"):
            comm.shared_empty(1, dtype=torch.complex64)
        if comm.rank == 1:  # what cannot be opened on one rank is there for none
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
        try:
            with pytest.raises(CollectiveError, match=r"no memory can be shared by all ranks: rank 1: .*cannot map"):
                comm.shared_empty(1 << 20, 16)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        before = held()
        assert comm.shared_empty(5).eq(0).all()
        assert held() == before


def test_one_tensor_for_all_ranks_or_an_error_on_all(failing_world: Callable[[int], World]) -> None:
    failing_world(2).run(ask_for_different_memory)


@on_ranks(2, initialized=False)
def test_more_tensors_than_there_are_slots() -> None:
    """The last ones are ordinary."""
    with Communicator(timeout_s=TIMEOUT_S) as comm:
        many = [comm.empty((2, 3)) for _ in range(300)]
        for tensor in (many[0], many[-1], comm.empty(torch.Size([5000]))):
            for _ in range(2):
                assert_adds(comm, tensor)
        assert not without_a_copy(comm)


KINDS = {signal.SIGKILL: "PeerLost", signal.SIGSTOP: "CollectiveTimeout"}


def work_until_it_fails(seed: int, started: Path) -> str:
    comm = Communicator(timeout_s=3.0)
    comm.barrier()
    started.touch()
    same, own = random.Random(seed), random.Random()
    try:
        while True:
            numel, verb = same.choice((1, 1000, 5000, 200_000)), same.choice(("allreduce", "broadcast", "barrier"))
            tensor = comm.empty(numel) if own.random() < 0.5 else torch.empty(numel)
            tensor.fill_(comm.rank + 1)
            given = () if verb == "barrier" else (tensor,)
            getattr(comm, verb)(*given, async_op=own.random() < 0.3).wait()
            expected = {"allreduce": sum(range(comm.size + 1)), "broadcast": 1, "barrier": comm.rank + 1}[verb]
            assert tensor.eq(expected).all(), verb
    except CollectiveError as error:
        comm.close()
        return type(error).__name__


def test_a_rank_is_hit_at_random(failing_world: Callable[[int], World], tmp_path: Path) -> None:
    """Every survivor gets an error in time, wherever the victim was, and no wrong number before. All worlds run at the same
    time."""
    hits = [(number, failing_world(size)) for number in KINDS for size in (2, 3)]
    for seed, (_, world) in enumerate(hits):
        world.start(work_until_it_fails, seed, tmp_path / str(seed))
    wait_until(lambda: len(list(tmp_path.iterdir())) == len(hits), 30.0)
    for number, world in hits:
        time.sleep(random.random() * 0.05)
        world.signal(world.size - 1, number)
    for number, world in hits:
        assert set(assert_survived(world, [world.size - 1], 30.0)) == {KINDS[number]}
        world.kill()


def keep_what_they_have(folder: Path) -> bool:
    """Give up an allreduce in place of three ranks, of which the last one is stopped meanwhile; return whether the tensor of
    this rank stays as it is when that rank goes on."""
    comm = Communicator(timeout_s=20.0 if dist.get_rank() == 2 else 1.0)
    tensor = comm.empty(300_000).fill_(comm.rank + 1)
    comm.allreduce(tensor)  # announces the tensors
    assert comm.rank == 2 or not (folder / "stopped").exists()
    (folder / f"begun {comm.rank}").touch()
    if comm.rank < 2:
        wait_until((folder / "stopped").exists)
    with pytest.raises(CollectiveError):
        comm.allreduce(tensor)
    comm.close()
    kept = tensor.clone()
    (folder / f"ended {comm.rank}").touch()
    if comm.rank < 2:
        wait_until((folder / "ended 2").exists)
    return torch.equal(tensor, kept)


def test_a_rank_that_was_stopped_does_not_write_to_those_that_gave_up(
    failing_world: Callable[[int], World], tmp_path: Path
) -> None:
    world = failing_world(3)
    world.start(keep_what_they_have, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("begun *"))) == 3)
    time.sleep(0.3)  # until rank 2 waits in the second allreduce
    world.signal(2, signal.SIGSTOP)
    (tmp_path / "stopped").touch()
    wait_until(lambda: len(list(tmp_path.glob("ended *"))) == 2)
    world.signal(2, signal.SIGCONT)
    assert assert_survived(world, [], 30.0) == [True] * 3
