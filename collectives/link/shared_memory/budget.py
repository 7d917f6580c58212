"""How much memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class _Names(NamedTuple):
    """Where one version of cgroups has its folders and, in each, what of memory."""

    mount: str
    limit: str
    usage: str
    files: tuple[str, str]  # in memory.stat: pages of files, which are given up when memory is wanted


_V1 = _Names(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Names("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))


def memory_left(root: Path = Path("/")) -> int:
    """Return how many bytes the machine could give out now; fewer where a cgroup, this process's or one around it, allows fewer.

    root: the folder that has proc and sys. Raises OSError where they cannot be read.
    """
    machine = int(_fields(root / "proc/meminfo")["MemAvailable:"]) * 1024
    return max(0, min([machine, *_left_in_cgroups(root)]))


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yield what each cgroup around this process leaves it. One that is not to be seen from here does not count."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _V1 if controllers else _V2
        group = PurePosixPath(path).relative_to("/")
        for folder in (group, *group.parents) if ".." not in group.parts else [PurePosixPath()]:
            with suppress(OSError):
                yield from _left(root / names.mount / folder, names)


def _left(folder: Path, names: _Names) -> Iterator[int]:
    limit = (folder / names.limit).read_text().strip()
    if limit != "max":
        statistics = _fields(folder / "memory.stat")
        reclaimable = sum(int(statistics.get(name, 0)) for name in names.files)
        yield int(limit) - int((folder / names.usage).read_text()) + reclaimable


def _fields(file: Path) -> dict[str, str]:
    """Return the second word of each line, by the first."""
    return {words[0]: words[1] for words in map(str.split, file.read_text().splitlines())}
