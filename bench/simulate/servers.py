"""A replay of parameter servers: the servers' own Aggregator decides when an update is made and which workers continue."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

import numpy as np

from gradwire.bench.simulate.training import Times
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import Span, split
from gradwire.collectives.tuning.cost_model import Costs
from gradwire.collectives.tuning.simulator import Leg, price
from gradwire.trainer.servers.aggregator import Aggregator, Scheme

#: The greatest number of messages of a push and pull to walk.
_MOST_MESSAGES = 400_000
#: The share of contributions that are not counted, at the beginning: workers are still in step then.
_WARM_UP = 0.2


def exchange_seconds(costs: Costs, workers: int, servers: int, numel: int) -> float:
    """Return the seconds until all workers have pushed numel float32 numbers to the servers, and pulled the sums.

    costs: the costs of a world of the workers, then the servers. Raises ValueError if there are too many to replay.
    """
    if 2 * workers * servers > _MOST_MESSAGES:
        raise ValueError(
            f"{workers} workers and {servers} servers are too many to replay: they exchange {2 * workers * servers} messages, at "
            f"most {_MOST_MESSAGES} are walked. Take fewer servers, or let groups of ranks push together (--groups)"
        )
    layout = split(Span(0, numel), servers)
    legs = []
    for rank in range(workers + servers):
        if rank < workers:
            parts = [(workers + server, (Span(server, server + 1),)) for server in range(servers)]
            rounds = [[send(*part) for part in parts], [receive(*part) for part in parts]]
        else:
            part = (Span(rank - workers, rank - workers + 1),)
            rounds = [[reduce(each, part) for each in range(workers)], [send(each, part) for each in range(workers)]]
        joined = tuple(tuple(step for steps in each for step in steps) for each in rounds)
        legs.append([Leg(Program(Schedule(rank, workers + servers, servers, joined), [layout]), 4)])
    return price(costs, legs)


def update_seconds(
    scheme: Scheme, workers: int, computing_s: Times, single_s: float, together_s: float, steps: int, seed: int
) -> float:
    """Return the mean time between two contributions of any workers, after the first part of the training.

    computing_s: the computing times; each step draws one at random. single_s: the time of a push and a pull of one worker
    alone. together_s: the time of a push and a pull of all workers at once. The servers are busy with one worker for
    together_s / workers, half for its push, half for its pull.
    """
    busy_s, alone_s = together_s / workers / 2, single_s / 2
    generator = np.random.default_rng(seed)
    aggregator: Aggregator[None] = Aggregator(range(workers), scheme)
    versions, waiting = [0] * workers, set[int]()
    inbound_s = outbound_s = 0.0
    numbers, pushed = count(), list[float]()
    events: list[tuple[float, int, int, bool]] = []  # time, number, worker, whether a push arrives (else it is sent)

    def computes(worker: int, now: float) -> None:
        heappush(events, (now + float(generator.choice(computing_s)), next(numbers), worker, False))

    for worker in range(workers):
        computes(worker, 0.0)
    while len(pushed) < max(2, steps * workers):  # two times at least, to divide by
        now, _, worker, arrived = heappop(events)
        if not arrived:
            inbound_s = max(now, inbound_s) + busy_s
            heappush(events, (max(inbound_s, now + alone_s), next(numbers), worker, True))
            continue
        aggregator.push(worker, versions[worker], 1.0, None, now)
        pushed.append(now)
        waiting.add(worker)
        if aggregator.take(now) is None:
            continue
        for each in sorted(each for each in waiting if aggregator.may_go(each)):
            waiting.remove(each)
            aggregator.went(each)
            versions[each] = aggregator.version
            outbound_s = max(now, outbound_s) + busy_s
            computes(each, max(outbound_s, now + alone_s))
    warm = int(_WARM_UP * len(pushed))
    return (pushed[-1] - pushed[warm]) / (len(pushed) - 1 - warm)
