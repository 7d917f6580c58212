"""The forms in which Horovod has its verbs: at once or by a handle, in place or not, of one tensor or of a group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gradwire as hvd
from gradwire.trainer.horovod.handles import Handle

Form = Callable[..., Any]
VERBS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
GROUPED = ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter")


def forms(*verbs: str) -> dict[str, Form]:
    """Return all forms of verbs by name, of each one that gives a handle first, as functions of a tensor and options. A grouped
    one makes a list of a single tensor; the root of a broadcast is rank 0 where the options do not say another."""
    found: dict[str, Form] = {}
    for name in (verb + ending for verb in verbs for ending in ("_async", "_async_", "", "_")):
        if (form := getattr(hvd, name, None)) is None:
            continue
        if name.startswith("grouped"):
            form = partial(_grouped, form)
        found[name] = partial(form, root_rank=0) if name.startswith("broadcast") else form
    return found


def _grouped(form: Form, given: Any, **options: Any) -> Any:
    return form(given if isinstance(given, list) else [given], **options)


def done(result: Any) -> Any:
    """Return the result of a form, whether or not it gives a handle."""
    return hvd.synchronize(result) if isinstance(result, Handle) else result
