"""Memory that the processes of one host share, in anonymous files, and the amount of memory that is available."""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch

_MAP_SHARED, _MAP_POPULATE = 0x01, 0x8000
_PROT_READ, _PROT_WRITE = 0x1, 0x2

#: For each version of cgroups: its folder, the files with the limit and the usage of memory, and the prefix in
#: memory.stat of the counters of file pages, which the kernel reclaims when memory is needed.
_CGROUPS_1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_CGROUPS_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Segment:
    """A block of memory, zero at first, of `nbytes` bytes at `address`: the same memory in every process that opens it.

    It is an anonymous file (memfd) of mode 0600 in no directory, which exists until no process maps it any more. Its
    pages are reserved when it is made, and it cannot shrink, so no access ends in SIGBUS. Other processes open it
    through its maker's /proc entry, which the kernel shows only to the same user.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor: int | None = descriptor
        self.nbytes = nbytes
        address = _libc.mmap(None, nbytes, _PROT_READ | _PROT_WRITE, _MAP_SHARED | _MAP_POPULATE, descriptor, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            os.close(descriptor)
            raise OSError(number, f"cannot map {nbytes} bytes of shared memory: {os.strerror(number)}")
        self.address: int | None = address

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """Return a new segment. name: unguessable; open() checks it. Raises OSError if there is too little memory."""
        return cls(_reserve(name, nbytes), nbytes)

    @staticmethod
    @contextmanager
    def offered(nbytes: int) -> Iterator[dict[str, Any]]:
        """Yield a card with which processes, this one included, take() a new segment inside. If the memory cannot be reserved,
        the card has the reason."""
        name = f"gradwire-{secrets.token_hex(16)}"
        try:
            descriptor = _reserve(name, nbytes)
        except OSError as error:
            yield {"why": str(error)}
            return
        try:
            yield {"pid": os.getpid(), "descriptor": descriptor, "name": name}
        finally:
            os.close(descriptor)

    @classmethod
    def take(cls, card: Mapping[str, Any], nbytes: int) -> Segment:
        """Map the segment of a card that offered() yields. Raises OSError if the card contains a reason instead
        of a segment, or this process cannot open the segment."""
        if "why" in card:
            raise OSError(card["why"])
        return cls.open(card["pid"], card["descriptor"], card["name"], nbytes)

    @classmethod
    def open(cls, pid: int, descriptor: int, name: str, nbytes: int) -> Segment:
        """Map the segment that process `pid` created as `descriptor`. Raises OSError if this process cannot open it."""
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            found = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise OSError(
                error.errno, f"this process cannot see process {pid} or its memory (another PID namespace?)"
            ) from error
        target = os.readlink(f"/proc/self/fd/{found}")  # of the opened file: the number may have been used again
        if target != f"/memfd:{name} (deleted)":
            os.close(found)
            raise OSError(f"{path} is {target}, not the segment {name}")
        segment = cls(found, nbytes)
        segment.seal_off()
        return segment

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, when_gone: Callable[..., object], *arguments: Any
    ) -> torch.Tensor:
        """Return all of the segment as a tensor. when_gone: called with these arguments when the tensor's memory is no
        longer used, but not at the end of the process."""
        assert self.address is not None
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        weakref.finalize(memory, when_gone, *arguments).atexit = False
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def seal_off(self) -> None:
        """Close the descriptor, through which other processes open the segment."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def close(self) -> None:
        """Close the descriptor and unmap the segment. Calling it again does nothing."""
        self.seal_off()
        if self.address is not None:
            _libc.munmap(self.address, self.nbytes)
            self.address = None


def _reserve(name: str, nbytes: int) -> int:
    """Return the descriptor of a new anonymous file. Raises OSError if there is too little memory."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, f"cannot reserve {nbytes} bytes of shared memory: {error.strerror}") from error
    return descriptor


def memory_left(root: Path = Path("/")) -> int:
    """Return the available memory of the machine in bytes, or less if the process's cgroup or one above it allows less.

    root: the folder that contains proc and sys. Raises OSError if proc/meminfo cannot be read.
    """
    machine = int(_fields(root / "proc/meminfo")["MemAvailable:"]) * 1024
    return max(0, min([machine, *_left_in_cgroups(root)]))


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yield the bytes that this process's cgroup, and each one above it, leaves, if they can be read."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit_name, usage_name, prefix = _CGROUPS_1 if controllers else _CGROUPS_2
        group = PurePosixPath(path).relative_to("/")
        for each in (group, *group.parents) if ".." not in group.parts else [PurePosixPath()]:
            folder = root / mount / each
            with suppress(OSError):
                if (limit := (folder / limit_name).read_text().strip()) != "max":
                    pages = _fields(folder / "memory.stat")
                    files = sum(int(pages.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
                    yield int(limit) - int((folder / usage_name).read_text()) + files


def _fields(file: Path) -> dict[str, str]:
    """Return the second word of each line of a file, by the first word."""
    return {words[0]: words[1] for words in map(str.split, file.read_text().splitlines())}
