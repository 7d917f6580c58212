"""The object forms and barrier."""

import time

import pytest
import torch
import torch.distributed

from gradwire.collectives.plan.algorithms import PLANNERS
from tests.harness import ON_EVERY_TRANSPORT, Worlds
from tests.ranks.exact import WORLDS, communicator

pytestmark = ON_EVERY_TRANSPORT


def thing(rank: int) -> dict[str, object]:
    """Something picklable whose size grows with the rank; every field tells the ranks apart."""
    return {"rank": rank, "text": "x" * (1000 * rank), "nested": [(rank, None), {rank}], "values": [float(rank)] * 3}


def objects() -> None:
    with communicator() as comm:
        everything = [thing(rank) for rank in range(comm.size)]
        assert comm.allgather_object(thing(comm.rank)) == everything
        for root in range(comm.size):
            is_root = comm.rank == root
            assert comm.broadcast_object(thing(root) if is_root else None, root) == thing(root)
            assert comm.gather_object(thing(comm.rank), root) == (everything if is_root else None)
            assert comm.scatter_object(everything if is_root else None, root) == thing(comm.rank)
        records = [
            {"rank": rank, "names": ["é" * rank], "share": 0.1 * rank, "none": None} for rank in range(comm.size)
        ]
        assert comm.allgather_record(records[comm.rank]) == records
        with pytest.raises(TypeError, match="not JSON serializable"):
            comm.allgather_record(object())
        tensor = comm.broadcast_object(torch.arange(1000) if comm.rank == 0 else None)
        assert torch.equal(tensor, torch.arange(1000))


def barriers(algorithm: str) -> list[tuple[float, float]]:
    """When this rank entered and left each of a few barriers, one rank after the other coming late."""
    times = []
    with communicator() as comm:
        for late in range(comm.size):
            if comm.rank == late:
                time.sleep(0.02)
            entered = time.monotonic()
            comm.barrier(algorithm=algorithm)
            times.append((entered, time.monotonic()))
    return times


@pytest.mark.parametrize("world", WORLDS)
def test_objects(ranks: Worlds, world: int) -> None:
    ranks(world).run(objects)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", [*PLANNERS["barrier"], "native", "auto"])
def test_nobody_leaves_a_barrier_before_all_have_entered(ranks: Worlds, world: int, algorithm: str) -> None:
    for at_once in zip(*ranks(world).run(barriers, algorithm), strict=True):
        assert max(entered for entered, _ in at_once) <= min(left for _, left in at_once)
