"""The progress message that is shown while kernels are compiled, when a machine first uses them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger("gradwire")

#: Seconds between two updates of the line on a terminal, and between two log messages.
_REDRAW_S, _LOG_S = 1.0, 10.0

#: The duration of compiling a single kernel, as text.
_BY_ITSELF = "some seconds"

_AHEAD = "; `gradwire precompile` does it ahead"

#: Return to the first column and clear the line.
_CLEAR = "\r\x1b[K"


class FirstUse:
    """Reports that kernels are being compiled, with one report for all kernels that are compiled together.

    Reports nothing if all kernels are loaded from the disk. On a terminal (stderr), the report is a line that counts the
    seconds. It stays for the first kernels that a process compiles, and is deleted for later ones. Without a terminal, the
    reports are warnings of the logger "gradwire", which Python prints by default: when the first kernels begin to compile,
    every ten seconds, and when they are compiled.

    Attributes: reports, False if another process of the host reports; compiled, the names of the kernels that this process has
    compiled, or waited for while another process compiled them.
    """

    def __init__(self) -> None:
        self.reports = True
        self.compiled: list[str] = []
        self._thread = threading.local()

    @contextmanager
    def together(self, duration: str, begins: Callable[[], object] | None = None) -> Iterator[None]:
        """Report all kernels that this thread compiles inside as one. duration: the expected duration of all, as text. begins:
        called before the first kernel is compiled. Inside another together(), this does nothing."""
        if getattr(self._thread, "line", None) is not None:
            yield
            return
        self._thread.line = line = _Line(duration, begins)
        try:
            yield
        finally:
            self._thread.line = None
            line.end()

    @contextmanager
    def compiling(self, kernel: str, *, kept: bool) -> Iterator[None]:
        """Report that a kernel is being compiled inside. kept: whether the result is saved on the disk."""
        with self.together(_BY_ITSELF):
            self._thread.line.announce()
            if self.reports:
                self._thread.line.begin(kept=kept, first=not self.compiled)
            self.compiled.append(kernel)
            yield


class _Line:
    """Writes one report: a line on a terminal, or a few warnings to the log."""

    def __init__(self, duration: str, begins: Callable[[], object] | None) -> None:
        self._duration = duration
        self._begins = begins
        self._is_begun = False
        self._is_first = False
        self._on_terminal = False
        self._hint = ""
        self._since = 0.0
        self._over = threading.Event()
        self._clock: threading.Thread | None = None

    def announce(self) -> None:
        begins, self._begins = self._begins, None
        if begins is not None:
            begins()

    def begin(self, *, kept: bool, first: bool) -> None:
        if self._is_begun:
            return
        self._is_begun = True
        self._is_first = first
        self._hint = _AHEAD if kept else ""
        self._on_terminal = sys.stderr is not None and sys.stderr.isatty()
        if not self._on_terminal and not first:
            return
        self._since = time.monotonic()
        text = f"gradwire: compiling kernels{' for this and later runs' if kept else ''}, {self._duration}"
        if self._on_terminal:
            self._draw(text)
        else:
            _log.warning("%s%s", text, self._hint)
        self._clock = threading.Thread(target=self._count, args=(text,), name="gradwire-first-use", daemon=True)
        self._clock.start()

    def end(self) -> None:
        if self._clock is None:
            return
        self._over.set()
        self._clock.join()
        done = f"gradwire: compiled kernels in {self._seconds()}"
        if not self._on_terminal:
            _log.warning("%s", done)
        else:
            _write(f"{_CLEAR}{done}{self._hint}\n" if self._is_first else _CLEAR)

    def _count(self, text: str) -> None:
        while not self._over.wait(_REDRAW_S if self._on_terminal else _LOG_S):
            if self._on_terminal:
                self._draw(text)
            else:
                _log.warning("%s: %s so far", text, self._seconds())

    def _draw(self, text: str) -> None:
        _write(f"{_CLEAR}{text}: {self._seconds()} so far")

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._since:.0f} s"


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


#: The reports of this process. There is one object for all kernels, since they are compiled while modules are loaded.
FIRST_USE = FirstUse()
