"""Communicator(shared_memory=True): the same exact answers and the same errors through the memory that ranks share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import Communicator, Mismatch
from tests.harness import EXCHANGE_TIMEOUT_S, World, Worlds
from tests.ranks import test_collectives_allreduce as reductions
from tests.ranks import test_collectives_copy as copies
from tests.ranks import test_failures as failures
from tests.ranks.exact import Checks, contribution, reduced

pytest.importorskip("numba")

WORLDS = (1, 2, 3, 4, 8)
WORLD, VICTIM = 3, 0  # of the failures
LARGE = (5_000, 100_003)  # elements: more than every rank reduces by itself


def asked_for(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), in which every Communicator asks for shared memory."""
    defaults = Communicator.__init__.__kwdefaults__
    assert defaults["shared_memory"] is False
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "shared_memory", True)
        return function(*args)


def exact(cases: list[tuple[Callable[[str], list[str]], str]]) -> list[str]:
    return [
        f"{function.__name__}, {algorithm}: {failure}"
        for function, algorithm in cases
        for failure in asked_for(function, algorithm)
    ]


def large() -> list[str]:
    """Tensors of one's own and shared ones, again and again, on some ranks shared and on others not."""
    checks = Checks()
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S, shared_memory=True) as comm:
        for numel in LARGE:
            for dtype, op in ((torch.float32, "sum"), (torch.float32, "average"), (torch.bfloat16, "max")):
                for place in ("own", "shared", "shared on even ranks"):
                    values = contribution(comm.rank, comm.size, numel, dtype, op)
                    tensor = torch.empty(numel, dtype=dtype)
                    if place == "shared" or (place != "own" and comm.rank % 2 == 0):
                        tensor = comm.empty(numel, dtype=dtype)
                    expected = reduced(comm.size, numel, dtype, op)
                    for time in range(4):
                        with checks.case(numel=numel, dtype=dtype, op=op, place=place, time=time):
                            tensor.copy_(values)
                            comm.allreduce(tensor, op)
                            checks.equal(tensor, expected)
    return checks.failures


def barriers() -> None:
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S, shared_memory=True) as comm:
        for algorithm in ("auto", *comm.algorithms("barrier")):
            comm.barrier(algorithm=algorithm)
        work = comm.barrier(async_op=True)
        assert work is not None
        work.wait()


def shapes_differ() -> str:
    """Two shapes of one length, one of them remembered from an equal call before: not the same call."""
    comm = Communicator(timeout_s=failures.TIMEOUT_S, shared_memory=True)
    for _ in range(3):
        comm.allreduce(torch.ones(6, 4))
    with pytest.raises(Mismatch) as caught:
        comm.allreduce(torch.ones(4, 6) if comm.rank == VICTIM else torch.ones(6, 4))
    comm.close()
    return str(caught.value)


def names() -> dict[str, tuple[tuple[str, ...], tuple[str, ...], str]]:
    with (
        Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as without,
        Communicator(timeout_s=EXCHANGE_TIMEOUT_S, shared_memory=True) as comm,
    ):
        return {
            verb: (without.algorithms(verb), comm.algorithms(verb), comm.chosen(verb, 1000))
            for verb in ("allreduce", "barrier", "alltoall")
        }


def not_asked_for() -> tuple[str, bool]:
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        return comm.chosen("allreduce", 1000), comm.empty(3, 4).shape == (3, 4)


def asked_for_by_some() -> str:
    wanted = torch.distributed.get_rank() != 1
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S, shared_memory=wanted) as comm:
        tensor = comm.empty(5000).fill_(1)
        comm.allreduce(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, float(comm.size)))
        return comm.chosen("allreduce", 1000)


@pytest.mark.parametrize("world", WORLDS)
def test_allreduce(ranks: Worlds, world: int) -> None:
    around = [reductions.scaled, reductions.views, reductions.grouped]
    cases = [(reductions.exact, name) for name in ("auto", "ring", "tree")] + [(case, "auto") for case in around]
    assert ranks(world).run(exact, cases) == [[]] * world
    digests = [ranks(world).run(asked_for, reductions.digests_of_random_sums, "auto") for _ in range(2)]
    assert digests == [[digests[0][0]] * world] * 2


@pytest.mark.parametrize("world", WORLDS)
def test_large_allreduce(ranks: Worlds, world: int) -> None:
    assert ranks(world).run(large) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_copies(ranks: Worlds, world: int) -> None:
    functions = (
        copies.allgather_tensors,
        copies.allgather_lists,
        copies.broadcast,
        copies.alltoall_equal,
        copies.alltoall_splits,
    )
    assert ranks(world).run(exact, [(function, "auto") for function in functions]) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_barrier(ranks: Worlds, world: int) -> None:
    ranks(world).run(barriers)


@pytest.mark.parametrize("world", WORLDS)
def test_names(ranks: Worlds, world: int) -> None:
    for found in ranks(world).run(names):
        for verb, (without, with_it, chosen) in found.items():
            is_there = world > 1 and verb != "alltoall"
            assert "shared" not in without
            assert ("shared" in with_it) == is_there
            assert (chosen == "shared") == is_there


def test_nobody_gets_it_unasked(ranks: Worlds) -> None:
    assert all(chosen != "shared" and made for chosen, made in ranks(3).run(not_asked_for))


def test_all_do_without_it_unless_all_ask(ranks: Worlds) -> None:
    assert "shared" not in ranks(3).run(asked_for_by_some)


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_rank_fails(failing_world: Callable[[int], World], fault: str) -> None:
    worlds = [(phase, failing_world(WORLD)) for phase in ("between two", "in the middle")]
    for phase, world in worlds:
        world.start(asked_for, failures.suffer, "shared", phase, fault, VICTIM)
    found = []
    for phase, world in worlds:
        for outcome in world.collect(failures.DEADLINE_S, ranks=[rank for rank in range(WORLD) if rank != VICTIM]):
            found += [f"{phase}, rank {outcome.rank}: {text}" for text in failures.complaints(outcome, fault, VICTIM)]
    assert not found, "\n".join(found)


def test_a_rank_calls_something_else(failing_world: Callable[[int], World]) -> None:
    worlds = [(subject, failing_world(WORLD)) for subject, _, _ in failures.DISAGREEMENTS]
    for subject, world in worlds:
        world.start(asked_for, failures.disagree, subject, "shared", VICTIM)
    for subject, world in worlds:
        for outcome in world.collect(failures.DEADLINE_S):
            assert outcome.status == "returned", f"{subject}: {outcome}"
            assert outcome.value.kind is Mismatch, f"{subject}: {outcome.value.text}"
            assert outcome.value.complaints() == [], subject


def test_shapes_are_part_of_a_call(failing_world: Callable[[int], World]) -> None:
    world = failing_world(WORLD)
    world.start(shapes_differ)
    for outcome in world.collect(failures.DEADLINE_S):
        assert outcome.status == "returned", outcome
        assert "[4, 6]" in outcome.value
        assert "[6, 4]" in outcome.value
