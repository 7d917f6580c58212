"""How much memory is left, by the files in which Linux says so."""

from pathlib import Path

import pytest

from gradwire.collectives.transports.shared_memory.segment import memory_left

MIB = 1 << 20
MACHINE = 1000 * MIB


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root of a machine that has MACHINE left."""
    write(tmp_path, {"proc/meminfo": f"MemTotal: 9999999 kB\nMemAvailable: {MACHINE // 1024} kB\nHugePages_Total: 0"})
    return tmp_path


def v2(limit: int | str, usage: int, files: int = 0) -> dict[str, str]:
    """A cgroup's files; of what is used, twice `files` can be given up."""
    return {
        "memory.max": str(limit),
        "memory.current": str(usage),
        "memory.stat": f"anon 5\nshmem 77\ninactive_file {files}\nactive_file {files}",
    }


def v1(limit: int, usage: int, files: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": str(limit),
        "memory.usage_in_bytes": str(usage),
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {files}\ntotal_active_file {files}",
    }


def within(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()}


def test_a_machine_without_cgroups(machine: Path) -> None:
    assert memory_left(machine) == MACHINE


@pytest.mark.parametrize(
    ("own", "around", "left"),
    [
        (v2("max", 5 * MIB), v2("max", 6 * MIB), MACHINE),
        (v2(300 * MIB, 100 * MIB), v2("max", 0), 200 * MIB),
        (v2("max", 0), v2(300 * MIB, 100 * MIB), 200 * MIB),
        (v2(300 * MIB, 100 * MIB), v2(250 * MIB, 100 * MIB), 150 * MIB),
        (v2(300 * MIB, 290 * MIB, files=20 * MIB), v2("max", 0), 50 * MIB),
        (v2(300 * MIB, 310 * MIB), v2("max", 0), 0),
        (v2(5000 * MIB, 0), v2("max", 0), MACHINE),
    ],
)
def test_the_tightest_cgroup_decides(machine: Path, own: dict[str, str], around: dict[str, str], left: int) -> None:
    write(machine, {"proc/self/cgroup": "0::/job/step", **within("job/step", own), **within("job", around)})
    assert memory_left(machine) == left


def test_the_first_version_of_cgroups(machine: Path) -> None:
    unlimited = v1(9223372036854771712, 800 * MIB)
    write(machine, {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job/step\n0::/"})
    write(machine, within("memory", unlimited) | within("memory/job/step", unlimited))
    assert memory_left(machine) == MACHINE
    write(machine, within("memory/job", v1(300 * MIB, 290 * MIB, files=20 * MIB)))
    assert memory_left(machine) == 50 * MIB


@pytest.mark.parametrize("path", ["/", "/../../elsewhere", "/docker/1234"])
def test_a_container_sees_its_own_limit_at_the_top(machine: Path, path: str) -> None:
    """Whatever its path is called outside."""
    write(machine, {"proc/self/cgroup": f"4:memory:{path}", **within("memory", v1(300 * MIB, 100 * MIB))})
    assert memory_left(machine) == 200 * MIB
