"""The hosts of a job, and the ranks on each."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A host of a job. slots: the largest number of its ranks. is_here: whether it is this host."""

    name: str
    slots: int
    is_here: bool


def parse_hosts(text: str) -> dict[str, int]:
    """Return the slots of each host in 'a:2,b:2'; a host without a number has one. Raises ValueError."""
    return _slots(part.strip() for part in text.split(","))


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the slots of each host in a file with one host a line: 'a slots=2', 'a:2' or 'a'; '#' begins a comment.

    Raises ValueError if the file cannot be read, has other lines, or names no host.
    """
    try:
        lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
        return _slots(re.sub(r"\s+slots\s*=\s*", ":", line) for line in lines if line)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the hosts in {path}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def place(ranks: int | None, slots: dict[str, int]) -> list[Host]:
    """Return the hosts that get ranks. Each host in turn gets as many ranks as it has slots. All names of this host count as
    one host.

    ranks: the number of ranks; None: the number of slots. Raises ValueError if there are more ranks than slots.
    """
    total = sum(slots.values())
    ranks = total if ranks is None else ranks
    if ranks < 1:
        raise ValueError(f"-np must be at least 1, not {ranks}")
    if ranks > total:
        listed = ",".join(f"{name}:{number}" for name, number in slots.items())
        raise ValueError(
            f"-np {ranks} is more than the {total} slots of {listed}: give hosts more slots, or start fewer ranks"
        )
    own = {*_LOOPBACK, socket.gethostname(), socket.gethostname().partition(".")[0]}
    merged: dict[str, int] = {}
    here = next((name for name in slots if name in own), None)
    for name, number in slots.items():
        same = here if name in own and here is not None else name
        merged[same] = merged.get(same, 0) + number
    hosts: list[Host] = []
    for name, number in merged.items():
        taken = min(number, ranks - sum(host.slots for host in hosts))
        hosts += [Host(name, taken, name in own)] if taken else []
    return hosts


def _slots(entries: Iterable[str]) -> dict[str, int]:
    """Return the slots of each host. If a host is named several times, its slots are added."""
    slots: dict[str, int] = {}
    for entry in entries:
        match = re.fullmatch(r"(\[[^\]\s]+\]|[^\s:\[\]-][^\s:\[\]]*)(?::(\d+))?", entry)
        if match is None or (match[2] is not None and int(match[2]) < 1):
            raise ValueError(f"{entry!r} is not a host: write HOST:SLOTS, with at least one slot, as in node01:2")
        name = match[1].strip("[]")
        slots[name] = slots.get(name, 0) + int(match[2] or 1)
    if not slots:
        raise ValueError("it contains no host")
    return slots
