"""The sizes that a benchmark goes through."""

from __future__ import annotations


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
