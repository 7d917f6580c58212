"""The sparse codecs in plain torch. Every other kernel must write and read the same bytes.

<codec>_encode(values, residual, wire, <parameters>) and <codec>_decode(wire, out, <parameters>, add, scale), with tensors as in
gradwire.collectives.compression.codec. Encoders send numbers of c = values + residual, in float32; values and results may be
bfloat16 or float16, too. The new residual is c, with 0 for the numbers that were sent and for those that are not finite, which
would return in every later sum.

Magnitudes are compared by their bits, the *key* of a number. Of two equal keys, the one with the lower index counts as larger.
A NaN of any sign and payload is larger than Inf. On the wire, every NaN is 0x7FC00000.

Sections of a wire: int32 indices, ascending, then float32 values, each padded with zero bytes to a multiple of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.kernels.layout import CHUNK, pad16
from gradwire.collectives.kernels.reference.blocks import corrected, in_blocks, random_bits


def _one_nan(numbers: Tensor) -> Tensor:
    return torch.where(numbers.isnan(), torch.full_like(numbers, float("nan")), numbers)


def _write_entries(wire: Tensor, entries: int, c: Tensor, sent: Tensor) -> None:
    """Write the indices and numbers that a mask selects into a wire that has room for `entries` of them."""
    wire.zero_()
    section = pad16(4 * entries)
    places = torch.where(sent, sent.cumsum(0) - 1, entries)  # those that are not sent are written behind the others
    indices = torch.arange(len(c), dtype=torch.int32, device=c.device)
    for part, content in (
        (wire[:section].view(torch.int32), indices),
        (wire[section:].view(torch.float32), _one_nan(c)),
    ):
        part[:entries] = part.new_zeros(entries + 1).scatter_(0, places, content)[:entries]


def _read_entries(wire: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    section = pad16(4 * entries)
    return wire[:section].view(torch.int32)[:entries].to(torch.int64), wire[section:].view(torch.float32)[:entries]


def _put_entries(
    out: Tensor, indices: Tensor, values: Tensor, add: bool, scale: float, wanted: Tensor | None = None
) -> None:
    """Write or add values * scale at their indices. wanted: a mask of the entries that count; None for all."""
    if not add:
        out.zero_()
    if wanted is None:
        out[indices] += values * scale
    else:  # the others are written behind the numbers
        numel = out.numel()
        room = torch.nn.functional.pad(out, (0, 1))
        room[torch.where(wanted, indices, numel)] += values * scale
        out.copy_(room[:numel])


def _keep_unsent(residual: Tensor | None, c: Tensor, sent: Tensor) -> None:
    """Set the residual to c, with 0 for the numbers that were sent, by a mask, or are not finite."""
    if residual is not None:
        residual.copy_(torch.where(c.isfinite() & ~sent, c, torch.zeros_like(c)))


#: The key of every NaN.
_NAN = 0x7F800001


def _keys(numbers: Tensor) -> Tensor:
    return (numbers.view(torch.int32) & 0x7FFFFFFF).clamp(max=_NAN)


def _at(indices: Tensor, numel: int) -> Tensor:
    """Return a mask of numel numbers, True at the indices."""
    return torch.zeros(numel, dtype=torch.bool, device=indices.device).index_fill_(0, indices, True)


def _largest(numbers: Tensor, k: int) -> Tensor:
    """Return a mask of the k largest keys."""
    return _at(_keys(numbers).sort(descending=True, stable=True).indices[:k], len(numbers))


def topk_encode(values: Tensor, residual: Tensor | None, wire: Tensor, k: int) -> None:
    """Send exactly the k numbers with the largest magnitudes."""
    c = corrected(values, residual)
    sent = _largest(c, k)
    _write_entries(wire, k, c, sent)
    _keep_unsent(residual, c, sent)


def topk_decode(wire: Tensor, out: Tensor, k: int, add: bool, scale: float) -> None:
    _put_entries(out, *_read_entries(wire, k), add, scale)


def dgc_encode(values: Tensor, residual: Tensor, wire: Tensor, k: int, momentum: Tensor, decay: float) -> None:
    """Set momentum = decay * momentum + values, and send topk of momentum + residual.

    Numbers that become 0 in the residual also become 0 in the momentum.
    """
    momentum.copy_(momentum * decay + values)
    c = residual + momentum
    sent = _largest(c, k)
    _write_entries(wire, k, c, sent)
    _keep_unsent(residual, c, sent)
    _keep_unsent(momentum, torch.where(c.isfinite(), momentum, c), sent)


def threshold_encode(
    values: Tensor, residual: Tensor | None, wire: Tensor, k: int, slack: int, tau: Tensor | None
) -> None:
    """Send the m numbers with at least the magnitude `tau` ((1,), float32) if m is k - slack to k + slack; otherwise send topk.

    If tau is None or 0, also send topk.

    Then update tau: if it selected the numbers, multiply it by 1 + (m - k) / (8 k); otherwise set it to the smallest
    magnitude that was sent, or to 0 if that is not finite. The wire begins with the count of sent numbers as int32 and 12
    zero bytes, and has k + slack entries.
    """
    c = corrected(values, residual)
    keys, sent = _keys(c), _largest(c, k)
    if tau is not None and k > 0:
        least = torch.where(sent, keys, _NAN).amin().view(torch.float32)
        reaching = keys >= _keys(tau)
        excess = reaching.sum() - k
        selects = (_keys(tau) > 0) & (excess.abs() <= slack)
        sent = torch.where(selects, reaching, sent)
        adapted = tau * (1 + excess.to(torch.float32) / torch.full_like(tau, 8 * k))
        tau.copy_(torch.where(selects, adapted, torch.where(least.isfinite(), least, 0.0)))
    wire[:16].zero_()
    wire[:4].view(torch.int32).copy_(sent.sum())
    _write_entries(wire[16:], k + slack, c, sent)
    _keep_unsent(residual, c, sent)


def threshold_decode(wire: Tensor, out: Tensor, k: int, slack: int, add: bool, scale: float) -> None:
    indices, values = _read_entries(wire[16:], k + slack)
    places = torch.arange(k + slack, dtype=torch.int32, device=wire.device)
    _put_entries(out, indices, values, add, scale, places < wire[:4].view(torch.int32))


def randomk_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    """Return (k,) indices: divide a ring of n places into k parts, and draw one place from each part.

    u(j) are the 32 random bits of index j. The ring begins at floor(u(k) * n / 2^32), so that every index is drawn with
    the same probability, k / n. Part j is [floor(j * n / k), floor((j + 1) * n / k)). Its element floor(u(j) * length /
    2^32) is drawn.
    """
    random = random_bits(k + 1, seed, device)
    ends = torch.arange(k + 1, device=device, dtype=torch.int64) * n // max(k, 1)
    drawn = ends[:-1] + (random[:-1] * ends.diff() >> 32) + (random[-1] * n >> 32)
    return torch.where(drawn < n, drawn, drawn - n)


def randomk_encode(values: Tensor, residual: Tensor | None, wire: Tensor, k: int, seed: int) -> None:
    """Send the numbers at randomk_indices, in that order. If any number, sent or not, is not finite, send NaN for all."""
    c = corrected(values, residual)
    sent = randomk_indices(len(c), k, seed, c.device)
    wire.zero_()
    wire.view(torch.float32)[:k] = torch.where(c.isfinite().all(), c[sent], float("nan"))
    _keep_unsent(residual, c, _at(sent, len(c)))


def randomk_decode(wire: Tensor, out: Tensor, k: int, seed: int, add: bool, scale: float) -> None:
    _put_entries(out, randomk_indices(len(out), k, seed, out.device), wire.view(torch.float32)[:k], add, scale)


# chunktopk: the largest numbers of every chunk, as 12-bit indices and 2-bit codes.


def _wanted(numel: int, k: int, device: torch.device) -> Tensor:
    """Return (chunks, k): which entries of each chunk are used: all; in a shorter last chunk the same share, rounded up."""
    lengths = (numel - torch.arange(0, numel, CHUNK, dtype=torch.int64, device=device)).clamp(max=CHUNK)
    return torch.arange(k, dtype=torch.int64, device=device) < -(-lengths * k // CHUNK).unsqueeze(1)


def _shifts(device: torch.device) -> Tensor:
    """Return the number of bits before each code in its byte."""
    return torch.arange(0, 8, 2, dtype=torch.int32, device=device)


def _mean(magnitudes: Tensor, wanted: Tensor) -> Tensor:
    """Return (chunks, 1): the mean of the wanted magnitudes (chunks, k), added one after the other; 0 if there are none."""
    total = magnitudes.new_zeros(len(magnitudes))
    for column, is_wanted in zip(magnitudes.unbind(1), wanted.unbind(1), strict=True):
        total = torch.where(is_wanted, total + column, total)
    number = wanted.sum(1)
    return torch.where(number > 0, total / number.clamp(min=1).to(total.dtype), 0).unsqueeze(1)


def _bfloat16(numbers: Tensor) -> Tensor:
    """Return numbers rounded to bfloat16, with the same bits for every NaN."""
    bits = numbers.to(torch.bfloat16).view(torch.int16)
    return torch.where(numbers.isnan(), torch.full_like(bits, 0x7FC0), bits).view(torch.bfloat16)


def _sections(wire: Tensor, chunks: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bytes of indices (chunks, 3k / 2), of codes (chunks, k / 4) and of scales (chunks, 4)."""
    parts, at = [], 0
    for width in (3 * k // 2, k // 4, 4):
        parts.append(wire[at : at + chunks * width].view(chunks, width))
        at += pad16(chunks * width)
    return parts[0], parts[1], parts[2]


def chunktopk_encode(values: Tensor, residual: Tensor | None, wire: Tensor, k: int, seed: int) -> None:
    """Send the k largest magnitudes of every chunk; of equal ones, the first. Send each as its place in the chunk, its
    sign, and whether its magnitude reaches the mean of the magnitudes sent. The scales of a chunk are the mean of the
    magnitudes below that mean and the mean of the others, as bfloat16; both are NaN if a number is not finite.
    """
    wire.zero_()
    numel = values.numel()
    c = corrected(values, residual)
    if numel == 0:
        return
    blocks, wanted = in_blocks(c, CHUNK), _wanted(numel, k, c.device)
    chunks = len(blocks)
    keys = _keys(blocks)
    keys.view(-1)[numel:] = -1
    largest = keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
    unused = CHUNK  # sorts after all places
    places_or_unused = torch.where(wanted, largest, unused).sort(dim=1).values
    places = torch.where(wanted, places_or_unused, 0)
    sent = torch.where(wanted, blocks.gather(1, places), 0)
    mean = _mean(sent.abs(), wanted)
    reaches = wanted & (sent.abs() >= mean)
    scales = torch.cat([_mean(sent.abs(), wanted & ~reaches), _mean(sent.abs(), reaches)], 1)
    scales = _bfloat16(torch.where(mean < float("inf"), scales, float("nan")))
    codes = torch.where(wanted, (sent < 0).to(torch.int32) * 2 + reaches, 0)

    index_bytes, code_bytes, scale_bytes = _sections(wire, chunks, k)
    first, second = places.to(torch.int32)[:, 0::2], places.to(torch.int32)[:, 1::2]
    packed = torch.stack([first & 0xFF, first >> 8 | (second & 0xF) << 4, second >> 4], 2)
    index_bytes.copy_(packed.view(chunks, -1))
    code_bytes.copy_((codes.view(chunks, -1, 4) << _shifts(codes.device)).sum(2))
    scale_bytes.copy_(scales.contiguous().view(torch.uint8).view(chunks, 4))

    if residual is not None:
        decoded = _values(codes, scales)
        lost = torch.where(decoded.isfinite(), sent - decoded, 0)
        kept = torch.nn.functional.pad(torch.where(blocks.isfinite(), blocks, 0), (0, 1))  # room for what is unused
        kept.scatter_(1, places_or_unused, lost)
        residual.copy_(kept[:, :CHUNK].reshape(-1)[:numel])


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers that codes (chunks, k) represent. scales: (chunks, 2) bfloat16."""
    magnitudes = scales.to(torch.float32).gather(1, (codes & 1).to(torch.int64))
    return torch.where(codes >= 2, -magnitudes, magnitudes)


def chunktopk_decode(wire: Tensor, out: Tensor, k: int, add: bool, scale: float) -> None:
    numel = out.numel()
    if numel == 0:
        return
    wanted = _wanted(numel, k, wire.device)
    chunks = len(wanted)
    index_bytes, code_bytes, scale_bytes = _sections(wire, chunks, k)
    triples = index_bytes.to(torch.int64).view(chunks, -1, 3)
    first = triples[:, :, 0] | (triples[:, :, 1] & 0xF) << 8
    second = triples[:, :, 1] >> 4 | triples[:, :, 2] << 4
    places = torch.stack([first, second], 2).view(chunks, k)
    codes = (code_bytes.to(torch.int32).unsqueeze(2) >> _shifts(wire.device) & 3).view(chunks, k)
    scales = scale_bytes.contiguous().view(torch.bfloat16).view(chunks, 2)
    starts = torch.arange(0, numel, CHUNK, device=wire.device, dtype=torch.int64).unsqueeze(1)
    indices, values = (places + starts).view(-1), _values(codes, scales).view(-1)
    _put_entries(out, indices, values, add, scale, wanted.view(-1))
