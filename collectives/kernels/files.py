"""Compiled kernels on the disk, of the CPU and of GPUs: where they are, and who compiles them.

The name of a file has digests of the sources of all kernels of its kind, and of what else its code depends on. A file begins with
a digest of its content, so that a damaged one is compiled again.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path

_log = logging.getLogger("gradwire")

#: How long one process may compile; one that holds the lock for longer counts as stopped.
COMPILE_S = 60.0
_POLL_S = 0.01

#: Kernels of other versions of gradwire in a folder that several installations may use are deleted when they are this old.
_OLD_S = 30 * 24 * 3600.0

#: The length of the digest before the code.
_CHECK_BYTES = 32

#: The preferred folder, which this installation has for itself.
_OWN = Path(__file__).parent / "__pycache__"


class KernelFiles:
    """The kernels of one kind. suffix: of their files. sources: the files that they are compiled from."""

    def __init__(self, suffix: str, sources: Sequence[Path]) -> None:
        self._suffix, self._sources = suffix, sources

    @cached_property
    def _sources_digest(self) -> str:
        return _digest(b"".join(source.read_bytes() for source in self._sources))

    def name(self, kernel: str, *depends_on: object) -> str:
        """Return the name of a kernel's file. depends_on: what the code depends on besides the sources."""
        return f"{kernel}.{self._sources_digest}.{_digest(repr(depends_on).encode())}{self._suffix}"

    def is_kept(self, file: str) -> bool:
        """Return whether a kernel is on the disk, unless its file is damaged."""
        for folder in _folders():
            with suppress(OSError):
                if _is_trusted(os.stat(folder / file)):
                    return True
        return False

    def kept(self, file: str) -> bytes | None:
        """Return the code of a kernel that is on the disk; None if there is none, only a damaged one, or one of another user."""
        for folder in _folders():
            with suppress(OSError), (folder / file).open("rb") as opened:
                code = opened.read() if _is_trusted(os.fstat(opened.fileno())) else b""
                if code[:_CHECK_BYTES] == hashlib.sha256(code[_CHECK_BYTES:]).digest():
                    return code[_CHECK_BYTES:]
        return None

    def compiled(self, file: str, compile: Callable[[], bytes], *, quiet: bool = False) -> bytes:
        """Return the code of a kernel that was not on the disk: compile it, or wait for another process that does. Save it if a
        folder is writable. quiet: do not log that this process compiles.

        Processes wait for each other only to compile: one that is stopped while it loads a kernel delays no other.
        """
        folder = self.folder
        with _one_at_a_time() as is_first:
            if (code := self.kept(file)) is not None:
                return code
            if is_first and not quiet:
                _tell(folder is not None)
            code = compile()
            if folder is not None:
                _keep(folder / file, code)
            return code

    @cached_property
    def folder(self) -> Path | None:
        """Return the writable folder for kernels, or None, with a warning; and delete the kernels of other sources in it."""
        for folder in _folders():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder) as written:
                    if not _is_trusted(os.fstat(written.fileno())):  # a file system that gives files to another user
                        continue
            except OSError:
                continue
            self._clean(folder)
            return folder
        _warn("no folder is writable")
        return None

    def _clean(self, folder: Path) -> None:
        """Delete the kernels of other sources: all in the folder of this package, the old ones in a folder that other
        installations may use."""
        for path in [path for kind in (self._suffix, ".part") for path in folder.glob(f"*{kind}")]:
            is_part = path.suffix == ".part"  # another process may be writing it
            age_s = 0.0 if folder == _OWN and not is_part else _OLD_S
            with suppress(OSError):
                if (is_part or self._sources_digest not in path.name) and path.stat().st_mtime < time.time() - age_s:
                    path.unlink()


def _digest(data: bytes) -> str:
    """Return a part of the SHA-256 of data, for the name of a file."""
    return hashlib.sha256(data).hexdigest()[:16]


@cache
def _folders() -> list[Path]:
    """Return the folders where kernels may be, the preferred one first."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        folder = Path(given).absolute() / "gradwire"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return [folder]
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [_OWN, user / "gradwire"] if user.is_absolute() else [_OWN]


def _is_trusted(file: os.stat_result) -> bool:
    """Return whether a file belongs to this user, to root, or to the owner of this package, whose code this process executes."""
    return file.st_uid in (os.geteuid(), 0, os.stat(__file__).st_uid)


@contextmanager
def _one_at_a_time() -> Iterator[bool]:
    """Wait for the other processes of the machine, so that all but the first find the compiled kernels on the disk. Yield whether
    this process did not have to wait.

    If there are no locks, or the first one takes too long, they compile at the same time, which only costs time.
    """
    deadline, is_first = time.monotonic() + COMPILE_S, True
    with Path(__file__).open() as source:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                is_first = False
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                break
        yield is_first


def _keep(path: Path, code: bytes) -> None:
    """Save a kernel, so that other processes find it complete or not at all, after a loss of power too."""
    part = ""
    try:
        descriptor, part = tempfile.mkstemp(".part", path.name, path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError as error:  # a full disk
        with suppress(OSError):
            os.unlink(part)
        _warn(str(error.strerror))


@cache
def _tell(saves: bool) -> None:
    """Log, once in a process, that it compiles."""
    hint = " for this and later runs, in up to a minute; `gradwire precompile` does it ahead" if saves else ""
    _log.warning("gradwire: compiling kernels%s", hint)


@cache
def _warn(reason: str) -> None:
    """Warn that nothing is kept, once for each reason."""
    _log.warning(
        "gradwire: kernels cannot be saved (%s), so every process compiles them, which takes some seconds: "
        "set NUMBA_CACHE_DIR to a writable folder",
        reason,
    )
