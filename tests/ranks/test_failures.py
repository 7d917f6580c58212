"""A rank dies, stops, comes late or leaves: every survivor gets an error that says so, in time.

The worlds of one test run at the same time, because most of their life is waiting for a deadline.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, PeerLost
from tests.harness import Outcome, World, Worlds, wide
from tests.ranks.exact import cover, on_host
from tests.ranks.training import assert_survived

pytestmark = pytest.mark.parametrize("ranks", ["shared_memory", "sockets", *wide("process_group")], indirect=True)

#: One of each way to run an operation; the soak draws them all.
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ("ring", "hierarchical", "native", "auto")},
    **{name: {"compression": name} for name in ("int8", "topk", "bf16")},
}
TIMEOUT_S = 2.0  # of an operation that runs into it
FAR_S = 20.0  # of one that must not
HANG_S = 10.0  # an error that is due within a second and takes longer counts as a hang, on a busy machine too
DEADLINE_S = 30.0  # for a whole world, on a machine where many of them run
SIZE = 3
VICTIMS = {2: 1, 3: 0, 4: 2}  # by world size
PHASES = ("before the first", "between two", "in the middle", "while idle in async")
SMALL, LARGE, HUGE = 100, 1 << 18, 1 << 22


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {"killed": die, "raising": lambda: sys.exit(1), "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP)}
TIMEOUTS_S = {"killed": FAR_S, "raising": FAR_S, "stopped": TIMEOUT_S}


@dataclass(frozen=True)
class Witness:
    """What a survivor saw: the error, how long it took to come, and how the Communicator behaved after it."""

    kind: type[CollectiveError]
    attributes: dict[str, Any]
    text: str
    seconds: float
    later_texts: tuple[str, str]
    later_seconds: float

    def complaints(self) -> list[str]:
        found = []
        # A lost peer is seen at once, whatever the deadline.
        if self.seconds > HANG_S + (0 if self.kind is PeerLost else TIMEOUT_S):
            found.append(f"came after {self.seconds:.1f} s")
        if self.later_seconds > HANG_S:
            found.append(f"calls after the error, and close, took {self.later_seconds:.1f} s")
        if not all("broken" in text for text in self.later_texts):
            found.append(f"calls after the error do not say that the Communicator is broken: {self.later_texts}")
        return found


def witness(comm: Communicator, call: Callable[[], object]) -> Witness:
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        call()
    failed = time.monotonic()
    with pytest.raises(CollectiveError) as synchronous:
        comm.allreduce(torch.ones(1))
    with pytest.raises(CollectiveError) as asynchronous:
        wait(comm.broadcast(torch.ones(1), async_op=True))
    comm.close()
    closed = time.monotonic()
    return Witness(
        kind=caught.type,
        attributes=vars(caught.value),
        text=str(caught.value),
        seconds=failed - started,
        later_texts=(str(synchronous.value), str(asynchronous.value)),
        later_seconds=closed - failed,
    )


def wait(*works: Any) -> None:
    for work in works:
        work.wait()


def suffer(way: str, phase: str, fault: str, victim: int) -> Witness:
    """Exchange until the phase in which the victim fails; the others say what they saw."""
    # Two hosts in turns for the algorithm that tells hosts apart.
    with on_host("ab"[dist.get_rank() % 2]) if way == "hierarchical" else nullcontext():
        comm = Communicator(timeout_s=TIMEOUTS_S[fault], segment_bytes=1 << 16)
    dist.barrier()  # all have one, so that none is lost in the making
    in_background, works = phase in ("in the middle", "while idle in async"), []

    def exchange(numel: int = SMALL) -> Any:
        return comm.allreduce(torch.ones(numel), **WAYS[way], async_op=in_background)

    if phase == "between two":
        exchange()
    if phase == "while idle in async":
        wait(exchange())
    if phase == "in the middle":
        works = [exchange(LARGE) for _ in range(8)]
        dist.barrier()  # nobody is still issuing
        works[0].wait()
    if comm.rank == victim:
        FAULTS[fault]()
    return witness(comm, lambda: wait(*works, exchange()) if in_background else exchange())


def complaints(outcome: Outcome, fault: str, victim: int) -> list[str]:
    if outcome.status != "returned":
        return [str(outcome)]
    seen: Witness = outcome.value
    found = seen.complaints()
    if "allreduce" not in seen.attributes["operation"]:
        found.append("does not name the operation")
    if fault == "stopped":
        if seen.kind is not CollectiveTimeout or victim not in seen.attributes["waiting_for"]:
            found.append("is not a timeout of waiting for the stopped rank")
        elif seen.attributes["seconds"] != TIMEOUT_S:
            found.append(f"does not say {TIMEOUT_S} s")
    elif seen.kind is not PeerLost or seen.attributes["ranks"] != (victim,):
        found.append("is not the loss of just the dead rank")
    return [f"{complaint} [{seen.kind.__name__}: {seen.text}]" for complaint in found]


CASES = [
    *cover(PHASES, [*WAYS][:4], [*FAULTS], [*VICTIMS]),
    *(("in the middle", codec, "killed", size) for codec, size in (("int8", 3), ("topk", 2), ("bf16", 2))),
]


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_fails(failing_world: Callable[[int], World], phase: str) -> None:
    found = []
    cases = [(*case, failing_world(case[-1])) for case in CASES if case[0] == phase]
    for _, way, fault, size, world in cases:
        world.start(suffer, way, phase, fault, VICTIMS[size])
    for _, way, fault, size, world in cases:
        victim = VICTIMS[size]
        for outcome in world.collect(DEADLINE_S, ranks=[rank for rank in range(size) if rank != victim]):
            for complaint in complaints(outcome, fault, victim):
                found.append(f"{fault}, {way}, world of {size}, rank {outcome.rank}: {complaint}")
        world.kill()
    assert not found, "\n".join(found)


def die_in_the_middle_of_a_large_one() -> Witness:
    """Rank 1 ends while megabytes of it are on their way. Its backend does not always tell the others."""
    comm = Communicator(timeout_s=FAR_S)
    comm.allreduce(torch.ones(SMALL))
    dist.barrier()
    if comm.rank == 1:
        threading.Timer(0.01, die).start()
    return witness(comm, lambda: [comm.allreduce(torch.ones(HUGE), algorithm="ring") for _ in range(1000)])


def come_late() -> Witness:
    """Rank 0 calls when the others have given up."""
    comm = Communicator(timeout_s=0.5)
    comm.allreduce(torch.ones(SMALL))
    if comm.rank == 0:
        time.sleep(0.8)
    return witness(comm, lambda: comm.allreduce(torch.ones(SMALL)))


def lose_the_host_of_the_store(path: Path) -> Witness | None:
    """Rank 0 takes with it the TCPStore through which survivors would tell each other what they saw."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # gloo ends the process of a rank that still connects when another leaves
    dist.destroy_process_group()
    port = dist.FileStore(str(path), size)
    store = dist.TCPStore("localhost", 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    if store is not None:
        port.set("port", str(store.port))
    store = store or dist.TCPStore("localhost", int(port.get("port")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    comm = Communicator(timeout_s=TIMEOUT_S)
    comm.allreduce(torch.ones(SMALL))
    if rank == 0:
        die()
    return witness(comm, lambda: comm.allreduce(torch.ones(SMALL)))


def close_while_others_call() -> Witness | None:
    comm = Communicator(timeout_s=TIMEOUT_S)
    comm.allreduce(torch.ones(SMALL))
    if comm.rank == 0:
        comm.close()
        return None
    return witness(comm, lambda: comm.allreduce(torch.ones(SMALL)))


def fail_one_of_two() -> Witness | None:
    """What breaks one Communicator leaves another of the same ranks alone."""
    broken, sound = Communicator(timeout_s=0.5), Communicator(timeout_s=3.0)
    seen = None
    if broken.rank > 0:
        seen = witness(broken, lambda: broken.allreduce(torch.ones(SMALL)))
    tensor = torch.ones(SMALL)
    sound.allreduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, float(sound.size)))
    broken.close()
    sound.close()
    return seen


def witnesses(ranks: Worlds, function: Callable[..., Any]) -> list[Witness]:
    """What the ranks but rank 0 see, all of them good witnesses."""
    found: list[Witness] = ranks(SIZE).run(function)[1:]
    assert [seen.complaints() for seen in found] == [[]] * (SIZE - 1)
    return found


def test_a_rank_is_killed_while_it_sends(failing_world: Callable[[int], World]) -> None:
    worlds = [failing_world(SIZE) for _ in range(2)]
    for world in worlds:
        world.start(die_in_the_middle_of_a_large_one)
    for seen in (seen for world in worlds for seen in assert_survived(world, [1], DEADLINE_S)):
        assert (seen.kind, seen.attributes.get("ranks")) == (PeerLost, (1,)), seen.text


def test_a_rank_comes_late(ranks: Worlds) -> None:
    late, *punctual = ranks(SIZE).run(come_late)
    assert {seen.kind for seen in (late, *punctual)} == {CollectiveTimeout}
    assert "gave up waiting for this rank, which arrived later" in late.text
    assert late.attributes["waiting_for"] == ()
    assert all(seen.attributes["waiting_for"] == (0,) for seen in punctual)


def test_the_rank_with_the_store_dies(failing_world: Callable[[int], World], tmp_path: Path) -> None:
    world = failing_world(SIZE)
    world.start(lose_the_host_of_the_store, tmp_path / "port")
    for seen in assert_survived(world, [0], DEADLINE_S):
        assert seen.kind is PeerLost
        assert 0 in seen.attributes["ranks"]
        assert seen.complaints() == []


def test_a_rank_closes_while_others_call(ranks: Worlds) -> None:
    for seen in witnesses(ranks, close_while_others_call):
        assert "rank 0" in seen.text, "names the rank that closed, as lost, as silent, or as calling something else"


def test_another_communicator_survives(ranks: Worlds) -> None:
    for seen in witnesses(ranks, fail_one_of_two):
        assert seen.kind is CollectiveTimeout
        assert seen.attributes["seconds"] == 0.5
