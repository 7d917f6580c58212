"""The build of gradwire, which all ranks of a job share."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

from gradwire.collectives.errors import LinkError

_PACKAGE = Path(__file__).parents[2]
_BUILD_DIGITS = 12

#: The room for a build in a handshake.
BUILD_BYTES = 96


@cache
def build() -> str:
    """Return the version of gradwire, a digest of its sources, and the byte order of this process.

    The sources define the layout of everything that ranks send each other or share: headers, programs, codes, records, shared
    memory, commits. So there is no list of layouts, which could be incomplete."""
    version = import_module(__name__.partition(".")[0]).__version__
    found = hashlib.sha256()
    for source in sorted(each for room in ("collectives", "trainer") for each in (_PACKAGE / room).rglob("*")):
        place = source.relative_to(_PACKAGE)
        if source.suffix in (".py", ".cu", ".cuh") and not any(
            part.startswith(".") for part in place.parts
        ):  # such as editors' copies
            content = source.read_bytes()
            found.update(f"{place} {len(content)}\n".encode() + content)
    return f"gradwire {version}, sources {found.hexdigest()[:_BUILD_DIGITS]}, {sys.byteorder}-endian"


class OtherBuild(LinkError):
    """An authenticated rank runs another build of gradwire."""

    def __init__(self, rank: int, one: str, peer: int, other: str) -> None:
        both = f"rank {peer} runs {other}, and rank {rank} {one}"
        detail = f"{both}: install the same version of gradwire on all hosts"
        super().__init__(peer, timed_out=False, detail=detail, awaited={rank, peer})


def other_build(rank: int, peer: int, name: str) -> OtherBuild | None:
    """Return the error for a verified peer with another build of gradwire; None if it runs the same. name: its build, of at most
    BUILD_BYTES characters."""
    return None if name == build()[:BUILD_BYTES] else OtherBuild(rank, build(), peer, name)
