"""How many cores a process may use: its affinity, and the quotas of cgroups of both versions."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from gradwire.collectives import cores

_V2 = "0::{path}", "30 23 0:26 {root} {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
_V1 = "4:cpu,cpuacct:{path}", "30 23 0:26 {root} {mount} rw master:7 - cgroup cgroup rw,cpu,cpuacct"
_OTHERS = (
    "8:memory:/elsewhere\n1:name=systemd:/elsewhere",
    "31 30 0:27 / /nowhere rw - cgroup cgroup rw,memory\n32 1 0:1 / / rw,relatime shared:1 - ext4 /dev/sda rw",
)


def _process(tmp_path: Path, kind: tuple[str, str], path: str, root: str, limits: Mapping[str, str]) -> Path:
    """Return a folder like /proc/self of a process in the cgroup `path`. kind: _V1 or _V2. root: the cgroup that is mounted.
    limits: the contents of files in the mounted folder."""
    process, mount = tmp_path / "process", tmp_path / "cgroup"
    for file, text in limits.items():
        (mount / file).parent.mkdir(parents=True, exist_ok=True)
        (mount / file).write_text(text + "\n")
    process.mkdir()
    cgroup, mounted = (line.format(path=path, root=root, mount=mount) for line in kind)
    (process / "cgroup").write_text(f"{_OTHERS[0]}\n{cgroup}\n")
    (process / "mountinfo").write_text(f"{_OTHERS[1]}\n{mounted}\n")
    return process


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({"job/rank/cpu.max": "200000 100000"}, 2.0),
        ({"job/rank/cpu.max": "50000 100000"}, 0.5),
        ({"job/rank/cpu.max": "max 100000"}, math.inf),
        ({"job/rank/cpu.max": "300000 100000", "job/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 1.5),
        ({"job/rank/cpu.max": "100000 100000", "job/cpu.max": "400000 100000"}, 1.0),
        ({"job/rank/cpu.max": "max 100000", "cpu.max": "30000 10000"}, 3.0),
        ({"other/cpu.max": "100000 100000"}, math.inf),
        ({"job/rank/cpu.max": "", "job/cpu.max": "nonsense"}, math.inf),
        ({"job/rank/cpu.max": "100000 0"}, math.inf),
    ],
)
def test_cgroups_of_version_2_limit_the_cores(tmp_path: Path, limits: Mapping[str, str], wanted: float) -> None:
    assert cores.quota(_process(tmp_path, _V2, "/job/rank", "/", limits)) == wanted


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({"job/rank": ("200000", "100000")}, 2.0),
        ({"job/rank": ("-1", "100000")}, math.inf),
        ({"job/rank": ("-1", "100000"), "job": ("25000", "50000")}, 0.5),
        ({"job/rank": ("300000", "100000"), "job": ("400000", "100000")}, 3.0),
        ({"other": ("100000", "100000")}, math.inf),
    ],
)
def test_cgroups_of_version_1_limit_the_cores(
    tmp_path: Path, limits: Mapping[str, tuple[str, str]], wanted: float
) -> None:
    files = {f"{cgroup}/cpu.cfs_quota_us": quota for cgroup, (quota, _) in limits.items()}
    files |= {f"{cgroup}/cpu.cfs_period_us": period for cgroup, (_, period) in limits.items()}
    assert cores.quota(_process(tmp_path, _V1, "/job/rank", "/", files)) == wanted


@pytest.mark.parametrize("kind", [_V1, _V2])
@pytest.mark.parametrize(
    ("path", "root", "wanted"),
    [
        ("/docker/1234", "/docker/1234", 2.0),  # a container sees its cgroup as the root of the mount
        ("/docker/1234/job", "/docker/1234", 0.5),
        ("/docker/12345", "/docker/1234", math.inf),  # another container's cgroup, which limits nothing here
    ],
)
def test_only_cgroups_of_the_process_limit_it(
    tmp_path: Path, kind: tuple[str, str], path: str, root: str, wanted: float
) -> None:
    whole, part = {_V1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), _V2: ("cpu.max", None)}[kind]
    if part is None:
        limits = {whole: "200000 100000", f"job/{whole}": "50000 100000"}
    else:
        limits = {whole: "200000", part: "100000", f"job/{whole}": "50000", f"job/{part}": "100000"}
    assert cores.quota(_process(tmp_path, kind, path, root, limits)) == wanted


def test_missing_or_foreign_files_do_not_limit(tmp_path: Path) -> None:
    assert cores.quota(tmp_path / "missing") == math.inf
    (tmp_path / "cgroup").write_bytes(b"0::\xff\n\nno line of this kind\n0::/job\n")
    assert cores.quota(tmp_path) == math.inf
    (tmp_path / "mountinfo").write_bytes(b"\xff - cgroup2\n30 23 0:26 / /nowhere rw - cgroup2 cgroup2\n")
    assert cores.quota(tmp_path) == math.inf


@pytest.mark.parametrize(
    ("affinity", "quota", "available", "short_for"),
    [
        (4, math.inf, 4.0, {1: False, 4: False, 8: False}),
        (2, 8.0, 2.0, {2: False, 8: False}),
        (8, 2.0, 2.0, {1: False, 2: False, 3: True, 8: True, 16: True}),
        (2, 1.5, 1.5, {1: False, 2: True}),
        (1, 0.5, 0.5, {1: True, 4: True}),
        (2, 2.0, 2.0, {4: False}),
    ],
)
def test_the_least_of_affinity_and_quota_is_available(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    affinity: int,
    quota: float,
    available: float,
    short_for: Mapping[int, bool],
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    limit = "max 1000" if quota == math.inf else f"{int(1000 * quota)} 1000"
    process = _process(tmp_path, _V2, "/job", "/", {"job/cpu.max": limit})
    assert cores.available(process) == available
    assert {ranks: cores.quota_is_short(ranks, process) for ranks in short_for} == short_for


def test_a_quota_may_change_while_the_process_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = _process(tmp_path, _V2, "/", "/", {"cpu.max": "50000 100000"})
    assert cores.available(process) == 0.5
    (tmp_path / "cgroup" / "cpu.max").write_text("25000 100000")
    later = time.monotonic() + 10
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: later)
        assert cores.available(process) == 0.25
