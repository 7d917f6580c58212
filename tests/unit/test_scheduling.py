"""Threads that wait for messages have a short time slice, where the kernel has such, and keep all else."""

import ctypes
import os
import platform
import struct
import threading

import pytest

from gradwire.collectives.thread_priority import wake_soon

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


def attributes() -> tuple[int, int, int]:
    """Return policy, nice value and slice in nanoseconds of the calling thread."""
    read = ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None).syscall(SCHED_GETATTR[platform.machine()], 0, read, 56, 0) == 0
    _, policy, _, nice, _, slice_ns, *_ = struct.unpack("=IIQiIQQQII", read.raw)
    return policy, nice, slice_ns


@pytest.mark.skipif(platform.machine() not in SCHED_GETATTR, reason="another processor's numbers of system calls")
def test_a_thread_gets_a_short_slice_and_no_more_of_a_core() -> None:
    seen = []

    def look() -> None:
        seen.append(attributes())
        wake_soon()
        seen.append(attributes())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    (policy, nice, usual_ns), after = seen
    assert after[:2] == (policy, nice) == (os.SCHED_OTHER, nice)
    if usual_ns:  # a kernel that tells of slices lets them be chosen
        assert after[2] == 300_000
