"""The dense quantizers: the compiled ones against the reference, byte for byte; the reference against the definitions."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.collectives import kernels
from gradwire.collectives.compression.dense import (
    QSGD,
    BFloat16,
    Blocked,
    Dense,
    Float8,
    Float16,
    Int4,
    Int8,
    Natural,
    OneBit,
    TernGrad,
)
from gradwire.collectives.kernels.cpu import entries as cpu_kernels
from gradwire.collectives.kernels.cuda import kernels as cuda
from gradwire.collectives.kernels.reference.blocks import block_sums, random_bits
from gradwire.collectives.kernels.reference.quantize import FLOAT8
from tests.cuda_machine.cases import DENSE, MORE_KINDS, Pair, check, decoded, encoded, numbers

#: With blocks besides that only a CPU has.
CODECS: list[Dense] = [
    *DENSE,
    *(
        Float8("e5m2", block=48),
        Int8(block=16),
        Int4(block=1040),
        OneBit(block=144),
        QSGD(levels=1, block=16),
        TernGrad(block=80),
    ),
]
UNBIASED: list[Dense] = [Int8(stochastic=True), Int4(stochastic=True), QSGD(), TernGrad(), Natural()]
DETERMINISTIC = [
    codec
    for codec in CODECS
    if not (isinstance(codec, QSGD | TernGrad | Natural) or getattr(codec, "stochastic", False))
]
BLOCKED = [codec for codec in CODECS if isinstance(codec, Blocked)]

FINITE = ("gaussian", "heavy-tailed", "few", "constant", "zeros", "denormal", "near the least", "large")
SPREAD = ("gaussian", "heavy-tailed", "few", "constant")


def numels(codec: Dense) -> list[int]:
    block = codec.alignment
    return sorted({0, 1, 2, 15, 16, 17, 127, 128, 130, max(1, block - 1), block, block + 1, 3 * block + 7, 20_011})


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_same_bytes_as_the_reference(codec: Dense) -> None:
    for numel in numels(codec):
        assert check(cpu_kernels, "cpu", codec, (numel,), MORE_KINDS) == []


@pytest.mark.parametrize("codec", [OneBit(block=48), OneBit(), OneBit(block=2064)], ids=str)
def test_large_results_have_the_same_bits(codec: OneBit) -> None:
    """Those at addresses that vectors have are written past the caches."""
    pair, numel = Pair(cpu_kernels, "cpu"), 300_007
    wire, out = encoded(codec, numbers(numel, "gaussian")), torch.full((numel,), 0.1)
    for offset in (0, 1):
        for add, scale in ((False, 0.37), (True, 1.0)):
            pair.both("onebit_decode", wire, out, *codec.settings(), add, scale, at=offset)
    assert pair.failures == []


@pytest.mark.parametrize("kind", FINITE)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_error_feedback_is_what_was_lost(codec: Dense, kind: str) -> None:
    """So the sum of what was given is that of what was decoded and the last residual, where the residual grows too."""
    values, residual = numbers(5000, kind, 1), 0.5 * numbers(5000, kind, 2)
    corrected = values + residual
    got = decoded(codec, encoded(codec, values, residual, seed=3), 5000)
    expected = torch.where(got.isfinite(), corrected - got, torch.zeros(5000))
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**127])
@pytest.mark.parametrize("codec", BLOCKED, ids=str)
def test_a_bad_number_spoils_its_block_only(codec: Blocked, bad: float) -> None:
    if isinstance(codec, OneBit) and bad == 2.0**127:
        return  # what counts is whether the sum is finite
    numel, block = 3 * codec.block + 5, codec.block
    values, residual = numbers(numel, "gaussian"), torch.ones(numel)
    values[block + 3] = bad
    got = decoded(codec, encoded(codec, values, residual), numel)
    assert got[block : 2 * block].isnan().all()
    assert (residual[block : 2 * block] == 0).all()
    rest = torch.cat([got[:block], got[2 * block :], residual[:block], residual[2 * block :]])
    assert rest.isfinite().all()


@pytest.mark.parametrize("codec", [Float16(), BFloat16(), Natural()], ids=str)
def test_a_bad_number_spoils_itself_only(codec: Dense) -> None:
    values, residual = torch.tensor([1.0, math.nan, math.inf, -math.inf, 2.0]), torch.zeros(5)
    got = decoded(codec, encoded(codec, values, residual), 5)
    assert got.isfinite().tolist() == [True, False, False, False, True]
    assert (residual[1:4] == 0).all()


@pytest.mark.parametrize("codec", DETERMINISTIC, ids=str)
def test_parts_cut_at_the_alignment_are_the_whole(codec: Dense) -> None:
    cut, numel = 2 * codec.alignment * 16, 5 * codec.alignment * 16 + 9
    values = numbers(numel, "gaussian")
    whole = decoded(codec, encoded(codec, values), numel)
    parts = [decoded(codec, encoded(codec, part), part.numel()) for part in (values[:cut], values[cut:])]
    assert torch.equal(whole, torch.cat(parts))


@given(numel=st.integers(0, 5000), codec=st.sampled_from(CODECS), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_shapes_and_replay(numel: int, codec: Dense, seed: int) -> None:
    """Nothing outside wire and out is touched, all of both is written, the same seed gives the same, and zero stays zero."""
    values = numbers(numel, "gaussian", seed % 1000)
    nbytes = codec.wire_bytes(numel)
    wires = [torch.full((nbytes + 32,), fill, dtype=torch.uint8) for fill in (0xAA, 0x55)]
    for wire in wires:
        codec.encode(values, wire[:nbytes], seed=seed)
    assert torch.equal(wires[0][:nbytes], wires[1][:nbytes])
    assert (wires[0][nbytes:] == 0xAA).all()
    out = torch.full((numel + 32,), math.nan)
    codec.decode(wires[0][:nbytes], out[:numel])
    assert out[:numel].isfinite().all()
    assert out[numel:].isnan().all()
    assert (decoded(codec, encoded(codec, torch.zeros(numel)), numel) == 0).all()


def errors(codec: Dense, values: Tensor) -> tuple[float, float]:
    """Return the squares of what coding loses, and of the values."""
    got = decoded(codec, encoded(codec, values), values.numel()).to(torch.float64)
    return float((got - values).square().sum()), float(values.to(torch.float64).square().sum())


def contraction(codec: Dense) -> float:
    """1 - delta, as the docstrings have it."""
    if isinstance(codec, Int8):
        return codec.block / (4 * 127**2)
    if isinstance(codec, Int4):
        return codec.block * (1 + 2.0**-7) ** 2 / (4 * 7**2)
    if isinstance(codec, Float8):
        return 2.0**-8 + 1e-8 if codec.format == "e4m3" else 2.0**-6 + 1e-8
    return 2.0**-22 if isinstance(codec, Float16) else 2.0**-16


@given(
    codec=st.sampled_from(
        [Float16(), BFloat16(), Float8(), Float8("e5m2"), Int8(), Int4(), Int8(block=32), Int4(block=16)]
    ),
    kind=st.sampled_from(SPREAD),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60)
def test_contraction(codec: Dense, kind: str, seed: int) -> None:
    values = numbers(4000, kind, seed)
    if isinstance(codec, Float16):
        values = values.clamp(-6e4, 6e4)
        values[values.abs() < 2.0**-14] = 0
    for block in values.split(codec.alignment if isinstance(codec, Blocked) else 4000):
        lost, energy = errors(codec, block)
        assert lost <= contraction(codec) * energy * (1 + 1e-5)


@given(kind=st.sampled_from(SPREAD), seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_contraction_of_signs(kind: str, seed: int) -> None:
    values = numbers(1000, kind, seed)
    lost, energy = errors(OneBit(), values)
    kept = float(values.to(torch.float64).abs().sum()) ** 2 / 1000
    assert lost == pytest.approx(energy - kept, rel=1e-4, abs=1e-6 * energy)


def variance(codec: Dense, values: Tensor) -> float:
    """Omega, as the docstrings have it, for one block."""
    if isinstance(codec, TernGrad):
        return float(values.abs().max() * values.abs().sum() / values.square().sum()) - 1
    return codec.omega


def test_omega_is_as_documented() -> None:
    omegas = {codec: codec.omega for codec in [*UNBIASED, QSGD(levels=1, block=16), Int8(), OneBit(), Float16()]}
    assert list(omegas.values()) == pytest.approx(
        [256 / (4 * 127**2), 64 * 1.0078125**2 / 196, math.sqrt(512) / 7, math.sqrt(512) - 1, 1 / 8, 4, 0, 0, 0]
    )


@pytest.mark.parametrize("kind", SPREAD)
@pytest.mark.parametrize("codec", UNBIASED, ids=str)
def test_unbiased_and_of_bounded_variance(codec: Dense, kind: str) -> None:
    """The mean of many codes is as far from the values as the mean of independent errors is, the errors are within the bound."""
    numel, trials = codec.alignment if isinstance(codec, Blocked) else 300, 2000
    values = numbers(numel, kind, 7).to(torch.float64)
    trial = [decoded(codec, encoded(codec, values.to(torch.float32), seed=seed), numel) for seed in range(trials)]
    codes = torch.stack(trial).to(torch.float64)
    energy = float(values.square().sum())
    error = float((codes - values).square().sum(1).mean())
    rounding = 1e-12 * energy
    assert float((codes.mean(0) - values).square().sum()) <= 3 * error / trials + rounding
    assert error <= 1.1 * max(variance(codec, values), 0) * energy + rounding


def test_every_code_of_fp8_is_read_as_torch_does() -> None:
    for codec in (Float8("e4m3"), Float8("e5m2")):
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        exact = codes.view(FLOAT8[codec.format].dtype).to(torch.float32)
        wire = torch.cat([codes, torch.tensor([1.0, 0, 0, 0]).view(torch.uint8)])
        written = exact.isfinite()  # encode writes no others
        assert torch.equal(decoded(codec, wire, 256)[written], exact[written])


def test_natural_keeps_powers_of_two() -> None:
    values = torch.exp2(torch.arange(-76, 50, dtype=torch.float32)).repeat(2)
    values[1::2].neg_()
    assert torch.equal(decoded(Natural(), encoded(Natural(), values, seed=1), values.numel()), values)
    assert decoded(Natural(), encoded(Natural(), torch.tensor([1e30, -1e30])), 2).tolist() == [2.0**49, -(2.0**49)]


def test_random_numbers_are_those_of_the_definition() -> None:
    def by_definition(index: int, seed: int) -> int:
        x = (index * 0x9E3779B9 + seed) % 2**32
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    seed = 2**32 - 3
    assert random_bits(1000, seed, torch.device("cpu")).tolist() == [by_definition(i, seed) for i in range(1000)]


def test_sums_are_added_in_the_stated_order() -> None:
    block = numbers(1000, "heavy-tailed")
    partials = [torch.tensor(0.0)] * 128
    for i, number in enumerate(block):
        partials[i % 128] = partials[i % 128] + number
    sums = [(partials[4 * j] + partials[4 * j + 1]) + (partials[4 * j + 2] + partials[4 * j + 3]) for j in range(32)]
    for half in (16, 8, 4, 2, 1):
        sums = [sums[j] + sums[j + half] for j in range(half)]
    assert torch.equal(block_sums(block.view(1, -1)), sums[0].view(1, 1))


def test_wire_sizes() -> None:
    assert [Float16().wire_bytes(n) for n in (0, 1, 8, 9)] == [0, 16, 16, 32]
    assert [Int8().wire_bytes(n) for n in (0, 1, 256, 257, 1 << 20)] == [0, 32, 272, 288, (1 << 20) + (1 << 14)]
    assert Int4().wire_bytes(1 << 20) == (1 << 19) + (1 << 15)
    assert OneBit().wire_bytes(1 << 20) == (1 << 17) + (1 << 12)
    assert TernGrad().wire_bytes(1 << 20) == (1 << 18) + (1 << 13)
    assert QSGD().wire_bytes(1 << 20) == (1 << 19) + (1 << 13)
    assert Natural().wire_bytes(17) == 32


@pytest.mark.parametrize("codec", BLOCKED, ids=str)
def test_settings_that_cannot_be(codec: Blocked) -> None:
    for block in (0, -16, 8, 100):
        with pytest.raises(ValueError, match="multiple of 16"):
            replace(codec, block=block)
    for setting in {"levels", "format"} & vars(codec).keys():
        with pytest.raises(ValueError, match=setting):
            replace(codec, **{setting: 8 if setting == "levels" else "e3m4"})  # type: ignore[arg-type]


def test_tensors_that_cannot_be() -> None:
    codec, values = Int8(), torch.zeros(300)
    wire = torch.zeros(codec.wire_bytes(300), dtype=torch.uint8)
    calls: list[tuple[str, Callable[[], None]]] = [
        ("float32", lambda: codec.encode(values.to(torch.float64), wire)),
        ("contiguous", lambda: codec.encode(torch.zeros(600)[::2], wire)),
        ("bytes", lambda: codec.encode(values, wire[:-16])),
        ("residual", lambda: codec.encode(values, wire, residual=torch.zeros(299))),
        ("bytes", lambda: codec.decode(wire, torch.zeros(600))),
        ("multiple of 16", lambda: codec.decode(torch.zeros(len(wire) + 1, dtype=torch.uint8)[1:], values)),
    ]
    for said, call in calls:
        with pytest.raises(ValueError, match=said):
            call()


def test_devices_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cpu and cuda"):
        kernels.kernels_for(torch.device("meta"))
    monkeypatch.setattr(cuda, "cuda_kernels", lambda device: "no cupy: pip install cupy-cuda99x")
    kernels.kernels_for.cache_clear()
    with pytest.raises(ImportError, match="pip install cupy-cuda99x"):
        kernels.kernels_for(torch.device("cuda", 0))
