"""A rank dies, stops, leaves, or calls something else: every survivor gets an error that says so, in time.

The worlds of one test run at the same time, because most of their life is waiting for a deadline.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import CollectiveError, CollectiveTimeout, Communicator, Mismatch, PeerLost
from tests.harness import ON_EVERY_TRANSPORT, Outcome, World, wide
from tests.ranks.exact import ALLREDUCES, on_host

pytestmark = ON_EVERY_TRANSPORT

ALGORITHMS = (*ALLREDUCES, "native", "auto")
TIMEOUT_S = 3.0  # of an operation that runs into it
FAR_S = 20.0  # of one that must not
GRACE_S = 3.0  # for finding out and telling who is to blame
HANG_S = 10.0  # longer than any busy machine delays what takes no time
DEADLINE_S = 30.0  # for a whole world, on a machine where many of them run
VICTIMS = {2: 1, 3: 0, 4: 2}  # by world size
SIZES = [(3,), *wide((2, 4))]  # of the worlds that run at the same time
PHASES = ("before the first", "between two", "in the middle", "while idle in async")
SMALL, LARGE, HUGE = 100, 1 << 18, 1 << 22


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave_with_an_error() -> None:
    raise SystemExit(1)


FAULTS = {"killed": die, "raising": leave_with_an_error, "stopped": stop}
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
        if self.seconds > (HANG_S if self.kind is PeerLost else TIMEOUT_S + GRACE_S):
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


def on_hosts(algorithm: str) -> AbstractContextManager[None]:
    """Two hosts in turns for the algorithm that tells hosts apart."""
    return on_host("ab"[dist.get_rank() % 2]) if algorithm == "hierarchical" else nullcontext()


def suffer(algorithm: str, phase: str, fault: str, victim: int) -> Witness:
    """Exchange until the phase in which the victim fails; the others say what they saw."""
    with on_hosts(algorithm):
        comm = Communicator(timeout_s=TIMEOUTS_S[fault], segment_bytes=1 << 16)
    dist.barrier()  # all have one, so that none is lost in the making
    is_victim = comm.rank == victim

    def exchange(numel: int = SMALL, async_op: bool = False) -> Any:
        return comm.allreduce(torch.ones(numel), algorithm=algorithm, async_op=async_op)

    if phase == "between two":
        exchange()
    if phase == "while idle in async":
        wait(exchange(async_op=True))
    works = []
    if phase == "in the middle":
        works += [exchange(LARGE, async_op=True) for _ in range(8)]
        dist.barrier()  # nobody is still issuing
        works[0].wait()
    if is_victim:
        FAULTS[fault]()
    if phase == "in the middle":
        return witness(comm, lambda: wait(*works, exchange(async_op=True)))
    if phase == "while idle in async":
        return witness(comm, lambda: wait(exchange(async_op=True)))
    return witness(comm, exchange)


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


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_fails(failing_world: Callable[[int], World], fault: str, phase: str, sizes: tuple[int, ...]) -> None:
    cases = [(name, size, VICTIMS[size], failing_world(size)) for name in ALGORITHMS for size in sizes]
    for algorithm, _, victim, world in cases:
        world.start(suffer, algorithm, phase, fault, victim)
    found = []
    for algorithm, size, victim, world in cases:
        for outcome in world.collect(DEADLINE_S, ranks=[rank for rank in range(size) if rank != victim]):
            for complaint in complaints(outcome, fault, victim):
                found.append(f"{algorithm}, world of {size}, rank {outcome.rank}: {complaint}")
    assert not found, "\n".join(found)


DISAGREEMENTS = [
    ("shape", "1000", "1001"),
    ("dtype", "float32", "int32"),
    ("op", "sum", "max"),
    ("collective", "allreduce", "broadcast"),
]


def disagree(subject: str, algorithm: str, odd: int) -> Witness:
    """After one exchange in harmony, the odd rank differs in one respect; all ranks say what they saw."""
    with on_hosts(algorithm):
        comm = Communicator(timeout_s=TIMEOUT_S)
    comm.allreduce(torch.ones(1000), algorithm=algorithm)
    is_odd = comm.rank == odd
    tensor = torch.ones(
        1001 if is_odd and subject == "shape" else 1000,
        dtype=torch.int32 if is_odd and subject == "dtype" else torch.float32,
    )
    if is_odd and subject == "collective":
        return witness(comm, lambda: comm.broadcast(tensor))
    return witness(
        comm, lambda: comm.allreduce(tensor, "max" if is_odd and subject == "op" else "sum", algorithm=algorithm)
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("subject", "usual", "other"), DISAGREEMENTS)
def test_a_rank_calls_something_else(
    failing_world: Callable[[int], World], subject: str, usual: str, other: str, sizes: tuple[int, ...]
) -> None:
    cases = [(name, size, VICTIMS[size], failing_world(size)) for name in ALGORITHMS for size in sizes]
    for algorithm, _, odd, world in cases:
        world.start(disagree, subject, algorithm, odd)
    found = []
    for algorithm, size, odd, world in cases:
        for outcome in world.collect(DEADLINE_S):
            case = f"{algorithm}, world of {size}, rank {outcome.rank}"
            if outcome.status != "returned":
                found.append(f"{case}: {outcome}")
                continue
            seen: Witness = outcome.value
            error = f"[{seen.kind.__name__}: {seen.text}]"
            found += [f"{case}: {complaint} {error}" for complaint in seen.complaints()]
            if seen.kind is not Mismatch or set(seen.attributes["calls"]) != set(range(size)):
                found.append(f"{case}: is not a mismatch that tells the calls of all ranks {error}")
            elif not all((other if r == odd else usual) in call for r, call in seen.attributes["calls"].items()):
                found.append(f"{case}: does not tell {usual} from {other} {error}")
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
    comm = Communicator(timeout_s=1.0)
    comm.allreduce(torch.ones(SMALL))
    if comm.rank == 0:
        time.sleep(1.5)
    return witness(comm, lambda: comm.allreduce(torch.ones(SMALL)))


def swap_the_order() -> Witness:
    """Rank 0 issues two operations that all know in one order, the others in the other."""
    comm = Communicator(timeout_s=TIMEOUT_S)
    for numel in (10, 20):
        comm.allreduce(torch.ones(numel))
    numels = (10, 20) if comm.rank == 0 else (20, 10)
    works = [comm.allreduce(torch.ones(numel), async_op=True) for numel in numels]
    return witness(comm, lambda: wait(*works))


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
    broken, sound = Communicator(timeout_s=0.5), Communicator(timeout_s=TIMEOUT_S)
    seen = None
    if broken.rank > 0:
        seen = witness(broken, lambda: broken.allreduce(torch.ones(SMALL)))
    tensor = torch.ones(SMALL)
    sound.allreduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, float(sound.size)))
    broken.close()
    sound.close()
    return seen


def witnesses(failing_world: Callable[[int], World], function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the ranks but rank 0 of a world of each size return, all of them good witnesses."""
    worlds = [failing_world(size) for size in VICTIMS]
    for world in worlds:
        world.start(function, *args)
    found = []
    for world in worlds:
        for outcome in world.collect(DEADLINE_S, ranks=range(1, world.size)):
            assert outcome.status == "returned", str(outcome)
            assert outcome.value.complaints() == []
            found.append(outcome.value)
    return found


def test_a_rank_is_killed_while_it_sends(failing_world: Callable[[int], World]) -> None:
    worlds = [failing_world(3) for _ in range(8)]
    for world in worlds:
        world.start(die_in_the_middle_of_a_large_one)
    for world in worlds:
        for outcome in world.collect(DEADLINE_S, ranks=(0, 2)):
            assert outcome.status == "returned", str(outcome)
            assert (outcome.value.kind, outcome.value.attributes.get("ranks")) == (PeerLost, (1,)), outcome.value.text


def test_a_rank_comes_late(failing_world: Callable[[int], World]) -> None:
    worlds = [failing_world(size) for size in VICTIMS]
    for world in worlds:
        world.start(come_late)
    for world in worlds:
        late, *punctual = world.collect(DEADLINE_S)
        for outcome in (late, *punctual):
            assert outcome.status == "returned", str(outcome)
            assert outcome.value.kind is CollectiveTimeout, outcome.value.text
        assert "gave up waiting for this rank, which came later" in late.value.text
        assert late.value.attributes["waiting_for"] == ()
        for outcome in punctual:
            assert outcome.value.attributes["waiting_for"] == (0,)


def test_ranks_issue_in_different_orders(failing_world: Callable[[int], World]) -> None:
    for seen in witnesses(failing_world, swap_the_order):
        assert seen.kind is Mismatch


@pytest.mark.parametrize("size", VICTIMS)
def test_the_rank_with_the_store_dies(failing_world: Callable[[int], World], size: int, tmp_path: Path) -> None:
    world = failing_world(size)
    world.start(lose_the_host_of_the_store, tmp_path / "port")
    for outcome in world.collect(DEADLINE_S, ranks=range(1, size)):
        assert outcome.status == "returned", str(outcome)
        assert outcome.value.kind is PeerLost
        assert 0 in outcome.value.attributes["ranks"]
        assert outcome.value.complaints() == []


def test_a_rank_closes_while_others_call(failing_world: Callable[[int], World]) -> None:
    for seen in witnesses(failing_world, close_while_others_call):
        assert "rank 0" in seen.text, "names the rank that closed, as lost, as silent, or as calling something else"


def test_another_communicator_survives(failing_world: Callable[[int], World]) -> None:
    for seen in witnesses(failing_world, fail_one_of_two):
        assert seen.kind is CollectiveTimeout
        assert seen.attributes["seconds"] == 0.5
