"""The file and line of the user's program where a thread is, or where an exception was raised.

An exception that ends this rank is reported to the others at once, because the end of the interpreter may take long.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Protocol

#: Packages that are not the user's code, besides the standard library and installed packages.
_OURS = {"gradwire", "torch"}

_INSTALLED = ("site-packages", "dist-packages")

#: The maximum number of characters of a text. The message of an exception may contain a whole tensor.
_LONGEST = 300


def of_main_thread() -> str:
    """Return the place of the main thread, as text. Any thread may call this."""
    frame = frame_of(threading.main_thread().ident or 0)
    return f"at {_place(traceback.walk_stack(frame))}" if frame else "at its end: the main thread has ended"


def frame_of(ident: int) -> FrameType | None:
    """Return the current frame of a thread; None if the thread has ended.

    sys._current_frames() holds a lock of the interpreter. If garbage were collected during the call, a finalizer could
    let another thread run that needs the same lock. Both threads would then deadlock, as in CPython 3.11.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(ident)
    finally:
        if collects:
            gc.enable()


def of_exception(error: BaseException) -> str:
    """Return an exception and its place in one line; empty for the SystemExit of a script that succeeds."""
    if isinstance(error, SystemExit) and not error.code:
        return ""
    what = shortened(" ".join("".join(traceback.format_exception_only(error)).split()))
    if (trace := error.__traceback__) is None:
        return f"raised {what}"
    frames = list(traceback.walk_tb(trace))[::-1]
    if (caller := trace.tb_frame.f_back) is not None:  # the outer frames of an exception that is not caught yet
        frames += traceback.walk_stack(caller)
    return f"raised {what} at {_place(frames)}"


def of_call(frame: FrameType | None) -> str:
    """Return 'file:line' of the innermost call in the user's own code, from a frame outwards; empty if there is none,
    as in the framework's own threads."""
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users(file, frame.f_globals.get("__name__", "")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def shortened(text: str) -> str:
    """Return a text. If it is too long, return its beginning and '...'."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost line of the user's code, and the innermost line of all code if that is another. frames: from
    the innermost outwards."""
    listed = list(frames)
    innermost = listed[0]
    users = next(
        (each for each in listed if _is_users(each[0].f_code.co_filename, each[0].f_globals.get("__name__", ""))),
        innermost,
    )
    return _text(users) if users is innermost else f"{_text(users)} (in {_text(innermost)})"


@lru_cache(maxsize=4096)  # since every operation that is started asks for each frame of its caller
def _is_users(file: str, module: object) -> bool:
    package = str(module).partition(".")[0]
    installed = any(folder in file for folder in _INSTALLED)
    return not installed and package not in _OURS and package not in sys.stdlib_module_names


def _text(place: tuple[FrameType, int]) -> str:
    frame, line = place
    return f"{frame.f_code.co_filename}:{line}, {frame.f_code.co_name}"


_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


class Leaver(Protocol):
    """Takes part in operations for which other ranks wait."""

    def leave(self, why: str) -> None:
        """Report to the other ranks that this rank takes no further part. why: the exception, as text."""


class ExceptHook:
    """Replaces sys.excepthook while there are leavers. Calls leave() of each of them, then the former hook."""

    def __init__(self, former: _Hook) -> None:
        self.leavers: weakref.WeakSet[Leaver] = weakref.WeakSet()
        self._former = former

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if not hasattr(sys, "ps1") and not sys.flags.inspect:  # at a prompt, an exception does not end the process
                why = of_exception(error)
                for leaver in list(self.leavers):
                    leaver.leave(why)
        finally:
            self._former(kind, error, trace)

    @classmethod
    def register(cls, leaver: Leaver) -> ExceptHook:
        """Add a leaver, with a weak reference. Return the hook, whose dismiss() removes the leaver."""
        hook = sys.excepthook
        if not isinstance(hook, ExceptHook):
            hook = sys.excepthook = ExceptHook(hook)
        hook.leavers.add(leaver)
        return hook

    def dismiss(self, leaver: Leaver) -> None:
        """Remove a leaver. After the last one, restore the former sys.excepthook, unless it has been replaced since."""
        self.leavers.discard(leaver)
        if not self.leavers and sys.excepthook is self:
            sys.excepthook = self._former
