"""Exact inputs: unique per rank, and every result a small number that its dtype represents, so equality is the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import combinations, product
from typing import Any

import torch

from gradwire.collectives import Communicator
from gradwire.collectives.environment import HOST_ID
from gradwire.collectives.schedules.algorithms import PLANNERS
from tests.harness import EXCHANGE_TIMEOUT_S

ALLREDUCES = [name for name in PLANNERS["allreduce"] if "(" not in name]  # what is nested differs between hosts only
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATING, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
OPS = ("sum", "average", "min", "max", "product")
SEGMENT_BYTES = 200
SEVERAL_SEGMENTS = 999


def communicator() -> Communicator:
    """One whose segments are so small that SEVERAL_SEGMENTS elements of any dtype make several, in every world."""
    return Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=SEGMENT_BYTES)


@contextmanager
def on_host(name: str) -> Iterator[None]:
    """Communicators made inside take this process to be on the host of that name."""
    os.environ[HOST_ID] = name
    try:
        yield
    finally:
        del os.environ[HOST_ID]


def ops(dtype: torch.dtype) -> tuple[str, ...]:
    return tuple(op for op in OPS if dtype is not torch.bool or op != "average")


def cover(
    *parameters: Sequence[Any], clash: Callable[[Any, Any], bool] = lambda one, other: False
) -> list[tuple[Any, ...]]:
    """Return few rows of the product of parameters, in which each two values of two parameters meet at least once.

    clash: whether two values, of an earlier and of a later parameter, cannot meet. The rows are the same in every run.
    """
    columns = [[(column, which) for which in range(len(values))] for column, values in enumerate(parameters)]

    @cache
    def fit(*pair: tuple[int, int]) -> bool:
        return not clash(*(parameters[column][which] for column, which in sorted(pair)))

    pairs = (pair for one, other in combinations(columns, 2) for pair in product(one, other))
    missing = dict.fromkeys(pair for pair in pairs if fit(*pair))
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for column, choices in enumerate(columns):
            if column not in row:
                chosen = list(row.items())
                new = {
                    choice: sum(tuple(sorted((choice, other))) in missing for other in chosen)
                    for choice in choices
                    if all(fit(choice, other) for other in chosen)
                }
                row[column] = max(new, key=new.__getitem__)[1]
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(values[row[column]] for column, values in enumerate(parameters)))
    return rows


def contribution(rank: int, world_size: int, numel: int, dtype: torch.dtype, op: str = "sum") -> torch.Tensor:
    """What a rank brings: at each index the ranks' values are the same set, dealt out in turn."""
    index = torch.arange(numel)
    turn = (index + rank) % world_size
    if dtype is torch.bool:
        return (((index + 1) >> rank) & 1).bool()
    if op == "product":
        values = torch.tensor([3, 2, -1, 2] + [1] * world_size)[turn]
    else:
        values = (turn + 1 + index % 5) * (1 - 2 * (index % 2))
    return (values.abs() if dtype is torch.uint8 else values).to(dtype)


def reduced(world_size: int, numel: int, dtype: torch.dtype, op: str = "sum") -> torch.Tensor:
    """The contributions of all ranks, combined in a type that holds them exactly."""
    every = torch.stack([contribution(rank, world_size, numel, dtype, op) for rank in range(world_size)])
    if dtype is torch.bool:
        return every.all(0) if op in ("min", "product") else every.any(0)
    wide = every.to(torch.float64 if dtype.is_floating_point else torch.int64)
    if op == "average":
        rounding = None if dtype.is_floating_point else "trunc"
        return torch.div(wide.sum(0), world_size, rounding_mode=rounding).to(dtype)
    combine = {"sum": torch.sum, "min": torch.amin, "max": torch.amax, "product": torch.prod}[op]
    return combine(wide, 0).to(dtype)


class Checks:
    """Collects the cases that failed on a rank, each with its parameters, and raises AssertionError with them at the end of a
    with block."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._case = ""

    def __enter__(self) -> Checks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert kind is not None or not self.failures, "\n".join(self.failures[:20])

    @contextmanager
    def case(self, **parameters: object) -> Iterator[None]:
        """Name what is being done, for equal() and for an error, which ends the run: other ranks may be lost by it."""
        self._case = ", ".join(f"{name}={value}" for name, value in parameters.items())
        try:
            yield
        except Exception as error:
            raise AssertionError(f"in the case {self._case}") from error

    def equal(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        if actual.dtype is not expected.dtype or actual.shape != expected.shape:
            got, wanted = (f"{t.dtype} {tuple(t.shape)}" for t in (actual, expected))
            self.failures.append(f"{self._case}: {got} instead of {wanted}")
        elif not torch.equal(actual, expected):
            wrong = (actual != expected).nonzero().flatten(1)
            at = tuple(wrong[0].tolist())
            self.failures.append(
                f"{self._case}: {len(wrong)} of {actual.numel()} wrong, "
                f"the first at {at}: {actual[at].item()} instead of {expected[at].item()}"
            )
