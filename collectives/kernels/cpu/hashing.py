"""A 64-bit hash of memory: see gradwire.collectives.kernels.reference.hashing."""

from __future__ import annotations

from gradwire.collectives.kernels.cpu.calling import kernel_of
from gradwire.collectives.kernels.cpu.deferred import uint64
from gradwire.collectives.kernels.cpu.intrinsics import uint64_at


def _hash_words(words, count, place):
    w = uint64_at(words)
    total = uint64(0)
    for i in range(count):
        x = w[i] ^ (uint64(i + place) * uint64(0x9E3779B97F4A7C15))
        x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
        total += x ^ (x >> uint64(31))
    return total


def hash_words(words, place=1):
    return kernel_of(_hash_words).call(words.data_ptr(), words.numel(), place) % 2**64
