"""Timed calls show what calls take that follow each other, also on a link that saves up for bursts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from gradwire.collectives import Communicator
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.tuning import call_benchmark
from gradwire.collectives.tuning.call_benchmark import time_algorithms, time_codecs
from gradwire.collectives.tuning.chooser import Chooser
from gradwire.collectives.tuning.cost_model import Cores, Costs, LinkCost

BYTES_S, BURST_BYTES, SOFTWARE_S, ENCODING_S = 12.5e6, 128 << 10, 5e-5, 8e-4

NOTHING = LinkCost(0.0, 0.0, 0.0, 0.0)
COSTS = Costs(
    hosts=((0,), (1,)),
    machines=("a machine",) * 2,
    inside=NOTHING,
    between=LinkCost(0.0, 1 / BYTES_S, 1e-5, 0.0),
    uplinks=(1 / BYTES_S,) * 2,
    cores=(Cores((0, 1), 2),),
    slowness=(1.0, 1.0),
    call_s=1e-5,
    reduce_byte_s=0.0,
    burst_bytes=BURST_BYTES,
)
INT8 = make_codec("int8")


class Shaped:
    """Allreduces that move their bytes once over a shaped link. Time passes in calls only."""

    rank, size, segment_bytes = 0, 1, 1 << 20  # computes all predictions alone

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self._saved = 0.0, float(BURST_BYTES)
        monkeypatch.setattr(call_benchmark.time, "perf_counter", lambda: self.now_s)

    def empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel)

    def allreduce(self, tensor: torch.Tensor, *_: str, compression: Codec | None = None, **options: Any) -> None:
        if tensor.dtype is not torch.float64:  # not of predictions or times
            self.call(tensor.nbytes if compression is None else compression.wire_bytes(tensor.numel()), **options)
            self.passes(SOFTWARE_S if compression is None else ENCODING_S)

    def call(self, nbytes: int, **_: Any) -> None:
        if nbytes > self._saved:
            self.passes((nbytes - self._saved) / BYTES_S)
        self._saved -= nbytes

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        self._saved = min(BURST_BYTES, self._saved + seconds * BYTES_S)

    def timed(self, costs: Costs = COSTS, *more: str) -> Costs:
        return time_algorithms(cast(Communicator, self), costs, ["ring", "recursive_doubling", *more])

    def ring(self, costs: Costs = COSTS) -> dict[int, float]:
        return dict(self.timed(costs).measured("allreduce", "ring"))

    def coded(self, seconds: float | None = None) -> dict[int, float]:
        """Return the times of calls with int8, which are predicted to take so long, or as long as the bytes take."""

        def predict(costs: Costs, numel: int, codec: Codec) -> float:
            return seconds or 4 * numel / BYTES_S

        costs = time_codecs(cast(Communicator, self), COSTS, [INT8], predict)
        return dict(costs.measured("allreduce", INT8.identity))


def test_bursts_are_spent_before_calls_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Shaped(monkeypatch)
    ring = link.ring()
    assert ring == pytest.approx({nbytes: nbytes / BYTES_S for nbytes in ring}, rel=0.05)
    assert list(ring) == [1 << 10, 8 << 10, 64 << 10]  # calls of more bytes take long
    quick = replace(COSTS, between=replace(COSTS.between, byte_s=1e-9), uplinks=(1e-9, 1e-9))
    assert len(link.ring(quick)) > 3
    assert link.coded() == pytest.approx({1 << 10: ENCODING_S, 8 << 10: ENCODING_S})
    assert list(link.coded(1e-3)) == [1 << 10, 8 << 10, 128 << 10, 1 << 20, 4 << 20]


class Uneven(Shaped):
    """A call takes 3, 1 or 2 seconds, depending on the turn."""

    turn = -1

    def allreduce(self, tensor: torch.Tensor, *_: str, **options: Any) -> None:
        if tensor.nbytes == 2 * BURST_BYTES:  # begins a turn
            self.turn += 1
        elif tensor.dtype is not torch.float64:
            self.now_s += (3.0, 1.0, 2.0)[self.turn % 3]


def test_of_uneven_turns_the_fastest_counts_but_the_median_with_a_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Uneven(monkeypatch)
    assert link.ring()[1 << 10] == pytest.approx(1.0)
    assert set(link.coded().values()) == {2.0}


class ByAlgorithm(Shaped):
    """Every algorithm takes its own time, which no prediction knows."""

    def call(self, nbytes: int, *, algorithm: str = "", **_: Any) -> None:
        self.now_s += {"ring": 15e-4, "rsag": 1e-3, "native": 2e-2}.get(algorithm, 14e-4)


def test_algorithms_that_predictions_cannot_separate_are_timed_and_the_fastest_is_selected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = replace(
        COSTS,
        between=replace(COSTS.between, byte_s=4e-9),
        hosts=tuple((rank,) for rank in range(4)),  # where rsag and ring send equally many bytes
        machines=("a machine",) * 4,
        uplinks=(4e-9,) * 4,
        cores=(),
        slowness=(1.0,) * 4,
        burst_bytes=0,
    )
    names = {"allreduce": ("ring", "recursive_doubling", "rsag", "native")}  # native is predicted by its first times

    def selected(costs: Costs) -> str:
        return Chooser(costs, names, 1 << 20, lambda *_: "ring").choose("allreduce", 512 << 10)

    assert selected(costs) == "ring"
    timed = ByAlgorithm(monkeypatch).timed(costs, "rsag", "native")
    at_1k, at_512k = (
        {call.algorithm for call in timed.calls if nbytes in dict(call.measured)} for nbytes in (1 << 10, 512 << 10)
    )
    assert at_1k == set(names["allreduce"]) == at_512k | {"native"}
    assert selected(timed) == "rsag"


def test_ranks_compute_predictions_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank adds zeros for the predictions of the others, so the parts of two ranks are those of one."""

    def parts(rank: int, size: int) -> list[float]:
        link = Shaped(monkeypatch)
        link.rank, link.size = rank, size
        return [*call_benchmark._shared(cast(Communicator, link), dict.fromkeys("abc", lambda: 7.0)).values()]

    assert [sum(both) for both in zip(parts(0, 2), parts(1, 2), strict=True)] == parts(0, 1) == [7.0] * 3
