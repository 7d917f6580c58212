"""The benchmark of the codecs: its command line, its exit code, what its checks let pass, and torch's side of it."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from gradwire.bench.codec import run as codec
from gradwire.bench.codec import turns as codec_turns
from gradwire.bench.codec.checks import count_outside, count_unequal, relative_error
from gradwire.bench.codec.peers import PEERS, Contender
from gradwire.bench.codec.turns import CODECS, OPERATIONS, CodecRow, gaussian, moved_bytes
from gradwire.collectives.compression.dense import Int8
from gradwire.collectives.compression.registry import CODECS as REGISTRY
from gradwire.collectives.compression.sparse import TopK

CPU = torch.device("cpu")
NUMEL = 8192


def test_every_codec_is_measured_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert codec.main(["-n", "8K", "--iters", "1", "--json", str(tmp_path / "out.json")]) == 0
    assert "# Out of bounds values : 0 OK" in capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    meta, rows = result["meta"], result["rows"]
    assert (meta["elements"], meta["iters"], meta["where"]) == (8192, 1, "one core")
    assert [(row["codec"], row["operation"]) for row in rows] == [(name, one) for name in CODECS for one in OPERATIONS]
    assert set(REGISTRY) - {"none"} <= set(CODECS)
    assert {row["settings"] for row in rows} == {repr(one) for one in CODECS.values()}
    for row in rows:
        assert set(row) == {field.name for field in fields(CodecRow)}
        assert row["wrong"] == row["torch_wrong"] == 0
        assert 0 < row["time_us"] == row["p99_us"]
        assert row["rate_GBps"] == pytest.approx(4 * 8192 / row["time_us"] / 1e3)
        assert row["torch_over_ours"] == pytest.approx(row["torch_us"] / row["time_us"])
        assert 0 < row["relative_error_gaussian"] < 2


class OneWrong(Int8):
    def decode(self, wire: Tensor, out: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
        super().decode(wire, out, add=add, scale=scale)
        if out.numel() == NUMEL:
            out[5] += 1


def test_one_wrong_element_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(codec_turns.CODECS, "int8", OneWrong())
    assert codec.main(["-n", "8K", "--iters", "1", "--codec", "int8"]) == 1
    assert "FAILED" in capsys.readouterr().out
    plot = tmp_path / "out.png"
    assert codec.main(["-n", "8K", "--iters", "1", "--codec", "int4", "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def torchs(name: str) -> Contender:
    return PEERS[CODECS[name].name](CODECS[name], NUMEL, CPU)


@pytest.mark.parametrize("name", CODECS)
def test_torch_does_what_the_codec_does(name: str) -> None:
    """Compare: within the same bounds, which a wrong element is outside of, and telescoping under error feedback."""
    one = CODECS[name]
    peer = torchs(name)
    values, residual, out = gaussian(NUMEL, CPU, 0), torch.zeros(NUMEL), torch.full((NUMEL,), 2.0)
    decoded, total = torch.empty(NUMEL), torch.zeros(NUMEL)
    peer.encode(values)
    peer.decode(decoded)
    assert count_outside(one, values, decoded) == 0
    for wrong in (float(2 * values.abs().max() * NUMEL), float("nan"), float("inf")):
        broken = decoded.clone()
        broken[decoded.abs().argmax()] = wrong
        assert 1 <= count_outside(one, values, broken) <= 2  # what is not sent is also not the largest
    peer.decode_add(out)
    assert count_unequal(out, decoded + 2, decoded.abs() + 2) == 0
    for _ in range(3):
        peer.restart()
        peer.encode_ef(values, residual)
        peer.decode(decoded)
        total += decoded
    torch.testing.assert_close(total + residual, 3 * values, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["int8-stochastic", "int4-stochastic", "qsgd", "terngrad", "natural"])
def test_torch_rounds_without_bias(name: str) -> None:
    torch.manual_seed(0)
    peer = torchs(name)
    values, decoded, mean = gaussian(NUMEL, CPU, 0), torch.empty(NUMEL), torch.zeros(NUMEL)
    for _ in range(200):
        peer.encode(values)
        peer.decode(decoded)
        mean += decoded / 200
    assert relative_error(values, mean) < 1.4 * relative_error(values, decoded) / 200**0.5


def test_the_largest_must_be_sent_and_errors_are_those_of_the_norms() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(0.2)
    values = torch.arange(1.0, NUMEL + 1)
    one = TopK(0.5)
    assert count_outside(one, values, values * (values > NUMEL / 2)) == 0
    assert count_outside(one, values, values * (values <= NUMEL / 2)) == NUMEL / 2
    assert count_outside(one, values, values * (values > NUMEL / 2 + 3)) == 3


def test_bytes_that_are_moved() -> None:
    """Count as in a table of what a GPU's kernels have to move."""
    moved = {one: round(moved_bytes(Int8(), one, 1 << 20), 3) for one in OPERATIONS}
    assert moved == {"encode": 5.016, "encode_ef": 13.016, "decode": 5.016, "decode_add": 9.016}
    assert moved_bytes(TopK(0.01), "decode_add", 100_000) == pytest.approx(0.16)
