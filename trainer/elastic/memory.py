"""Memory in which commits survive the process that made them: pairs of files in /dev/shm, one of which is always complete."""

from __future__ import annotations

import itertools
import mmap
import os
import re
import stat
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.kernels import cpu_or_reference
from gradwire.collectives.kernels.reference.memory import LINE_BYTES, SUMS
from gradwire.collectives.schedules.topology import host_id
from gradwire.trainer.elastic import watcher
from gradwire.trainer.reducer.replicas import hash_of
from gradwire.trainer.trees import decode
from gradwire.trainer.world.launch import launching_process

_NAME = "gradwire-elastic"

#: The environment variable that only torchrun's agent and gradwire run --min-np set for the ranks that they start.
OF_AGENT = "TORCHELASTIC_RUN_ID"

#: The header of a file: magic, size of the layout and of the data in bytes, checksum of both and of the name. Written last.
_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"gradwir2"
_BODY = LINE_BYTES
"""The offset of the layout, which follows the header. The data begins at the next multiple of this."""


class Unfinished(ValueError):
    """A slot holds no complete commit, for example because a process ended while it wrote one."""


class Slot:
    """Holds one rank's part of a commit, or nothing complete. descriptor: of the file; the slot closes it. name: the checksum
    includes it."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self.name = name
        self._map: mmap.mmap | None = None
        self._sizes = 0, 0
        self._filled, self._sums = 0, torch.zeros(SUMS, dtype=torch.int64, device="cpu")

    def __del__(self) -> None:
        os.close(self._descriptor)

    def begin(self, layout: Tensor, data_bytes: int) -> Tensor:
        """Write the layout of a commit, and return a view, uint8, for its data. The slot's previous contents become invalid.
        Raises OSError if memory runs out, which leaves the contents valid."""
        self._reserve(_data_start(layout.numel()) + data_bytes)
        assert self._map is not None
        self._map[: _HEADER.size] = bytes(_HEADER.size)
        self._filled, self._sums = 0, torch.zeros(SUMS, dtype=torch.int64, device="cpu")
        self._sizes = layout.numel(), data_bytes
        self._layout.copy_(layout)
        return self._data

    def append(self, pieces: Sequence[Tensor]) -> None:
        """Append contiguous CPU tensors to the data, each at the next multiple of 64 bytes. A caller must write all of the data
        by append(), or all of it to the view that begin() returned."""
        cpu_or_reference().add_pieces(self._sums, pieces, self._data[self._filled :])
        self._filled += sum(-(-piece.nbytes // LINE_BYTES) * LINE_BYTES for piece in pieces)

    def complete(self) -> None:
        """Mark the commit as complete: write the header, with the checksum."""
        assert self._map is not None
        assert self._filled in (0, self._sizes[1])
        if not self._filled:
            self._sums = self._sums_of_data()
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, *self._sizes, self._checksum(self._sums))

    def read(self) -> tuple[Any, Tensor]:
        """Return the decoded layout and a view of the data, uint8, which later commits overwrite. Raises Unfinished if the slot
        holds no complete commit, and ValueError if its contents are damaged or not a commit."""
        if self._size < _BODY:
            raise Unfinished
        self._map = self._mapped()
        magic, *sizes, found = _HEADER.unpack(self._map[: _HEADER.size])
        self._sizes = sizes[0], sizes[1]
        if magic == bytes(len(_MAGIC)):
            raise Unfinished
        if magic != _MAGIC or _data_start(sizes[0]) + sizes[1] > len(self._map):
            raise ValueError("it is not a commit, or is truncated")
        if found != self._checksum(self._sums_of_data()):
            raise ValueError("its checksum does not match its contents")
        return decode(self._layout), self._data

    @property
    def _layout(self) -> Tensor:
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=torch.uint8)[_BODY : _BODY + self._sizes[0]]

    @property
    def _data(self) -> Tensor:
        assert self._map is not None
        start = _data_start(self._sizes[0])
        return torch.frombuffer(self._map, dtype=torch.uint8)[start : start + self._sizes[1]]

    @property
    def _size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def _reserve(self, nbytes: int) -> None:
        """Map a file with room for a commit of so many bytes, and spare room for commits that grow. A file that is much larger
        shrinks: a rank stores less once its host has more ranks."""
        roomy = nbytes + nbytes // 16 + mmap.PAGESIZE
        if self._size > roomy + nbytes // 4:
            os.pwrite(self._descriptor, bytes(_HEADER.size), 0)
            os.ftruncate(self._descriptor, roomy)
        elif self._size < nbytes:
            try:
                os.posix_fallocate(self._descriptor, 0, roomy)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"cannot reserve {roomy} bytes for a commit in {watcher.FOLDER} ({error.strerror}): a host needs "
                    "twice the bytes that its ranks keep. The previous commit is still valid. In a container, --shm-size sets "
                    "the size",
                ) from error
        self._map = self._mapped()

    def _mapped(self) -> mmap.mmap:
        """Return a map of the whole file. A process that has mapped it before may have another size."""
        if self._map is not None and len(self._map) == self._size:
            return self._map
        return mmap.mmap(self._descriptor, self._size, mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def _sums_of_data(self) -> Tensor:
        sums = torch.zeros(SUMS, dtype=torch.int64, device="cpu")
        cpu_or_reference().add_pieces(sums, [self._data])
        return sums

    def _checksum(self, sums: Tensor) -> int:
        """Return the checksum of the name, the sizes, the layout, and the data. sums: those of the data."""
        return hash_of((self.name, *self._sizes, hash_of(self._layout), sums.tolist()))


class Memory:
    """Makes and finds slots by their names. They are private to the process, and end with it.

    key: equal on ranks that find each other's slots, and different on other ranks.
    """

    outlives_process = False

    def __init__(self) -> None:
        self.key = f"{host_id()}/process {os.getpid()}"
        self._slots: dict[str, Slot] = {}

    def names(self) -> list[str]:
        """Return the names of the existing slots, sorted."""
        return sorted(self._slots)

    def slot(self, name: str) -> Slot:
        """Return the slot of this name, made if it does not exist. Raises OSError if its file cannot be used."""
        if name not in self._slots:
            self._slots[name] = Slot(self._open(name), f"{self.key}{name}")
        return self._slots[name]

    def remove(self, name: str) -> None:
        """Remove a slot. Its memory is freed once no process uses it."""
        self._slots.pop(name, None)

    def _open(self, name: str) -> int:
        return os.memfd_create(name, os.MFD_CLOEXEC)


@dataclass(frozen=True)
class Agent:
    """The process that has started this host's ranks, and restarts them. pid: its id. start: see watcher.started_at."""

    pid: int
    start: int

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of all files that live as long as this process: user, PID namespace, process."""
        return f"{_of_user()}.{self.pid}.{self.start}."

    def watch(self) -> None:
        """Start a process that removes this agent's files when the agent ends. Remove the files of agents that have ended."""
        for path in watcher.FOLDER.glob(f"{_of_user()}.*"):
            match = re.match(rf"{re.escape(_of_user())}\.(\d+)\.(\d+)\.", path.name)
            if match and watcher.started_at(int(match[1])) != int(match[2]):
                with suppress(OSError):
                    path.unlink()
        command = [sys.executable, "-I", "-S", watcher.__file__, str(self.pid), str(self.start), self.prefix]
        nowhere = subprocess.DEVNULL
        subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, cwd="/", start_new_session=True)


def find_agent() -> Agent | None:
    """Return the process that restarts this host's ranks if they fail, such as torchrun's agent; None if there is none."""
    process = launching_process(OF_AGENT)
    return None if process is None else Agent(*process)


#: Numbers for the training functions that this process calls. All ranks call them in the same order.
_numbers = itertools.count(1)


class NamedMemory(Memory):
    """Makes and finds slots that are files, for the ranks of one agent. number: that of the training function in the job; each
    has its own slots."""

    outlives_process = True

    def __init__(self, agent: Agent, number: int) -> None:
        super().__init__()
        self.number = number
        self._agent = agent
        self._prefix = f"{agent.prefix}{number}."
        self.key = f"{host_id()}/{self._prefix}"

    @classmethod
    def after(cls, memory: Memory | None, agent: Agent) -> NamedMemory:
        """Return the memory that a training function has used before, or new memory if it has not used any that outlives a
        process."""
        return memory if isinstance(memory, NamedMemory) else cls(agent, next(_numbers))

    def reopened(self) -> NamedMemory:
        """Return the same memory with no slot open: other processes may have replaced files that this process has open."""
        return NamedMemory(self._agent, self.number)

    def names(self) -> list[str]:
        names = [path.name.removeprefix(self._prefix) for path in watcher.FOLDER.glob(f"{self._prefix}*.[01]")]
        return sorted(name for name in names if name[:-2].isdecimal())

    def path(self, name: str) -> Path:
        """Return the path of a slot's file, or of another file with the same lifetime."""
        return watcher.FOLDER / f"{self._prefix}{name}"

    def remove(self, name: str) -> None:
        super().remove(name)
        with suppress(OSError):
            self.path(name).unlink()

    def _open(self, name: str) -> int:
        return open_own(self.path(name))


def load_kernels() -> None:
    """Load or compile the kernel that copies commits and computes their checksums."""
    cpu_or_reference().add_pieces(torch.zeros(SUMS, dtype=torch.int64, device="cpu"), [])


def open_own(path: Path, flags: int = 0) -> int:
    """Open a file for reading and writing, made if it does not exist, and return its descriptor. flags: of os.open(), too.
    Raises PermissionError unless it is a regular file of this user with mode 600 and one name."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    found = os.fstat(descriptor)
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1
    if not is_own or stat.S_IMODE(found.st_mode) != 0o600:
        os.close(descriptor)
        raise PermissionError(
            f"{path} belongs to user {found.st_uid}, has mode {stat.S_IMODE(found.st_mode):o} and {found.st_nlink} "
            f"names: it must be of user {os.geteuid()}, with mode 600 and one name"
        )
    return descriptor


def _of_user() -> str:
    """Return the prefix of all names of this user's files in this PID namespace; process ids are unique in a namespace only."""
    return f"{_NAME}.{os.geteuid()}.{os.stat('/proc/self/ns/pid').st_ino}"


def _data_start(layout_bytes: int) -> int:
    return _BODY + -(-layout_bytes // _BODY) * _BODY
