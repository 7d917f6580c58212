"""The sparse and low-rank codecs in plain torch, on any device: what every other kernel module must write and read,
byte for byte.

<codec>_encode(values, residual, wire, <parameters>) and <codec>_decode(wire, out, <parameters>, add, scale), with
tensors as in collectives.compression.codec. c = values + residual, in float32. What is sent of c leaves the residual;
what is not finite leaves it too, sent or not, as it would come back in every later sum.

Magnitudes are compared by their bits, the *key* of a number: of two equal ones the lower index counts as larger, and a
NaN is larger than Inf, whatever its sign and payload. On the wire there is one NaN, 0x7FC00000.

Sections of a wire: int32 indices, ascending, then float32 values, each filled up with zero bytes to a multiple of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from collectives.kernels.reference import block_sums, corrected, random_bits
from collectives.kernels.wire import pad16

_NAN = 0x7F800001

#: A vector of which so little is left once others are taken away from it is rounding errors: in squares of norms.
LOST = 1e-12


def _keys(numbers: Tensor) -> Tensor:
    return (numbers.view(torch.int32) & 0x7FFFFFFF).clamp(max=_NAN)


def _largest(numbers: Tensor, k: int) -> Tensor:
    """(k,) indices of the largest keys, ascending."""
    return _keys(numbers).sort(descending=True, stable=True).indices[:k].sort().values


def _one_nan(numbers: Tensor) -> Tensor:
    return torch.where(numbers.isnan(), torch.full_like(numbers, float("nan")), numbers)


def _write(wire: Tensor, entries: int, indices: Tensor, values: Tensor) -> None:
    """Into a wire with room for so many entries."""
    wire.zero_()
    section = pad16(4 * entries)
    wire[:section].view(torch.int32)[: len(indices)] = indices.to(torch.int32)
    wire[section:].view(torch.float32)[: len(values)] = _one_nan(values)


def _read(wire: Tensor, entries: int, count: int) -> tuple[Tensor, Tensor]:
    section = pad16(4 * entries)
    return wire[:section].view(torch.int32)[:count].to(torch.int64), wire[section:].view(torch.float32)[:count]


def _put(out: Tensor, indices: Tensor, values: Tensor, add: bool, scale: float) -> None:
    if not add:
        out.zero_()
    out[indices] += values * scale


def _keep(residual: Tensor | None, c: Tensor, sent: Tensor) -> None:
    """The residual becomes c, without what was sent and what is not finite."""
    if residual is not None:
        residual.copy_(torch.where(c.isfinite(), c, torch.zeros_like(c)))
        residual[sent] = 0


def topk_encode(values: Tensor, residual: Tensor | None, wire: Tensor, k: int) -> None:
    """The k largest numbers, exactly."""
    c = corrected(values, residual)
    sent = _largest(c, k)
    _write(wire, k, sent, c[sent])
    _keep(residual, c, sent)


def topk_decode(wire: Tensor, out: Tensor, k: int, add: bool, scale: float) -> None:
    _put(out, *_read(wire, k, k), add, scale)


def dgc_encode(values: Tensor, residual: Tensor, wire: Tensor, k: int, momentum: Tensor, decay: float) -> None:
    """momentum = decay * momentum + values; then topk of momentum + residual. What leaves the residual leaves the
    momentum too.
    """
    momentum.copy_(momentum * decay + values)
    c = residual + momentum
    sent = _largest(c, k)
    _write(wire, k, sent, c[sent])
    _keep(residual, c, sent)
    _keep(momentum, torch.where(c.isfinite(), momentum, c), sent)


def threshold_encode(
    values: Tensor, residual: Tensor | None, wire: Tensor, k: int, slack: int, tau: Tensor | None
) -> None:
    """All numbers of at least the magnitude `tau` ((1,), float32), if they are k - slack to k + slack; else, or for tau
    = 0, topk.

    tau then moves: if m numbers were sent for it, it is multiplied by 1 + (m - k) / (8 k); if not, it becomes the
    smallest magnitude that was sent, or 0 if that is not finite. The wire begins with m as int32 and 12 zero bytes, and
    has k + slack entries.
    """
    c = corrected(values, residual)
    keys = _keys(c)
    reaching = keys >= _keys(tau) if tau is not None else torch.zeros_like(keys, dtype=torch.bool)
    count = int(reaching.sum())
    if tau is not None and float(tau) != 0 and abs(count - k) <= slack:
        sent = reaching.nonzero().view(-1)
        excess = torch.full_like(tau, count - k) / torch.full_like(tau, 8 * k) if k > 0 else torch.zeros_like(tau)
        tau.mul_(1 + excess)
    else:
        sent = _largest(c, k)
        if tau is not None and k > 0:
            least = c[sent[keys[sent].argmin()]].abs()
            tau.copy_(torch.where(least.isfinite(), least, torch.zeros_like(least)))
    wire[:16].view(torch.int32).copy_(torch.tensor([len(sent), 0, 0, 0], dtype=torch.int32))
    _write(wire[16:], k + slack, sent, c[sent])
    _keep(residual, c, sent)


def threshold_decode(wire: Tensor, out: Tensor, k: int, slack: int, add: bool, scale: float) -> None:
    _put(out, *_read(wire[16:], k + slack, int(wire[:4].view(torch.int32))), add, scale)


def randomk_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    """(k,) indices: n places on a ring are divided into k parts, and one is drawn from each.

    With u(j) the 32 random bits of index j: the ring begins at floor(u(k) * n / 2^32), so that every index is drawn
    with the same probability, k / n; part j is [floor(j * n / k), floor((j + 1) * n / k)), of which element floor(u(j)
    * length / 2^32) is taken.
    """
    random = random_bits(k + 1, seed, device)
    ends = torch.arange(k + 1, device=device) * n // max(k, 1)
    drawn = ends[:-1] + (random[:-1] * ends.diff() >> 32) + (random[-1] * n >> 32)
    return torch.where(drawn < n, drawn, drawn - n)


def randomk_encode(values: Tensor, residual: Tensor | None, wire: Tensor, k: int, seed: int) -> None:
    """The numbers at randomk_indices, in that order; all NaN if any number, sent or not, is not finite."""
    c = corrected(values, residual)
    sent = randomk_indices(len(c), k, seed, c.device)
    wire.zero_()
    wire.view(torch.float32)[:k] = c[sent] if c.isfinite().all() else torch.full((k,), float("nan"), device=c.device)
    _keep(residual, c, sent)


def randomk_decode(wire: Tensor, out: Tensor, k: int, seed: int, add: bool, scale: float) -> None:
    _put(out, randomk_indices(len(out), k, seed, out.device), wire.view(torch.float32)[:k], add, scale)


def powersgd_orthonormalize(vectors: Tensor) -> None:
    """(batch, rank, length) float32, contiguous: make the vectors of each set orthonormal, in place.

    Modified Gram-Schmidt in float64, in the order of the vectors, sums in the order of reference.block_sums. A vector
    that lies in the span of those before it becomes zero. A set that is not finite becomes NaN somewhere.
    """
    done: list[Tensor] = []
    for vector in vectors.to(torch.float64).unbind(1):
        left = vector
        for other in done:
            left = left - block_sums(other * left) * other
        before, after = block_sums(vector * vector), block_sums(left * left)
        lost = (after <= LOST * before) & (before < float("inf"))
        done.append(torch.where(lost, torch.zeros_like(left), left / after.sqrt()))
    vectors.copy_(torch.stack(done, 1))


def powersgd_multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out (rows, columns) = the transpose of left (rank, rows) times right (rank, columns), all contiguous.

    The products are added in the order of the rank, each rounded: the same bits on every machine.
    """
    out.copy_(left[0][:, None] * right[0])
    for p, q in zip(left[1:], right[1:], strict=True):
        out.add_(p[:, None] * q)
