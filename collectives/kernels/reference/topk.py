"""The codecs topk, dgc and threshold: the largest numbers, exactly or nearly so many, as indices and values."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference.blocks import corrected
from gradwire.collectives.kernels.reference.entries import keep_unsent, put_entries, read_entries, write_entries

_NAN = 0x7F800001


def _keys(numbers: Tensor) -> Tensor:
    return (numbers.view(torch.int32) & 0x7FFFFFFF).clamp(max=_NAN)


def _largest(numbers: Tensor, k: int) -> Tensor:
    """Return (k,) indices of the largest keys, ascending."""
    return _keys(numbers).sort(descending=True, stable=True).indices[:k].sort().values


def topk_encode(values: Tensor, residual: Tensor | None, wire: Tensor, k: int) -> None:
    """Send the k largest numbers, exactly."""
    c = corrected(values, residual)
    sent = _largest(c, k)
    write_entries(wire, k, sent, c[sent])
    keep_unsent(residual, c, sent)


def topk_decode(wire: Tensor, out: Tensor, k: int, add: bool, scale: float) -> None:
    put_entries(out, *read_entries(wire, k, k), add, scale)


def dgc_encode(values: Tensor, residual: Tensor, wire: Tensor, k: int, momentum: Tensor, decay: float) -> None:
    """Set momentum = decay * momentum + values, and send topk of momentum + residual.

    What leaves the residual leaves the momentum too.
    """
    momentum.copy_(momentum * decay + values)
    c = residual + momentum
    sent = _largest(c, k)
    write_entries(wire, k, sent, c[sent])
    keep_unsent(residual, c, sent)
    keep_unsent(momentum, torch.where(c.isfinite(), momentum, c), sent)


def threshold_encode(
    values: Tensor, residual: Tensor | None, wire: Tensor, k: int, slack: int, tau: Tensor | None
) -> None:
    """Send all that reach the magnitude `tau` ((1,), float32), if they are k - slack to k + slack; otherwise send topk.

    So it is too without tau, and for tau = 0.

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
    write_entries(wire[16:], k + slack, sent, c[sent])
    keep_unsent(residual, c, sent)


def threshold_decode(wire: Tensor, out: Tensor, k: int, slack: int, add: bool, scale: float) -> None:
    put_entries(out, *read_entries(wire[16:], k + slack, int(wire[:4].view(torch.int32))), add, scale)
