"""The timing protocol, the same for all competitors of a comparison.

Competitors take turns: in each round every one has one, in an order drawn anew, so whatever the machine does meanwhile
hits them alike. Before each turn the buffers are filled anew and all ranks meet in a barrier of torch's, outside the
clock. A turn takes as long as it does on its slowest rank; of a competitor's turns the median counts, and the 99th
percentile is shown beside it.

Traps that give wrong conclusions: one competitor after the other (the machine changes in between); always the same
neighbour before one (it leaves caches and sockets as it likes); the mean (one interrupted turn outweighs ten); rank 0's
clock (a broadcast's root is done first); reducing into the last turn's result (it overflows, and is no longer checked).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Times = npt.NDArray[np.float64]
RESAMPLES = 2000
FEWEST_TURNS = 8
"""With fewer there is no telling how they scatter, and no interval is given."""


@dataclass(frozen=True)
class Protocol:
    """Turns of each competitor: timed, before those untimed, and of the untimed ones those whose result is checked."""

    iters: int = 20
    warmup_iters: int = 1
    check_iters: int = 1


@dataclass(frozen=True)
class Machine:
    """How the ranks meet, and how a rank waits until its device is done."""

    barrier: Callable[[], object]
    synchronize: Callable[[], None]


def distributed_machine(device: torch.device, meet: Callable[[], object] = dist.barrier) -> Machine:
    """Over the default process group. meet: how ranks without GPUs meet; the closer, the less of a turn is waiting."""
    if device.type == "cuda":

        def barrier() -> None:
            dist.barrier(device_ids=[device.index])
            torch.cuda.synchronize()

        return Machine(barrier, torch.cuda.synchronize)
    return Machine(meet, lambda: None)


def take_turns(
    competitors: Sequence[Callable[[], object]],
    reset: Callable[[], None],
    wrong: Callable[[], int],
    machine: Machine,
    protocol: Protocol,
) -> tuple[Times, list[int]]:
    """Time `competitors` on this rank, and count the wrong elements of the checked turns and of the last timed one.

    Returns:
        seconds of shape (competitors, iters), and for each competitor what `wrong()` added up to.
    """
    seconds = np.zeros((len(competitors), protocol.iters))
    wrong_elements = [0] * len(competitors)

    def turn(competitor: Callable[[], object]) -> float:
        reset()
        machine.synchronize()
        machine.barrier()
        start = time.perf_counter()
        competitor()
        machine.synchronize()
        return time.perf_counter() - start

    for _ in range(protocol.warmup_iters):
        for competitor in competitors:
            turn(competitor)
    for _ in range(protocol.check_iters):
        for index, competitor in enumerate(competitors):
            turn(competitor)
            wrong_elements[index] += wrong()
    same_on_all_ranks = np.random.default_rng(0)
    for iteration in range(protocol.iters):
        for index in same_on_all_ranks.permutation(len(competitors)):
            seconds[index, iteration] = turn(competitors[index])
            if iteration == protocol.iters - 1 and protocol.check_iters > 0:
                wrong_elements[index] += wrong()
    return seconds, wrong_elements


def slowest_rank(seconds: Times, device: torch.device) -> Times:
    """Each turn's time on its slowest rank, on every rank. One reduction."""
    tensor = torch.from_numpy(seconds).to(device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    slowest: Times = tensor.cpu().numpy()
    return slowest


def most_bytes(sent: int | None, device: torch.device) -> int | None:
    """Return the most that any rank sends, on every rank; None where no rank can tell."""
    most = int(slowest_rank(np.array([-1.0 if sent is None else sent]), device)[0])
    return most if most >= 0 else None


def over_ranks(counts: npt.NDArray[np.int64], device: torch.device) -> npt.NDArray[np.int64]:
    """The sum over the ranks, on every rank."""
    tensor = torch.from_numpy(counts).to(device)
    dist.all_reduce(tensor)
    total: npt.NDArray[np.int64] = tensor.cpu().numpy()
    return total


def median_and_p99(seconds: Times) -> tuple[float, float]:
    """Of one competitor's turns. The p99 is a turn that happened: with fewer than 100, the slowest."""
    return float(np.median(seconds)), float(np.quantile(seconds, 0.99, method="higher"))


def speedup_interval(seconds: Times, peer_seconds: Times) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of the peer's median over ours: where it would fall if the same turns were drawn again.

    None for fewer than FEWEST_TURNS.
    """
    if len(seconds) < FEWEST_TURNS:
        return None
    draw = np.random.default_rng(0)
    ours = np.median(draw.choice(seconds, (RESAMPLES, len(seconds))), axis=1)
    peers = np.median(draw.choice(peer_seconds, (RESAMPLES, len(peer_seconds))), axis=1)
    low, high = np.quantile(peers / ours, [0.025, 0.975])
    return float(low), float(high)


def format_interval(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"[{interval[0]:.2f}, {interval[1]:.2f}]"
