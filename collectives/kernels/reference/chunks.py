"""The codec chunktopk: of every chunk of numbers the largest, as indices of 12 bits and values of 2."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference.blocks import corrected, in_blocks
from gradwire.collectives.kernels.reference.entries import put_entries
from gradwire.collectives.kernels.wire import pad16

CHUNK = 4096
_NAN = 0x7F800001


def _counts(numel: int, k: int) -> Tensor:
    """Return (chunks,): how many numbers of each chunk are sent, k of CHUNK, rounded up where the last one is shorter."""
    lengths = torch.full((-(-numel // CHUNK),), CHUNK)
    if numel % CHUNK:
        lengths[-1] = numel % CHUNK
    return -(-lengths * k // CHUNK)


def _mean(magnitudes: Tensor, wanted: Tensor) -> Tensor:
    """Return (chunks, 1): the mean of the magnitudes (chunks, k) that are wanted, summed one after the other; 0 of none."""
    total = magnitudes.new_zeros(len(magnitudes))
    for column, is_wanted in zip(magnitudes.unbind(1), wanted.unbind(1), strict=True):
        total = torch.where(is_wanted, total + column, total)
    number = wanted.sum(1)
    return torch.where(number > 0, total / number.clamp(min=1).to(total.dtype), 0).unsqueeze(1)


def _bfloat16(numbers: Tensor) -> Tensor:
    """Return numbers rounded to bfloat16, all NaN alike."""
    bits = numbers.to(torch.bfloat16).view(torch.int16)
    return torch.where(numbers.isnan(), torch.full_like(bits, 0x7FC0), bits).view(torch.bfloat16)


def _sections(wire: Tensor, chunks: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bytes of indices (chunks, 3k / 2), of codes (chunks, k / 4) and of scales (chunks, 4)."""
    parts, at = [], 0
    for width in (3 * k // 2, k // 4, 4):
        parts.append(wire[at : at + chunks * width].view(chunks, width))
        at += pad16(chunks * width)
    return parts[0], parts[1], parts[2]


def chunktopk_encode(values: Tensor, residual: Tensor | None, wire: Tensor, k: int) -> None:
    """Send the k largest magnitudes of every chunk, of equal ones those that come first: each as its place in the chunk,
    its sign, and whether it reaches the mean magnitude of those that are sent. The scales are the mean magnitudes of
    those that do not and of those that do, as bfloat16; both are NaN where a number is not finite.
    """
    wire.zero_()
    numel = values.numel()
    c = corrected(values, residual)
    if numel == 0:
        return
    blocks, counts = in_blocks(c, CHUNK), _counts(numel, k)
    chunks = len(blocks)
    keys = (blocks.view(torch.int32) & 0x7FFFFFFF).clamp(max=_NAN)
    keys.view(-1)[numel:] = -1
    largest = keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
    unused = CHUNK  # what sorts behind all places
    wanted = torch.arange(k) < counts.unsqueeze(1)
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
        rows = torch.arange(chunks, device=places.device).unsqueeze(1).expand_as(places)
        kept[rows[wanted], places[wanted]] = lost[wanted]
        residual.copy_(kept.view(-1)[:numel])


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return what codes (chunks, k) stand for. scales: (chunks, 2) bfloat16."""
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
    wanted = (torch.arange(k) < counts.unsqueeze(1)).to(wire.device)
    starts = torch.arange(len(counts), device=wire.device).unsqueeze(1) * CHUNK
    put_entries(out, (places + starts)[wanted], _values(codes, scales)[wanted], add, scale)
