"""The build of gradwire that a process runs: what must be equal on all ranks before they exchange anything else."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

_PACKAGE = Path(__file__).parents[2]
_ROOMS = ("collectives", "trainer")
_SUFFIXES = (".py", ".cu", ".cuh")
_DIGITS = 12


@cache
def build() -> str:
    """Return the version of gradwire, a digest of its sources, and the byte order of this process.

    The sources define the layout of everything that ranks send each other or share: headers, programs, codes, records, shared
    memory, commits. So there is no list of layouts, which could be incomplete."""
    version = import_module(__name__.partition(".")[0]).__version__
    found = hashlib.sha256()
    for source in sorted(each for room in _ROOMS for each in (_PACKAGE / room).rglob("*")):
        place = source.relative_to(_PACKAGE)
        if source.suffix in _SUFFIXES and not any(
            part.startswith(".") for part in place.parts
        ):  # such as editors' copies
            content = source.read_bytes()
            found.update(f"{place} {len(content)}\n".encode() + content)
    return f"gradwire {version}, sources {found.hexdigest()[:_DIGITS]}, {sys.byteorder}-endian"


def difference(rank: int, one: str, peer: int, other: str) -> str:
    """Return the error text for two ranks with different builds."""
    return f"rank {peer} runs {other}, and rank {rank} {one}: install the same version of gradwire on all hosts"
