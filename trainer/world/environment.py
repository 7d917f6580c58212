"""The settings of a world, read from Horovod's environment variables, which horovodrun and job scripts set."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

PREFIX = "HOROVOD_"

_HONOURED = {
    *(
        f"HOROVOD_{name}"
        for name in ("FUSION_THRESHOLD", "LOG_LEVEL", "TIMELINE", "TIMELINE_MARK_CYCLES", "GLOO_IFACE")
    ),
    *(f"HOROVOD_STALL_{name}" for name in ("CHECK_TIME_SECONDS", "CHECK_DISABLE", "SHUTDOWN_TIME_SECONDS")),
}

#: Variables that notice() omits: those of horovodrun, which launch.py reads or nothing needs, and those for building Horovod.
_OF_THE_LAUNCHER = (
    *(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")),
    *(f"HOROVOD_{name}" for name in ("HOSTNAME", "CONTROLLER", "CPU_OPERATIONS", "SECRET_KEY")),
    "HOROVOD_GLOO_TIMEOUT_SECONDS",  # always 30 s, too short for an operation of gradwire
    *(f"HOROVOD_GLOO_RENDEZVOUS_{name}" for name in ("ADDR", "PORT")),
    *("HOROVOD_WITH_PYTORCH", "HOROVOD_DYNAMIC_PROCESS_SETS"),
)

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}

_T = TypeVar("_T")


DYNAMIC_TIMELINE = "DYNAMIC"
"""The value in place of a file name if start_timeline() will begin the timeline."""


@dataclass(frozen=True)
class Settings:
    """Holds the settings of a world, from the environment or the arguments of init().

    fusion_bytes: the bucket size of optimizers that are not given one; None: their default. stall_warning_s,
    stall_shutdown_s: the time after which a rank that waits for others logs a warning, and gives up; None: never.
    log_level: the level of the logger `gradwire`; None: unchanged. timeline: the file of the timeline, or "DYNAMIC" if
    start_timeline() begins it; None: no timeline. marks_cycles: whether the timeline shows where exchanges begin.
    interface: the network interface of this rank; None: detected. timeout_s: the limit for joining and each operation.
    key: of the job; None without encryption.
    """

    fusion_bytes: int | None = None
    stall_warning_s: float | None = 60.0
    stall_shutdown_s: float | None = None
    log_level: int | None = None
    timeline: str | None = None
    marks_cycles: bool = False
    interface: str | None = None
    timeout_s: float = 300.0

    def replaced(
        self,
        timeout_s: float | None,
        stall_warning_s: float | None,
        stall_shutdown_s: float | None,
    ) -> Settings:
        """Return these settings with each argument that is not None in place of the old value; 0 seconds disable a stall
        limit. Raises ValueError for invalid arguments."""
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s must be a finite number of seconds > 0, not {timeout_s!r}")
        for name, seconds in (("stall_warning_s", stall_warning_s), ("stall_shutdown_s", stall_shutdown_s)):
            if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name} must be a finite number of seconds >= 0, not {seconds!r}")
        return replace(
            self,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            stall_warning_s=self.stall_warning_s if stall_warning_s is None else stall_warning_s or None,
            stall_shutdown_s=self.stall_shutdown_s if stall_shutdown_s is None else stall_shutdown_s or None,
        )


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings in environment variables. An empty variable counts as unset. Raises ValueError for invalid values."""

    def value(name: str, convert: Callable[[str], _T], allowed: str, default: _T) -> _T:
        text = environment.get(name)
        if not text:
            return default
        try:
            return convert(text)
        except (ValueError, KeyError):
            raise ValueError(f"{name} must be {allowed}, not {text!r}") from None

    seconds = "a number of seconds >= 0"
    fusion_bytes = value("HOROVOD_FUSION_THRESHOLD", _size, "a whole number of bytes >= 0", -1)
    stall_warning_s = value("HOROVOD_STALL_CHECK_TIME_SECONDS", _seconds, seconds, 60.0)
    if value("HOROVOD_STALL_CHECK_DISABLE", _flag, "0 or 1", False):
        stall_warning_s = 0.0
    return Settings(
        fusion_bytes=None if fusion_bytes < 0 else max(1, fusion_bytes),  # 0: one bucket for each gradient
        stall_warning_s=stall_warning_s or None,
        stall_shutdown_s=value("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _seconds, seconds, 0.0) or None,
        log_level=value("HOROVOD_LOG_LEVEL", lambda text: _LEVELS[text.lower()], f"one of {', '.join(_LEVELS)}", None),
        timeline=environment.get("HOROVOD_TIMELINE") or None,
        marks_cycles=value("HOROVOD_TIMELINE_MARK_CYCLES", _flag, "0 or 1", False),
        interface=environment.get("HOROVOD_GLOO_IFACE") or None,
    )


def notice(environment: Mapping[str, str]) -> str | None:
    """Return one line that says which of Horovod's variables are used and which are ignored; None if there are none."""
    found = sorted(name for name in environment if name.startswith(PREFIX) and name not in _OF_THE_LAUNCHER)
    honoured = [f"{name}={environment[name]}" for name in found if name in _HONOURED]
    ignored = [name for name in found if name not in _HONOURED]
    said = [f"used are {', '.join(honoured)}"] if honoured else []
    said += [f"ignored are {', '.join(ignored)}"] if ignored else []
    return f"of Horovod's environment variables, {'; '.join(said)}" if said else None


def _size(text: str) -> int:
    if (number := int(text)) < 0:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError
    return number


def _flag(text: str) -> bool:
    return {"0": False, "1": True}[text]
