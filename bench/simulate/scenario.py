"""The description of a training run, and its prediction for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gradwire.bench.simulate.exchange import AllreducePredictor, Network
from gradwire.bench.simulate.models import MODELS
from gradwire.bench.simulate.servers import exchange_seconds, update_seconds
from gradwire.bench.simulate.training import Times, buckets, slowest, step_seconds, useful_share
from gradwire.collectives.compression.codec import Codec
from gradwire.trainer.servers.aggregator import Scheme

#: The share of a wire's rate that carries TCP payload: 1448 of the 1538 bytes that a packet of 1500 takes on Ethernet.
TCP_SHARE = 1448 / 1538


@dataclass(frozen=True)
class Device:
    """The computing speed of a rank: samples per batch, and samples per second through forward and backward. source: the source
    of these figures."""

    batch: int
    samples_per_s: float
    source: str

    @property
    def step_s(self) -> float:
        """Return the seconds of forward and backward together."""
        return self.batch / self.samples_per_s


@dataclass(frozen=True)
class Scenario:
    """The description of a run.

    exchange, algorithm, codec: how gradients are exchanged. every: if more than 1, ranks make local updates and average all
    parameters after this number of steps. servers: the number of parameter servers, which replace the allreduce of all ranks; 0
    for none. quorum: the number of workers that contribute to an update, or None for all. groups: the number of groups of ranks,
    each of which averages its gradients and is one worker; None makes every rank a worker. jitter: of the computing times, see
    slowest(). mtbf_hours: the mean time between failures of a rank; None for no failures. steps: the number of steps to replay.
    """

    model: str
    device: Device
    network: Network
    exchange: str = "buckets"
    algorithm: str = "auto"
    codec: Codec | None = None
    every: int = 1
    servers: int = 0
    quorum: int | None = None
    groups: int | None = None
    jitter: float = 0.0
    seed: int = 0
    mtbf_hours: float | None = None
    checkpoint_minutes: float = 30.0
    restart_minutes: float = 5.0
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
    alone = _replayed(replace(scenario, servers=0), 1)
    found = _replayed(scenario, ranks)
    return replace(found, efficiency=found.samples_per_s / (ranks * alone.samples_per_s))


def _replayed(scenario: Scenario, ranks: int) -> Prediction:
    spare, useful = 0, 1.0
    if scenario.servers:
        times, point, spare = _with_servers(scenario, ranks)
    else:
        times, point = _together(scenario, ranks)
    step_s = float(times.mean())
    if scenario.mtbf_hours:
        checkpoint_s, restart_s = 60 * scenario.checkpoint_minutes, 60 * scenario.restart_minutes
        useful = useful_share(scenario.mtbf_hours, checkpoint_s, restart_s, ranks, spare, scenario.seed)
    return replace(point, ranks=ranks, step_s=step_s, samples_per_s=useful * ranks * scenario.device.batch / step_s)


def _together(scenario: Scenario, ranks: int) -> tuple[Times, Prediction]:
    """Return the seconds of each step and the exchanges of a step, if all ranks average gradients, or parameters with local
    updates."""
    weights, computing_s = MODELS[scenario.model], scenario.device.step_s
    computed = computing_s * slowest(scenario.jitter, scenario.seed, scenario.steps, ranks, scenario.every)
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


def _with_servers(scenario: Scenario, ranks: int) -> tuple[Times, Prediction, int]:
    """Return the results of _together for parameter servers, and the number of workers that may fail without a restart."""
    workers = min(ranks, scenario.groups or ranks)
    quorum = min(scenario.quorum or workers, workers)
    if ranks % workers:
        raise ValueError(f"{ranks} ranks cannot be {workers} groups of equal size")
    if scenario.groups is None and scenario.network.ranks_per_host > 1:
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
        exchange_seconds(network.costs(number + scenario.servers), number, scenario.servers, numel)
        for number in (workers, 1)
    )
    scheme = Scheme(quorum, grace_s=0.0, staleness=None, late="weight")
    between_s = update_seconds(scheme, workers, computing, single_s, together_s, scenario.steps, scenario.seed)
    sent = inner.wire_bytes + 4 * numel
    point = replace(inner, exchange_s=inner.exchange_s + together_s, wire_bytes=sent, algorithm="servers")
    return np.array([between_s * workers]), point, workers - quorum
