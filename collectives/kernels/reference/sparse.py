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


def write_entries(wire: Tensor, entries: int, indices: Tensor, values: Tensor) -> None:
    """Write indices and values into a wire that has room for `entries` entries."""
    wire.zero_()
    section = pad16(4 * entries)
    wire[:section].view(torch.int32)[: len(indices)] = indices.to(torch.int32)
    wire[section:].view(torch.float32)[: len(values)] = _one_nan(values)


def read_entries(wire: Tensor, entries: int, count: int) -> tuple[Tensor, Tensor]:
    section = pad16(4 * entries)
    return wire[:section].view(torch.int32)[:count].to(torch.int64), wire[section:].view(torch.float32)[:count]


def put_entries(out: Tensor, indices: Tensor, values: Tensor, add: bool, scale: float) -> None:
    if not add:
        out.zero_()
    out[indices] += values * scale


def keep_unsent(residual: Tensor | None, c: Tensor, sent: Tensor) -> None:
    """Set the residual to c, with 0 for the numbers that were sent or are not finite."""
    if residual is not None:
        residual.copy_(torch.where(c.isfinite(), c, torch.zeros_like(c)))
        residual[sent] = 0


#: The key of every NaN.
_NAN = 0x7F800001


def _keys(numbers: Tensor) -> Tensor:
    return (numbers.view(torch.int32) & 0x7FFFFFFF).clamp(max=_NAN)


def _largest(numbers: Tensor, k: int) -> Tensor:
    """Return the (k,) indices of the k largest keys, ascending."""
    return _keys(numbers).sort(descending=True, stable=True).indices[:k].sort().values


def topk_encode(values: Tensor, residual: Tensor | None, wire: Tensor, k: int) -> None:
    """Send exactly the k numbers with the largest magnitudes."""
    c = corrected(values, residual)
    sent = _largest(c, k)
    write_entries(wire, k, sent, c[sent])
    keep_unsent(residual, c, sent)


def topk_decode(wire: Tensor, out: Tensor, k: int, add: bool, scale: float) -> None:
    put_entries(out, *read_entries(wire, k, k), add, scale)


def dgc_encode(values: Tensor, residual: Tensor, wire: Tensor, k: int, momentum: Tensor, decay: float) -> None:
    """Set momentum = decay * momentum + values, and send topk of momentum + residual.

    Numbers that become 0 in the residual also become 0 in the momentum.
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
    """Send the m numbers with at least the magnitude `tau` ((1,), float32) if m is k - slack to k + slack; otherwise send topk.

    If tau is None or 0, also send topk.

    Then update tau: if it selected the numbers, multiply it by 1 + (m - k) / (8 k); otherwise set it to the smallest
    magnitude that was sent, or to 0 if that is not finite. The wire begins with the count of sent numbers as int32 and 12
    zero bytes, and has k + slack entries.
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
    wire[:16].view(torch.int32).copy_(torch.tensor([len(sent), 0, 0, 0], dtype=torch.int32, device="cpu"))
    write_entries(wire[16:], k + slack, sent, c[sent])
    keep_unsent(residual, c, sent)


def threshold_decode(wire: Tensor, out: Tensor, k: int, slack: int, add: bool, scale: float) -> None:
    put_entries(out, *read_entries(wire[16:], k + slack, int(wire[:4].view(torch.int32))), add, scale)


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
    wire.view(torch.float32)[:k] = (
        c[sent] if c.isfinite().all() else torch.full((k,), float("nan"), device=c.device, dtype=torch.float32)
    )
    keep_unsent(residual, c, sent)


def randomk_decode(wire: Tensor, out: Tensor, k: int, seed: int, add: bool, scale: float) -> None:
    put_entries(out, randomk_indices(len(out), k, seed, out.device), wire.view(torch.float32)[:k], add, scale)


# chunktopk: the largest numbers of every chunk, as 12-bit indices and 2-bit codes.


def _counts(numel: int, k: int) -> Tensor:
    """Return (chunks,): how many numbers of each chunk are sent: k; in a shorter last chunk the same share, rounded up."""
    lengths = torch.full((-(-numel // CHUNK),), CHUNK, dtype=torch.int64, device="cpu")
    if numel % CHUNK:
        lengths[-1] = numel % CHUNK
    return -(-lengths * k // CHUNK)


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
    blocks, counts = in_blocks(c, CHUNK), _counts(numel, k)
    chunks = len(blocks)
    keys = _keys(blocks)
    keys.view(-1)[numel:] = -1
    largest = keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
    unused = CHUNK  # sorts after all places
    wanted = torch.arange(k, dtype=torch.int64, device="cpu") < counts.unsqueeze(1)
    places = torch.where(wanted.to(largest.device), largest, unused).sort(dim=1).values
    wanted = places < unused
    places = torch.where(wanted, places, 0)
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
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=codes.device)
    code_bytes.copy_((codes.view(chunks, -1, 4) << shifts).sum(2))
    scale_bytes.copy_(scales.contiguous().view(torch.uint8).view(chunks, 4))

    if residual is not None:
        decoded = _values(codes, scales)
        lost = torch.where(decoded.isfinite(), sent - decoded, 0)
        kept = torch.where(blocks.isfinite(), blocks, 0)
        rows = torch.arange(chunks, device=places.device, dtype=torch.int64).unsqueeze(1).expand_as(places)
        kept[rows[wanted], places[wanted]] = lost[wanted]
        residual.copy_(kept.view(-1)[:numel])


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers that codes (chunks, k) represent. scales: (chunks, 2) bfloat16."""
    magnitudes = scales.to(torch.float32).gather(1, (codes & 1).to(torch.int64))
    return torch.where(codes >= 2, -magnitudes, magnitudes)


def chunktopk_decode(wire: Tensor, out: Tensor, k: int, add: bool, scale: float) -> None:
    numel = out.numel()
    if numel == 0:
        return
    counts = _counts(numel, k)
    index_bytes, code_bytes, scale_bytes = _sections(wire, len(counts), k)
    triples = index_bytes.to(torch.int64).view(len(counts), -1, 3)
    first = triples[:, :, 0] | (triples[:, :, 1] & 0xF) << 8
    second = triples[:, :, 1] >> 4 | triples[:, :, 2] << 4
    places = torch.stack([first, second], 2).view(len(counts), k)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=wire.device)
    codes = (code_bytes.to(torch.int32).unsqueeze(2) >> shifts & 3).view(len(counts), k)
    scales = scale_bytes.contiguous().view(torch.bfloat16).view(len(counts), 2)
    wanted = (torch.arange(k, dtype=torch.int64, device="cpu") < counts.unsqueeze(1)).to(wire.device)
    starts = torch.arange(len(counts), device=wire.device, dtype=torch.int64).unsqueeze(1) * CHUNK
    put_entries(out, (places + starts)[wanted], _values(codes, scales)[wanted], add, scale)
