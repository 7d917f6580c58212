"""Scheduling of threads that wait for messages while all cores are busy."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

#: Numbers of the system call sched_setattr.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}

#: What a thread that mostly sleeps needs at once: a few segments' worth of copies and additions.
_SLICE_NS = 300_000


def wake_soon() -> None:
    """Ask that the calling thread runs as soon as it wakes up, in place of threads that compute. Its share of the cores stays.

    Since Linux 6.12 a thread may have a time slice of its own, and one that wakes up with a shorter slice preempts one with
    a longer slice (EEVDF: Stoica and Abdel-Wahab, 1995). With the usual slice of some milliseconds, every message waits for
    so long. Other kernels ignore it.
    """
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is not None and os.sched_getscheduler(0) == os.SCHED_OTHER:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, utilization (least, most)
        attributes = struct.pack("=IIQiIQQQII", 56, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)
