"""Hashes of tensors and of other values, bit for bit: a NaN's payload counts, and so does the sign of zero."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from collectives.kernels.reference import hashing as reference
from trainer.gradients.dtensors import held_here

_WORD = 8


@torch.no_grad()
def hash_of(value: Any) -> int:
    """Return 64 bits that stand for what this rank holds of a tensor, or for another value as repr() shows it.

    Of a tensor that is the hash of its bytes, in logical order whatever the strides, by
    collectives.kernels.reference.hashing; bytes that fill no word are one with zeros behind. Its dtype, shape and
    device do not count. Raises TypeError for a sparse one.
    """
    if not isinstance(value, Tensor):
        value = torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8)
    value = held_here(value).detach()
    if value.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {value.layout} has no hash; dense ones have")
    data = value.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // _WORD * _WORD
    words = data[:whole]
    if words.data_ptr() % _WORD or words.storage_offset() % _WORD:
        words = words.clone()
    found = _hash_words(words.view(torch.int64), 1)
    if whole == data.numel():
        return found
    rest = data.new_zeros(_WORD)
    rest[: data.numel() - whole] = data[whole:]
    return (found + _hash_words(rest.view(torch.int64), whole // _WORD + 1)) % 2**64


def _hash_words(words: Tensor, place: int) -> int:
    compiled = _compiled() if words.is_cpu else None
    number: int = (compiled or reference).hash_words(words, place)
    return number


@cache
def _compiled() -> ModuleType | None:
    """Return the compiled twin of the reference; None where there is no Numba."""
    try:
        from collectives.kernels.cpu import hashing
    except ImportError:
        return None
    return hashing
