"""The codec chunktopk: its kernel for CPUs against the reference, what it keeps, and what it costs."""

import pytest
import torch

from gradwire.collectives.compression import ChunkTopK, make_codec
from gradwire.collectives.kernels.cpu import sparse as cpu
from gradwire.collectives.kernels.reference.sparse import CHUNK
from tests.cuda_machine.cases import CHUNK_NUMELS, CHUNKED, KINDS, check_chunks, decoded, encoded, numbers


@pytest.mark.parametrize("codec", [*CHUNKED, ChunkTopK(20)], ids=repr)
def test_the_kernel_writes_what_the_reference_writes(codec: ChunkTopK) -> None:
    assert check_chunks(cpu, "cpu", codec, (*CHUNK_NUMELS, 4096, 20_001), KINDS) == []


def test_it_writes_141_times_fewer_bytes() -> None:
    numel = 1 << 20
    assert 4 * numel / ChunkTopK().wire_bytes(numel) == pytest.approx(141.24, abs=0.01)
    assert make_codec("chunktopk") == ChunkTopK()


def coded(codec: ChunkTopK, values: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    return decoded(codec, encoded(codec, values, residual), len(values))


def test_the_largest_of_each_chunk_arrive_with_their_signs() -> None:
    values = numbers(2 * CHUNK + 100, "gaussian")
    out = coded(ChunkTopK(), values)
    for start, sent in ((0, 64), (CHUNK, 64), (2 * CHUNK, 2)):
        piece, got = values[start : start + CHUNK], out[start : start + CHUNK]
        largest = piece.abs().topk(sent).indices.sort().values
        assert got.nonzero().view(-1).tolist() == largest.tolist()
        assert torch.equal(got[largest].sign(), piece[largest].sign())
        assert len(got[largest].abs().unique()) <= 2


def test_two_magnitudes_are_exact_where_there_are_only_two() -> None:
    values = torch.zeros(CHUNK)
    values[5], values[17], values[99], values[4000] = 2.0, -2.0, -0.5, 0.5
    assert torch.equal(coded(ChunkTopK(4), values)[values != 0], values[values != 0])


def test_what_is_lost_comes_later() -> None:
    codec, values = ChunkTopK(256), numbers(CHUNK + 50, "gaussian")
    residual, arrived = torch.zeros_like(values), torch.zeros_like(values)
    for _ in range(80):
        arrived += coded(codec, values, residual)
    torch.testing.assert_close(arrived + residual, 80 * values, rtol=1e-4, atol=1e-2)
    assert (arrived - 80 * values).norm() < 0.3 * (80 * values).norm()


@pytest.mark.parametrize("k", [0, -4, 6, 1028])
def test_other_k_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 4 from 4 to 1024, not {k}"):
        ChunkTopK(k)


def test_a_wire_of_more_numbers_is_refused() -> None:
    codec, values = ChunkTopK(4), torch.arange(CHUNK, dtype=torch.float32)
    wire = torch.zeros(codec.wire_bytes(CHUNK), dtype=torch.uint8)
    codec.encode(values, wire)
    with pytest.raises(ValueError, match=r"outside of \[0, 100\)"):
        codec.decode(wire, torch.zeros(100))
