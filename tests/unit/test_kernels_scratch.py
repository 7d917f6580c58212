"""Scratch memory of kernels on the CPU, and writing past the caches."""

import pytest
import torch
from numba import njit

from gradwire.collectives.kernels.cpu import scratch


@njit  # without a signature, which would compile it wherever tests are collected
def two_rooms() -> tuple[int, int]:
    return scratch.room(), scratch.room()


def test_rooms_are_apart_and_aligned() -> None:
    first, second = two_rooms()
    assert first % 64 == second % 64 == 0
    assert abs(first - second) >= 4 * scratch.PIECE + 64


@njit
def copy(source: int, target: int, numel: int) -> None:
    scratch.stream(source, target, numel)
    scratch.settle()


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 1000])
def test_streaming_copies_so_many_numbers(numel: int) -> None:
    source, target = torch.randn(numel + 32), torch.zeros(numel + 64)
    start = -target.data_ptr() // 4 % 16  # where a vector may be stored
    copy(source.data_ptr() + 4, target.data_ptr() + 4 * start, numel)
    assert torch.equal(target[start : start + numel], source[1 : numel + 1])
    assert not target[:start].any()
    assert not target[start + numel :].any()


def test_it_is_past_the_caches_and_in_order() -> None:
    copy.compile("void(int64, int64, int64)")
    code = "\n".join(copy.inspect_llvm().values())
    assert "!nontemporal" in code
    assert "fence seq_cst" in code
