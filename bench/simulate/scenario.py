"""The description of a training run, and its prediction for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from gradwire.bench.simulate.exchange import AllreducePredictor, described
from gradwire.bench.simulate.models import MODELS
from gradwire.bench.simulate.servers import exchange_seconds, update_seconds
from gradwire.bench.simulate.training import Device, FailureModel, Jitter, Times, buckets, step_seconds
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.plan.cost import Costs, LinkCost
from gradwire.trainer.servers.aggregator import Scheme

#: The share of a wire's rate that carries TCP payload: 1448 of the 1538 bytes that a packet of 1500 takes on Ethernet.
TCP_SHARE = 1448 / 1538


@dataclass(frozen=True)
class Network:
    """The network between the ranks. uplink_byte_s: the seconds per byte of a host's link, each way. known: measured costs of
    calls, sums and codecs."""

    between: LinkCost
    inside: LinkCost
    uplink_byte_s: float
    ranks_per_host: int = 1
    known: Costs | None = None

    def costs(self, ranks: int) -> Costs:
        """Return the costs of a world of `ranks` ranks. Raises ValueError if the ranks do not fill their hosts."""
        return described(ranks, self.ranks_per_host, self.between, self.inside, self.uplink_byte_s, self.known)


@dataclass(frozen=True)
class Servers:
    """The parameter servers. count: their number. quorum: the number of workers that contribute to an update, or None for all.
    groups: the number of groups of ranks. A group averages its gradients and is one worker. None makes every rank a
    worker."""

    count: int
    quorum: int | None = None
    groups: int | None = None


@dataclass(frozen=True)
class Scenario:
    """The description of a run. exchange, algorithm, codec: how gradients are exchanged. every: if more than 1, ranks make local
    updates and average all parameters after this number of steps. servers: the parameter servers, which replace the allreduce
    of all ranks. steps: the number of steps to replay."""

    model: str
    device: Device
    network: Network
    exchange: str = "buckets"
    algorithm: str = "auto"
    codec: Codec | None = None
    every: int = 1
    servers: Servers | None = None
    jitter: Jitter = field(default_factory=Jitter)
    failures: FailureModel | None = None
    steps: int = 100


@dataclass(frozen=True)
class Prediction:
    """The prediction for a number of ranks. efficiency: samples_per_s over `ranks` times that of one rank.
    exchange_s: the sum of the seconds of a step's exchanges. wire_bytes: the bytes that a rank sends in a step. algorithm: the
    algorithm of the largest exchange."""

    ranks: int
    step_s: float
    samples_per_s: float
    efficiency: float
    exchange_s: float
    wire_bytes: float
    algorithm: str


def predict(scenario: Scenario, ranks: int) -> Prediction:
    """Return the prediction of a scenario for a number of ranks. Raises ValueError, with the possible choices, if the scenario
    cannot be replayed."""
    alone = _replayed(replace(scenario, servers=None), 1)
    found = _replayed(scenario, ranks)
    return replace(found, efficiency=found.samples_per_s / (ranks * alone.samples_per_s))


def _replayed(scenario: Scenario, ranks: int) -> Prediction:
    spare = 0
    if scenario.servers is not None:
        times, point, spare = _with_servers(scenario, scenario.servers, ranks)
    else:
        times, point = _together(scenario, ranks)
    step_s = float(times.mean())
    useful = scenario.failures.useful(ranks, spare, scenario.jitter.seed) if scenario.failures else 1.0
    return replace(point, ranks=ranks, step_s=step_s, samples_per_s=useful * ranks * scenario.device.batch / step_s)


def _together(scenario: Scenario, ranks: int) -> tuple[Times, Prediction]:
    """Return the seconds of each step and the exchanges of a step, if all ranks average gradients, or parameters with local
    updates."""
    weights, computing_s = MODELS[scenario.model], scenario.device.step_s
    computed = computing_s * scenario.jitter.slowest(scenario.steps, ranks, scenario.every)
    exchange = AllreducePredictor(scenario.network.costs(ranks), scenario.algorithm, scenario.codec)
    way = scenario.exchange if scenario.every == 1 else "bsp"
    exchanged = buckets(way, weights, computing_s, exchange.seconds)
    calls = [exchange.call(bucket.numel) for bucket in exchanged]
    if scenario.every == 1:
        times = step_seconds(computed, exchanged, exchange.seconds)
    else:
        times = computed + calls[0].seconds / scenario.every
    largest = max(calls, key=lambda call: call.wire_bytes)
    exchange_s, sent = (
        sum(each) / scenario.every for each in zip(*((c.seconds, c.wire_bytes) for c in calls), strict=True)
    )
    return times, Prediction(ranks, 0.0, 0.0, 1.0, exchange_s, sent, largest.algorithm if ranks > 1 else "-")


def _with_servers(scenario: Scenario, servers: Servers, ranks: int) -> tuple[Times, Prediction, int]:
    """Return the results of _together for parameter servers, and the number of workers that may fail without a restart."""
    workers = ranks if servers.groups is None else min(ranks, servers.groups)
    quorum = workers if servers.quorum is None else min(servers.quorum, workers)
    if ranks % workers:
        raise ValueError(f"{ranks} ranks cannot be {workers} groups of equal size")
    if servers.groups is None and scenario.network.ranks_per_host > 1:
        raise ValueError(
            "each worker of a parameter server has a host to itself here: leave out --ranks-per-host, or give --groups"
        )
    if scenario.codec is not None or scenario.every > 1:
        raise ValueError("servers are replayed without a codec and without local updates")
    steps = max(scenario.steps, 1000) if ranks == workers else scenario.steps
    computing, inner = _together(replace(scenario, steps=steps), ranks // workers)
    numel = sum(weight.numel for weight in MODELS[scenario.model])
    network = replace(scenario.network, ranks_per_host=1)
    together_s, single_s = (  # all workers first, since they may be too many to replay
        exchange_seconds(network.costs(number + servers.count), number, servers.count, numel) for number in (workers, 1)
    )
    scheme = Scheme(quorum, grace_s=0.0, staleness=None, late="weight")
    between_s = update_seconds(scheme, workers, computing, single_s, together_s, scenario.steps, scenario.jitter.seed)
    sent = inner.wire_bytes + 4 * numel
    point = replace(inner, exchange_s=inner.exchange_s + together_s, wire_bytes=sent, algorithm="servers")
    return np.array([between_s * workers]), point, workers - quorum
