"""How many processor cores this process may use: the least of its affinity and of the quotas of its cgroups."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath

#: The kernel's files about this process.
_PROCESS = Path("/proc/self")

#: A line of /proc/PID/cgroup: the controllers, none for cgroup v2, and the path of the process's cgroup.
_CGROUP = re.compile(r"^\d+:([^:\n]*):(/.*)$", re.MULTILINE)

#: A line of /proc/PID/mountinfo: the cgroup that is mounted, where, the type of the file system, and its options.
_MOUNT = re.compile(r"^\S+ \S+ \S+ (/\S*) (/\S*) .* - (cgroup2?) \S+ (\S+)$", re.MULTILINE)

#: How long a quota that has been read counts. Reading takes some tenths of a millisecond, which waits must not spend often, and a
#: quota changes rarely, such as when Kubernetes resizes a pod.
_QUOTA_LASTS_S = 10.0


def available(process: Path = _PROCESS) -> float:
    """Return the number of cores that this process and the other processes of its container may use together: its affinity, or
    the quota of its cgroups if that is less.

    The number may be a fraction, such as 1.5. It can change while the process runs. A change of the affinity counts at once, a
    change of a quota after at most 10 seconds. If the ranks of a host share a container, they share these cores. process: see
    quota().
    """
    return min(_affinity(), _limit_lately(process))


def suffice(ranks: int, threads: int) -> bool:
    """Return whether there is a core for each of so many threads of each of `ranks` processes of this host."""
    return available() >= ranks * threads


def quota_is_short(ranks: int, process: Path = _PROCESS) -> bool:
    """Return whether `ranks` processes that never sleep use up the quota. Then a wait must soon sleep: a core that it yields
    counts as used, and when the quota is used up, the kernel stops all processes of the container for the rest of a period,
    which is usually 100 ms. process: see quota()."""
    limit = _limit_lately(process)
    return limit < ranks and limit < _affinity()


def quota(process: Path = _PROCESS) -> float:
    """Return the number of cores that the cgroups of this process, and the cgroups around them, allow; infinity without a limit.

    Both versions of cgroups count. What cannot be read does not limit. process: the folder of /proc about the process.
    """
    return min(map(_limit, _folders(process)), default=math.inf)


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _limit_lately(process: Path) -> float:
    """Return the quota, as it was at most 10 seconds ago."""
    return _quota_of(process, int(time.monotonic() // _QUOTA_LASTS_S))


@lru_cache(maxsize=1)
def _quota_of(process: Path, _period: int) -> float:
    return quota(process)


def _folders(process: Path) -> Iterator[Path]:
    """Yield the folders of the process's cgroups that can limit its cores, and of their parents, as far as they are mounted."""
    cgroups: dict[str, PurePosixPath] = {}
    for controllers, path in _CGROUP.findall(_text(process / "cgroup")):
        if not controllers or "cpu" in controllers.split(","):
            cgroups["cgroup" if controllers else "cgroup2"] = PurePosixPath(path)
    for root, mount, kind, options in _MOUNT.findall(_text(process / "mountinfo")):
        if kind == "cgroup" and "cpu" not in options.split(","):
            continue
        if kind in cgroups and cgroups[kind].is_relative_to(root):
            folder = Path(mount, cgroups[kind].relative_to(root))
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(mount))


def _limit(folder: Path) -> float:
    """Return the number of cores that one cgroup allows: cpu.max holds the quota and the period, in version 1 two files do."""
    text = _text(folder / "cpu.max") or _text(folder / "cpu.cfs_quota_us") + _text(folder / "cpu.cfs_period_us")
    with suppress(ValueError, ZeroDivisionError):  # the quota is "max", or a file is missing
        used, period = map(int, text.split())
        if used > 0:  # -1 is no limit
            return used / period
    return math.inf


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""
