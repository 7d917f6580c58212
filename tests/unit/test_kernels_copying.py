"""Copies that add up what they copy, against those of plain torch."""

import pytest
import torch

from gradwire.collectives.kernels.reference import memory as reference

LINE = reference.LINE_BYTES
compiled = pytest.importorskip("gradwire.collectives.kernels.cpu.entries")


def pieces_of(sizes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return pieces of random bits, at addresses that nothing but their dtype divides."""
    generator = torch.Generator().manual_seed(sum(sizes))
    bits = [torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator) for size in sizes]
    return [torch.cat([each[: dtype.itemsize], each]).view(dtype)[1:] if len(each) else each for each in bits]


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (15, 16, 17), (1000, 0, 4096, 3), (1 << 18,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64], ids=str)
def test_copies_and_sums_are_those_of_torch(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    pieces = pieces_of(sizes, dtype)
    lines = sum(-(-piece.nbytes // LINE) for piece in pieces)
    begun = torch.arange(reference.SUMS) << 60
    targets = [torch.full((LINE * lines + LINE,), 7, dtype=torch.uint8) for _ in range(2)]
    sums = [begun.clone(), begun.clone()]
    reference.add_pieces(sums[0], pieces, targets[0])
    compiled.add_pieces(sums[1], pieces, targets[1])
    assert targets[0].tolist() == targets[1].tolist()
    assert targets[0][-LINE:].tolist() == [7] * LINE
    read = begun.clone()
    compiled.add_pieces(read, [targets[1][:-LINE]])
    assert sums[0].tolist() == sums[1].tolist() == read.tolist()


@pytest.mark.parametrize("kernels", [compiled, reference], ids=["compiled", "reference"])
def test_bits_and_the_order_of_lines_count(kernels: object) -> None:
    data = torch.arange(8 * 40)
    flipped = [data.clone() for _ in range(2)]
    flipped[0][0] ^= 1
    flipped[1][-1] ^= -(2**63)
    swapped = data.view(40, 8).clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    found = set()
    for each in (data, *flipped, swapped):
        sums = torch.zeros(reference.SUMS, dtype=torch.int64)
        kernels.add_pieces(sums, [each])  # type: ignore[attr-defined]
        found.add(tuple(sums.tolist()))
    assert len(found) == 4
