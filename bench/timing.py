"""The timing protocol, the same for all competitors of a comparison.

Competitors take turns. In each round, every competitor has one turn, in a new random order, so that disturbances of the
machine affect all alike. Before each turn, the buffers are filled anew and all ranks pass a barrier; neither is timed.
The time of a turn is that of the slowest rank. The result of a competitor is the median of its turns.

Each rule prevents an error. If competitors ran one after the other, the machine would change in between. In a fixed
order, each would find the caches and sockets that its predecessor left. In a mean, one interrupted turn outweighs ten
others. On rank 0, a broadcast would seem too fast, because the root finishes first. Adding to earlier sums overflows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Times = npt.NDArray[np.float64]
RESAMPLES = 2000
TURNS = "median over interleaved turns; the time of a turn is that of its slowest rank"
"""What the files of results call a time."""
FEWEST_TURNS = 8
"""With fewer turns, the variation is unknown, and no interval is given."""


@dataclass(frozen=True)
class Protocol:
    """The turns of each competitor, in order: warmup_iters untimed ones, check_iters untimed ones that are checked, and
    iters timed ones. The last one is also checked, unless check_iters is 0."""

    iters: int = 20
    warmup_iters: int = 1
    check_iters: int = 1


Timer = Callable[[Callable[[], object]], float]
"""Runs a competitor, and returns the seconds that it took."""


def meeting(device: torch.device, meet: Callable[[], object] = dist.barrier) -> Timer:
    """Return a Timer by the clock that begins when all ranks of the default process group have met.

    meet: the barrier of ranks without GPUs. If it ends later on some ranks, the difference adds to the time of the turn.
    """
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def seconds(competitor: Callable[[], object]) -> float:
        synchronize()
        if device.type == "cuda":
            dist.barrier(device_ids=[device.index])
            synchronize()
        else:
            meet()
        start = time.perf_counter()
        competitor()
        synchronize()
        return time.perf_counter() - start

    return seconds


def take_turns(
    competitors: Sequence[Callable[[], object]],
    timer: Timer,
    protocol: Protocol,
    reset: Callable[[], object] = lambda: None,
    *wrong: Callable[[], int],
) -> tuple[Times, list[int]]:
    """Time `competitors` on this rank, and count the wrong elements in the checked turns.

    reset: restores the buffers before a turn. wrong: counts the wrong elements of the last result; one function for all
    competitors, or one for each.

    Returns:
        the seconds, float64 of shape (competitors, iters), and the sum of `wrong()` for each competitor.
    """
    seconds = np.zeros((len(competitors), protocol.iters))
    wrong_elements = [0] * len(competitors)

    def turn(index: int, *, checked: bool = False) -> float:
        reset()
        taken = timer(competitors[index])
        if checked and wrong:
            wrong_elements[index] += wrong[index % len(wrong)]()
        return taken

    for number in range(protocol.warmup_iters + protocol.check_iters):
        for index in range(len(competitors)):
            turn(index, checked=number >= protocol.warmup_iters)
    same_on_all_ranks = np.random.default_rng(0)
    for iteration in range(protocol.iters):
        is_checked = iteration == protocol.iters - 1 and protocol.check_iters > 0
        for index in same_on_all_ranks.permutation(len(competitors)):
            seconds[index, iteration] = turn(index, checked=is_checked)
    return seconds, wrong_elements


def slowest_rank(seconds: Times, device: torch.device) -> Times:
    """Return, on every rank, the time of each turn on its slowest rank, by one reduction. May overwrite `seconds`."""
    tensor = torch.from_numpy(seconds).to(device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    slowest: Times = tensor.cpu().numpy()
    return slowest


def step_seconds(
    competitors: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, steps: int
) -> dict[str, Times]:
    """Return the seconds of a training step in each turn, on its slowest rank, by competitor, each of which trains for so many
    steps when it is called. Collective."""
    protocol = Protocol(rounds, warmup_iters=2, check_iters=0)
    turns, _ = take_turns(list(competitors.values()), meeting(device), protocol)
    return dict(zip(competitors, slowest_rank(turns / steps, device), strict=True))


def every_rank(seconds: Times, device: torch.device) -> Times:
    """Return, on every rank, the times (or counts) of all ranks: the shape of `seconds`, preceded by the number of ranks."""
    mine = torch.from_numpy(seconds).to(device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    times: Times = torch.stack(gathered).cpu().numpy()
    return times


def most_bytes(sent: int | None, device: torch.device) -> int | None:
    """Return, on every rank, the bytes of the rank that sends most; None if no rank knows its bytes."""
    most = int(slowest_rank(np.array([-1.0 if sent is None else sent]), device)[0])
    return most if most >= 0 else None


def median_and_p99(seconds: Times) -> tuple[float, float]:
    """Return the median and the p99 of one competitor's turns. The p99 is a measured turn: of up to 100, the
    slowest."""
    return float(np.median(seconds)), float(np.quantile(seconds, 0.99, method="higher"))


def speedup_interval(seconds: Times, peer_seconds: Times) -> tuple[float, float] | None:
    """Return the 95 % interval of the peer's median over ours, by a percentile bootstrap over the turns.

    None if there are fewer than FEWEST_TURNS turns.
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
