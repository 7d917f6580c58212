"""Sizes as nccl-tests writes them: 8, 4K, 32M, 1G, the units being powers of 1024."""

from __future__ import annotations

import re

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes: "4K" -> 4096, "1.5M" -> 1572864.

    Raises:
        ValueError: not a number followed by nothing, K, M or G, or not a whole number of bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    if match is None:
        raise ValueError(f"size {text!r} is not a number followed by nothing, K, M or G")
    nbytes = float(match[1]) * UNITS[match[2]]
    if nbytes != int(nbytes):
        raise ValueError(f"size {text!r} is not a whole number of bytes")
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """The shortest exact notation that `parse_size` reads back: 4096 -> "4K", 1000 -> "1000"."""
    unit = next(unit for unit in reversed(UNITS) if not unit or (nbytes >= UNITS[unit] and nbytes % UNITS[unit] == 0))
    return f"{nbytes // UNITS[unit]}{unit}"


def size_range(min_bytes: int, max_bytes: int, step_bytes: int, step_factor: int | None) -> list[int]:
    """From `min_bytes` to `max_bytes`, both included where the steps hit them; a factor goes before a step.

    Raises:
        ValueError: an empty range, or a step that does not grow.
    """
    if not 1 <= min_bytes <= max_bytes:
        raise ValueError(f"no size from {min_bytes} to {max_bytes} bytes")
    if step_factor is None:
        if step_bytes < 1:
            raise ValueError(f"step of {step_bytes} bytes does not grow")
        return list(range(min_bytes, max_bytes + 1, step_bytes))
    if step_factor < 2:
        raise ValueError(f"step factor {step_factor} does not grow")
    sizes = [min_bytes]
    while sizes[-1] * step_factor <= max_bytes:
        sizes.append(sizes[-1] * step_factor)
    return sizes
