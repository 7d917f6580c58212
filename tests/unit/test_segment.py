"""Shared memory that leaves nothing behind."""

import ctypes
import os
import resource
from pathlib import Path

import pytest

from gradwire.collectives.transports.shared_memory.segment import Segment

NBYTES = 1 << 16


def mapped() -> int:
    return sum("gradwire-test" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_what_one_writes_the_other_reads() -> None:
    made = Segment.create("gradwire-test", NBYTES)
    assert made.descriptor is not None
    seen = Segment.open(os.getpid(), made.descriptor, "gradwire-test", NBYTES)
    assert made.address is not None
    assert seen.address is not None
    ctypes.c_int64.from_address(made.address + 4096).value = 77
    assert ctypes.c_int64.from_address(seen.address + 4096).value == 77
    made.close()
    assert ctypes.c_int64.from_address(seen.address + 4096).value == 77
    seen.close()
    seen.close()
    assert mapped() == 0


def test_it_is_in_no_directory_and_for_its_owner_only() -> None:
    before = set(os.listdir("/dev/shm"))
    made = Segment.create("gradwire-test", NBYTES)
    assert made.descriptor is not None
    assert set(os.listdir("/dev/shm")) == before
    assert os.fstat(made.descriptor).st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(made.descriptor, 0)
    made.close()


def test_the_wrong_name_is_refused() -> None:
    made = Segment.create("gradwire-test", NBYTES)
    assert made.descriptor is not None
    with pytest.raises(OSError, match="not the segment"):
        Segment.open(os.getpid(), made.descriptor, "gradwire-other", NBYTES)
    with pytest.raises(FileNotFoundError):
        Segment.open(os.getpid(), 999_999, "gradwire-test", NBYTES)
    made.close()


def test_what_cannot_be_reserved_is_an_error() -> None:
    allowed, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        with pytest.raises(OSError, match="cannot reserve 1048576 bytes of shared memory"):
            Segment.create("gradwire-test", 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, most))
