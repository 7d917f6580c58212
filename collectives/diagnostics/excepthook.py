"""Reports an exception that ends this rank to the others before the interpreter ends, which may take long."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from gradwire.collectives.diagnostics import whereabouts

_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


class Leaver(Protocol):
    """Takes part in something that others wait for."""

    def leave(self, why: str) -> None:
        """Report to the others that this rank takes no part any more."""


class ExceptHook:
    """Stands in sys.excepthook while there are leavers, each of which it calls; then calls what stood there before."""

    def __init__(self, former: _Hook) -> None:
        self.leavers: weakref.WeakSet[Leaver] = weakref.WeakSet()
        self._former = former

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if not hasattr(sys, "ps1") and not sys.flags.inspect:  # at a prompt, nothing ends by an exception
                why = whereabouts.of_exception(error)
                for leaver in list(self.leavers):
                    leaver.leave(why)
        finally:
            self._former(kind, error, trace)

    @classmethod
    def telling(cls, leaver: Leaver) -> ExceptHook:
        """Call a leaver from now on, until it is dismissed from the hook that this returns. The hook does not keep it alive."""
        hook = sys.excepthook
        if not isinstance(hook, ExceptHook):
            hook = sys.excepthook = ExceptHook(hook)
        hook.leavers.add(leaver)
        return hook

    def dismiss(self, leaver: Leaver) -> None:
        """Call a leaver no more; after the last one, sys.excepthook is what it was, if nobody has changed it since."""
        self.leavers.discard(leaver)
        if not self.leavers and sys.excepthook is self:
            sys.excepthook = self._former
