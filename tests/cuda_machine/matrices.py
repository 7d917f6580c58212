"""What the kernels of powersgd must do, on the CPU, on the machine and on a GPU: as the reference does, bit for bit where ranks
compute the same."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference import matrices as reference
from tests.cuda_machine.cases import bits

KINDS = ("gaussian", "dependent", "zeros", "denormal", "near the largest", "not finite")
BATCH = 3


def factors(rank: int, length: int, kind: str = "gaussian", batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(batch, rank, length, generator=generator)
    x *= {"denormal": 1e-41, "near the largest": 1e37}.get(kind, 1)
    if kind == "dependent" and rank > 1:
        x[:, -1] = 3 * x[:, 0]
    elif kind == "zeros":
        x[0] = 0
    elif kind == "not finite":
        x[0, 0, length // 2] = math.inf
        x[-1, -1, 0] = math.nan
    return x


def check(
    kernels: Any,
    device: str,
    rank: int,
    rows: int,
    columns: int,
    kind: str = "gaussian",
    dtype: torch.dtype = torch.float32,
    shift: int = 0,
    batch: int = BATCH,
) -> list[str]:
    """Return the functions whose results differ from those of the reference on the CPU. shift: by how many elements the tensors
    miss a multiple of 16 bytes."""
    expected = _results(reference, "cpu", rank, rows, columns, kind, dtype, shift, batch)
    found = _results(kernels, device, rank, rows, columns, kind, dtype, shift, batch)
    wrong = [name for name in expected if not torch.equal(bits(found[name]), bits(expected[name]))]
    if "subtract" in wrong and torch.allclose(found["subtract"].cpu(), expected["subtract"], 1e-5, 1e-4):
        wrong.remove("subtract")
    return wrong


def _results(
    kernels: Any, device: str, rank: int, rows: int, columns: int, kind: str, dtype: torch.dtype, shift: int, batch: int
) -> dict[str, Tensor]:
    left, right = (factors(rank, length, kind, batch).to(device) for length in (rows, columns))
    flat = torch.full((shift + batch * rows * columns,), 0.1, dtype=dtype, device=device)
    tensors = [*flat[shift:].view(batch, rows, columns)]
    kernels.powersgd_multiply(left, right, tensors)
    product = flat.clone()

    errors = torch.ones(batch, rows, columns, device=device)
    kernels.powersgd_accumulate(errors, tensors)
    sums = errors.clone()
    if kind == "gaussian":  # others differ by more than a tolerance
        kernels.powersgd_subtract(left, right, errors)

    basis, first, cleared = torch.full_like(right, math.nan), torch.ones_like(right), sums.clone()
    kernels.powersgd_begin_next(right, first, basis, cleared)
    kernels.powersgd_orthonormalize(left)
    return {
        "multiply": product,
        "accumulate": sums,
        "subtract": errors,
        "begin_next": basis,
        "begin_next, errors": cleared,
        "orthonormalize": left,
    }
