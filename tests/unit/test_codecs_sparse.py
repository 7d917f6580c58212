"""The sparse codecs: the compiled ones against the reference, byte for byte; both against the definitions."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.collectives.compression.codec import State
from gradwire.collectives.compression.sparse import DGC, ChunkTopK, RandomK, Sparse, Threshold, TopK
from gradwire.collectives.kernels.cpu import entries as cpu_kernels
from gradwire.collectives.kernels.cpu.blocks import random_bits
from gradwire.collectives.kernels.cpu.keys import key_of
from gradwire.collectives.kernels.cpu.selection import SIDE_BY_SIDE
from gradwire.collectives.kernels.layout import CHUNK
from tests.cuda_machine.cases import CHUNKED, MORE_KINDS, Pair, bits, check, code, decoded, encoded, numbers

CODECS: list[Sparse] = [
    *(TopK(), TopK(0.3), TopK(1.0), Threshold(), Threshold(0.2), RandomK(), RandomK(0.4, seed=2**32 - 1, step=7)),
    *(DGC(), DGC(0.1, momentum=0.5)),
]
FINITE = ("gaussian", "heavy-tailed", "few", "constant", "zeros", "ties", "denormal")
NUMELS = (0, 1, 2, 3, 63, 64, 65, 130, 1000, 4096, 4097, 20_011)
LARGE = 300_007
#: Tried where there are so many numbers that few are looked at first.
AT_A_GUESS = (TopK(), Threshold(), RandomK(), DGC())


def new_state(codec: Sparse, numel: int) -> State | None:
    return codec.new_state(numel, torch.device("cpu")) if isinstance(codec, Threshold | DGC) else None


@pytest.mark.parametrize("codec", [*CHUNKED, ChunkTopK(20)], ids=str)
def test_chunks_have_the_same_bytes_as_the_reference(codec: ChunkTopK) -> None:
    assert check(cpu_kernels, "cpu", codec, (1, 31, 4095, 4096, 20_001, 4097)) == []


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_same_bytes_as_the_reference(codec: Sparse) -> None:
    for numel in NUMELS:
        assert check(cpu_kernels, "cpu", codec, (numel,), MORE_KINDS) == []
    if codec in AT_A_GUESS:
        assert check(cpu_kernels, "cpu", codec, (LARGE,), ("gaussian", "ties", "mostly not finite", "any bits")) == []


def sampled(numel: int) -> Tensor:
    """Where the CPU's top-k looks for its guess."""
    places = max(numel // 256, 1024) // SIDE_BY_SIDE
    stride = numel // places - SIDE_BY_SIDE + 1
    drawn = [random_bits(place, 0) for place in range(places)]
    firsts = [place * numel // places + (drawn[place] * stride >> 32) for place in range(places)]
    return torch.tensor([first + i for first in firsts for i in range(SIDE_BY_SIDE)])


@pytest.mark.parametrize("kind", ["few reach it", "many reach it", "all are equal"])
def test_bad_guesses_change_nothing(kind: str) -> None:
    pair, values = Pair(cpu_kernels, "cpu"), numbers(LARGE, "gaussian")
    places = sampled(LARGE)
    if kind == "few reach it":
        values[places] *= 1000
    elif kind == "many reach it":
        values[places] = 0
    else:
        values[values < 3] = 2.5
    assert (key_of(values.view(torch.int32)[places[0]].item()) == 0) is (kind == "many reach it")
    for residual in (None, torch.zeros(LARGE)):
        code(pair, TopK(), values, residual)
    assert pair.failures == []


@settings(max_examples=60)
@given(
    st.integers(0, 700), st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0]), st.sampled_from(MORE_KINDS), st.integers(0, 99)
)
def test_topk_sends_the_largest_by_lowest_index(numel: int, ratio: float, kind: str, seed: int) -> None:
    values, codec = numbers(numel, kind, seed), TopK(ratio)
    k = codec.count(numel)
    wire = encoded(codec, values)
    rank = [math.inf if math.isnan(x) else abs(x) for x in values.tolist()]
    not_a_number = [math.isnan(x) for x in values.tolist()]
    order = sorted(range(numel), key=lambda i: (not not_a_number[i], -rank[i], i))
    indices = wire[: len(wire) // 2].view(torch.int32)[:k]
    assert indices.tolist() == sorted(order[:k])
    assert torch.equal(bits(wire[len(wire) // 2 :].view(torch.float32)[:k]), bits(values[indices.long()]))


@settings(max_examples=60)
@given(st.integers(1, 6000), st.sampled_from([0.001, 0.01, 0.1, 1.0]), st.sampled_from(FINITE), st.integers(0, 99))
def test_contraction(numel: int, ratio: float, kind: str, seed: int) -> None:
    values = numbers(numel, kind, seed)
    for codec in (TopK(ratio), Threshold(ratio), DGC(ratio)):
        state = new_state(codec, numel)
        for _ in range(1 if isinstance(codec, DGC) else 3):
            got = decoded(codec, encoded(codec, values, torch.zeros(numel), state=state), numel).double()
            delta = (codec.count(numel) - codec.count(numel) // 20) / numel
            lost = (values.double() - got).square().sum()
            assert lost <= (1 - delta) * values.double().square().sum() * (1 + 1e-12)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("numel", [1, 100, 5000, LARGE])
def test_error_feedback_telescopes(codec: Sparse, numel: int) -> None:
    """The sum of what was decoded is the sum of what was given (of its momentum), less what is left; exact in integers."""
    codec = replace(codec, momentum=0.0) if isinstance(codec, DGC) else codec
    state, residual = new_state(codec, numel), torch.zeros(numel)
    given_sum, decoded_sum = torch.zeros(numel), torch.zeros(numel)
    for step in range(12):
        if isinstance(codec, RandomK):
            codec = codec.at(step)
        values = (100 * numbers(numel, "gaussian", step)).round()
        given_sum += values
        codec.decode(encoded(codec, values, residual, state=state), decoded_sum, add=True)
    assert torch.equal(decoded_sum, given_sum - residual)


@pytest.mark.parametrize("kind", ["not finite", "mostly not finite"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_not_finite_arrives_and_does_not_stay(codec: Sparse, kind: str) -> None:
    numel, state = 5000, new_state(codec, 5000)
    residual = torch.zeros(numel)
    arrived = decoded(codec, encoded(codec, numbers(numel, kind), residual, state=state), numel)
    assert not arrived.isfinite().all()
    assert residual.isfinite().all()
    for tensor in (state or {}).values():
        assert tensor.isfinite().all()
    assert decoded(codec, encoded(codec, numbers(numel, "gaussian"), residual, state=state), numel).isfinite().all()


def test_one_nan_reaches_everyone_even_if_it_is_not_drawn() -> None:
    for place in (0, 1, 4097, 20_010):
        values = torch.ones(20_011)
        values[place] = math.nan
        assert encoded(RandomK(), values).view(torch.float32)[:201].isnan().all()


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("numel", [1, 10, 5000, LARGE])
def test_threshold_sends_within_five_percent(numel: int, feedback: bool) -> None:
    codec, state = Threshold(), new_state(Threshold(), numel)
    residual = torch.zeros(numel) if feedback else None
    k, counts = codec.count(numel), []
    for step in range(30):
        factor = {10: 0.01, 15: 1000.0, 20: 0.0}.get(step, 1.0)
        wire = encoded(codec, factor * numbers(numel, "gaussian", step), residual, state=state)
        counts.append(int(wire[:4].view(torch.int32)))
    assert all(abs(count - k) <= 0.05 * k for count in counts)
    if numel == LARGE and not feedback:  # tau is in use, as it need not move
        assert counts.count(k) < 15


def test_threshold_without_state_is_topk() -> None:
    values = numbers(5000, "ties")
    assert torch.equal(
        decoded(Threshold(), encoded(Threshold(), values), 5000), decoded(TopK(), encoded(TopK(), values), 5000)
    )


@pytest.mark.parametrize(("numel", "ratio"), [(1, 0.5), (7, 0.3), (40, 0.1), (41, 0.99), (64, 1.0)])
def test_randomk_draws_every_number_alike(numel: int, ratio: float) -> None:
    """Unbiased when multiplied by n / k."""
    codec, draws = RandomK(ratio, seed=3), 4000
    k = codec.count(numel)
    total = torch.zeros(numel)
    for step in range(draws):
        once = decoded(codec.at(step), encoded(codec.at(step), torch.ones(numel)), numel)
        assert int(once.sum()) == k
        total += once
    deviation = math.sqrt(draws * k / numel * (1 - k / numel))
    assert (total - draws * k / numel).abs().max() <= 5 * deviation


def test_randomk_codes_can_be_added() -> None:
    codec = RandomK(0.1, step=4)
    a, b = (10 * numbers(1000, "gaussian", 1)).round(), (10 * numbers(1000, "gaussian", 2)).round()
    wires = [encoded(codec, values).view(torch.float32) for values in (a, b)]
    both = decoded(codec, (wires[0] + wires[1]).view(torch.uint8), 1000)
    assert torch.equal(both, decoded(codec, encoded(codec, a + b), 1000))


def test_dgc_is_momentum_then_topk_with_both_cleared() -> None:
    numel, codec = 1000, DGC(0.05, momentum=0.5)
    state, velocity = new_state(codec, numel), torch.zeros(numel)
    u, v = torch.zeros(numel), torch.zeros(numel)
    for step in range(5):
        gradient = (64 * numbers(numel, "gaussian", step)).round()
        u = 0.5 * u + gradient
        v = v + u
        got = decoded(codec, encoded(codec, gradient, velocity, state=state), numel)
        sent = got != 0
        assert int(sent.sum()) == codec.count(numel)
        assert torch.equal(got, v * sent)
        u, v = u * ~sent, v * ~sent
        assert torch.equal(velocity, v)


def test_dgc_warms_up_in_stages() -> None:
    codec = DGC(0.001, ramp_steps=8)
    stages = (0.25, 0.0625, 0.015625, 0.00390625, 0.001)
    assert [codec.at(step).ratio for step in range(10)] == [ratio for ratio in stages for _ in range(2)]
    assert codec.at(8) == DGC(0.001)
    assert DGC(0.5, ramp_steps=8).at(0).ratio == 0.5


@pytest.mark.parametrize("codec", [TopK(), Threshold()], ids=str)
def test_a_wire_of_another_length_is_refused(codec: Sparse) -> None:
    wire = encoded(codec, numbers(1000, "constant"))
    wire[16 if isinstance(codec, Threshold) else 0 :].view(torch.int32)[3] = 1000
    with pytest.raises(ValueError, match="indices outside of"):
        decoded(codec, wire, 1000)
    with pytest.raises(ValueError, match="contiguous bytes"):
        decoded(codec, wire[:-16], 1000)
    with pytest.raises(ValueError, match="must be float32"):
        codec.encode(torch.ones(1000, dtype=torch.float64), wire)


@pytest.mark.parametrize("offset", [0, 1])
def test_large_results_of_indices_that_cannot_be(offset: int) -> None:
    """Those at addresses that vectors have are cleared past the caches. The order of the indices does not matter."""
    codec, out = TopK(), torch.full((LARGE + offset,), math.nan)[offset:]
    wire = encoded(codec, numbers(LARGE, "gaussian"))
    indices = wire[: 4 * codec.count(LARGE)].view(torch.int32)
    for place, index in ((-1, LARGE), (0, -1)):
        before, indices[place] = int(indices[place]), index
        with pytest.raises(ValueError, match="indices outside of"):
            codec.decode(wire, out)
        indices[place] = before
    indices[[0, -1]] = indices[[-1, 0]]
    codec.decode(wire, out)
    assert int((out != 0).sum()) == codec.count(LARGE)


def test_settings_that_cannot_be() -> None:
    for ratio in (0.0, -0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="ratio must be"):
            TopK(ratio)
    for k in (0, -4, 6, 1028):
        with pytest.raises(ValueError, match=f"multiple of 4 from 4 to 1024, not {k}"):
            ChunkTopK(k)
    with pytest.raises(ValueError, match="error feedback"):
        encoded(DGC(), torch.ones(5), state=new_state(DGC(), 5))


def test_chunks_take_141_times_fewer_bytes() -> None:
    numel = 1 << 20
    assert 4 * numel / ChunkTopK().wire_bytes(numel) == pytest.approx(141.24, abs=0.01)


def test_the_largest_of_each_chunk_arrive_with_their_signs() -> None:
    values = numbers(2 * CHUNK + 100, "gaussian")
    out = decoded(ChunkTopK(), encoded(ChunkTopK(), values), len(values))
    for start, sent in ((0, 64), (CHUNK, 64), (2 * CHUNK, 2)):
        piece, got = values[start : start + CHUNK], out[start : start + CHUNK]
        largest = piece.abs().topk(sent).indices.sort().values
        assert got.nonzero().view(-1).tolist() == largest.tolist()
        assert torch.equal(got[largest].sign(), piece[largest].sign())
        assert len(got[largest].abs().unique()) <= 2


def test_two_magnitudes_are_exact_where_there_are_only_two() -> None:
    values = torch.zeros(CHUNK)
    values[5], values[17], values[99], values[4000] = 2.0, -2.0, -0.5, 0.5
    assert torch.equal(decoded(ChunkTopK(4), encoded(ChunkTopK(4), values), CHUNK)[values != 0], values[values != 0])


def test_what_chunks_lose_comes_later() -> None:
    codec, values = ChunkTopK(256), numbers(CHUNK + 50, "gaussian")
    residual, arrived = torch.zeros_like(values), torch.zeros_like(values)
    for _ in range(80):
        codec.decode(encoded(codec, values, residual), arrived, add=True)
    torch.testing.assert_close(arrived + residual, 80 * values, rtol=1e-4, atol=1e-2)
    assert (arrived - 80 * values).norm() < 0.3 * (80 * values).norm()


def test_a_wire_of_more_numbers_is_refused() -> None:
    codec, values = ChunkTopK(4), torch.arange(CHUNK, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"outside of \[0, 100\)"):
        decoded(codec, encoded(codec, values), 100)
