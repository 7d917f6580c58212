"""nccl-tests' sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.bench.micro.options import size_range
from gradwire.collectives.notation import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("4K", 4096), ("4k", 4096), ("1.5M", 1572864), ("32M", 32 << 20), ("1G", 1 << 30)]
)
def test_units_are_powers_of_1024(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "M", "-1", "4KB", "4 K", "1e6", "0.3K", "1.5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@given(st.integers(0, 1 << 40))
def test_format_is_read_back(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0"), (1000, "1000"), (1024, "1K"), (1536, "1536"), (3 << 20, "3M")])
def test_format_takes_the_largest_unit_that_is_exact(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_a_factor_goes_before_a_step() -> None:
    assert size_range(8, 128, 1, 4) == [8, 32, 128]
    assert size_range(8, 127, 1, 4) == [8, 32]


def test_a_step_includes_both_ends() -> None:
    assert size_range(4, 12, 4, None) == [4, 8, 12]
    assert size_range(4, 11, 4, None) == [4, 8]
    assert size_range(4, 4, 1 << 20, None) == [4]


@pytest.mark.parametrize("arguments", [(0, 8, 1, None), (16, 8, 1, None), (8, 16, 0, None), (8, 16, 1, 1)])
def test_a_range_that_cannot_be_walked_is_refused(arguments: tuple[int, int, int, int | None]) -> None:
    with pytest.raises(ValueError, match=r"no size|not grow"):
        size_range(*arguments)
