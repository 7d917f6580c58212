"""Text that users write: message sizes (8, 4K, 32M, 1G, in powers of 1024), and names of codecs, algorithms and links."""

from __future__ import annotations

import re
from collections.abc import Iterable

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Return bytes: "4K" -> 4096, "1.5M" -> 1572864.

    Raises ValueError for anything but a number, optionally followed by K, M or G, that is a whole number of bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    if match is None:
        raise ValueError(f"size {text!r} is not a number, optionally followed by K, M or G")
    nbytes = float(match[1]) * _UNITS[match[2]]
    if nbytes != int(nbytes):
        raise ValueError(f"size {text!r} is not a whole number of bytes")
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """Return the shortest exact notation that `parse_size` reads back: 4096 -> "4K", 1000 -> "1000"."""
    unit = next(
        unit for unit in reversed(_UNITS) if not unit or (nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0)
    )
    return f"{nbytes // _UNITS[unit]}{unit}"


def check_name(kind: str, name: object, taken: Iterable[str]) -> None:
    """Raise ValueError unless `name` is a word in lower case that is not taken yet."""
    article = "an" if kind[0] in "aeiou" else "a"
    if not isinstance(name, str) or re.fullmatch("[a-z][a-z0-9_]*", name) is None:
        raise ValueError(
            f"the name of {article} {kind} must be lower-case letters, digits and underscores, not {name!r}"
        )
    if name in taken:
        raise ValueError(f"{article} {kind} called {name!r} exists already; taken are {', '.join(taken)}")
