"""Timed calls show what calls take that follow each other, also on a link that saves up for bursts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from gradwire.collectives import timed_calls
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.schedules.cost import Cores, Costs, LinkCost
from gradwire.collectives.schedules.selection import Measured
from gradwire.collectives.shared_tensors import SharedTensors

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


class Shaped:
    """Allreduces that move their bytes once over a shaped link. Time passes in calls only."""

    rank, size = 0, 1  # computes the numbers of calls alone

    def __init__(self) -> None:
        self.now_s, self._saved = 0.0, float(BURST_BYTES)

    def empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel)

    def allreduce(self, tensor: torch.Tensor, *_: str, compression: Codec | None = None, **__: Any) -> None:
        if tensor.dtype is torch.float64:  # the numbers of calls, or their times
            return
        nbytes = tensor.nbytes if compression is None else compression.wire_bytes(tensor.numel())
        self._pass(SOFTWARE_S if compression is None else ENCODING_S)
        if nbytes > self._saved:
            self._pass((nbytes - self._saved) / BYTES_S)
        self._saved -= nbytes

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        self._saved = min(BURST_BYTES, self._saved + seconds * BYTES_S)


def test_bursts_are_spent_before_calls_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Shaped()
    verbs = cast(SharedTensors, link)
    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: link.now_s)
    [ring] = timed_calls.time_calls(verbs, COSTS, ["ring"], 1 << 20)
    assert dict(ring.measured) == pytest.approx({1 << 10: (1 << 10) / BYTES_S})
    quick = replace(COSTS, between=replace(COSTS.between, byte_s=1e-9), uplinks=(1e-9, 1e-9))
    [ring] = timed_calls.time_calls(verbs, quick, ["ring"], 1 << 20)
    assert list(dict(ring.measured)) == [1 << 10, 4 << 10, 16 << 10, 1 << 20]
    [coded] = timed_calls.time_codecs(verbs, COSTS, [make_codec("int8")], lambda numel, codec: 4 * numel / BYTES_S)
    assert dict(coded.measured) == pytest.approx({1 << 10: ENCODING_S, 8 << 10: ENCODING_S})
    [coded] = timed_calls.time_codecs(verbs, COSTS, [make_codec("int8")], lambda numel, codec: 1e-3)
    assert list(dict(coded.measured)) == [1 << 10, 8 << 10, 128 << 10, 1 << 20, 4 << 20]


class Uneven(Shaped):
    """A call takes 3, 1 or 2 seconds, depending on the turn."""

    turn = -1

    def allreduce(self, tensor: torch.Tensor, *_: str, compression: Codec | None = None, **__: Any) -> None:
        if tensor.nbytes == 2 * BURST_BYTES:  # begins a turn
            self.turn += 1
        elif tensor.dtype is not torch.float64:
            self.now_s += (3.0, 1.0, 2.0)[self.turn % 3]


def test_of_uneven_turns_the_fastest_counts_but_the_median_with_a_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Uneven()
    verbs = cast(SharedTensors, link)
    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: link.now_s)
    [ring] = timed_calls.time_calls(verbs, COSTS, ["ring"], 1 << 20)
    assert dict(ring.measured) == pytest.approx({1 << 10: 1.0})
    [coded] = timed_calls.time_codecs(verbs, COSTS, [make_codec("int8")], lambda numel, codec: 4 * numel / BYTES_S)
    assert set(dict(coded.measured).values()) == {2.0}


class ByAlgorithm(Shaped):
    """Every algorithm takes its own time, which no prediction knows."""

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__()
        self._seconds = seconds
        self.sizes: set[tuple[str, int]] = set()

    def allreduce(self, tensor: torch.Tensor, *_: str, algorithm: str = "", **__: Any) -> None:
        if tensor.dtype is not torch.float64:
            self.now_s += self._seconds[algorithm]
            self.sizes.add((algorithm, tensor.nbytes))


def test_algorithms_that_predictions_cannot_separate_are_timed_and_the_fastest_is_selected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = ByAlgorithm({"ring": 3e-3, "rsag": 1e-3, "tree": 1e-4})
    verbs = cast(SharedTensors, link)
    monkeypatch.setattr(timed_calls.time, "perf_counter", lambda: link.now_s)
    names, segment_bytes = ["ring", "rsag", "tree"], 96 << 10
    costs = replace(
        COSTS,
        between=replace(COSTS.between, byte_s=1e-8),
        hosts=tuple((rank,) for rank in range(4)),  # where a tree sends more bytes, and the other two equally many
        machines=("a machine",) * 4,
        uplinks=(1e-8,) * 4,
        cores=(),
        slowness=(1.0,) * 4,
        burst_bytes=0,
    )

    def selected() -> str:
        measured = Measured(costs, {"allreduce": names}, segment_bytes, lambda *_: "ring")
        return measured.choose("allreduce", 256 << 10)

    assert selected() == "ring"
    costs = costs.with_calls(timed_calls.time_rivals(verbs, costs, names, segment_bytes))
    assert {name for name, nbytes in link.sizes if nbytes == 256 << 10} == {"ring", "rsag"}
    assert selected() == "rsag"


def test_ranks_compute_predictions_together() -> None:
    """Each rank adds zeros for the predictions of the others, so the parts of two ranks are those of one."""

    def parts(rank: int, size: int) -> list[float]:
        verbs = Shaped()
        verbs.rank, verbs.size = rank, size
        cases = [(name, nbytes) for nbytes in (1, 2) for name in ("ring", "tree", "rsag")]
        return [*timed_calls._shared(cast(SharedTensors, verbs), cases, lambda name, nbytes: 7.0 * nbytes).values()]

    assert [sum(both) for both in zip(parts(0, 2), parts(1, 2), strict=True)] == parts(0, 1)
    assert 0.0 not in parts(0, 1)
