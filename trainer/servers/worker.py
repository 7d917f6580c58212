"""Worker: pushes tensors to keys and pulls them, at the servers of all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError
from gradwire.trainer.servers.aggregator import Counts
from gradwire.trainer.servers.packing import Sender
from gradwire.trainer.servers.server import Key
from gradwire.trainer.servers.serving import ServerLink


class Worker:
    """Pushes tensors to keys, and pulls them. Only one thread may use it.

    links: by the rank of the server. settings: for each server that has none of its own, the optimizer whose param group
    settings are sent there when they change.
    """

    def __init__(
        self, links: Mapping[int, ServerLink], settings: Mapping[int, torch.optim.Optimizer] | None = None
    ) -> None:
        self._links = links
        self._settings = settings or {}
        self._sent: dict[int, Any] = {}  # the settings that a server has
        self._senders: dict[int, Sender] = {}  # by the number of the key, like the following
        self._pulled: dict[int, list[Tensor]] = {}  # memory for the next pull
        self._due: set[int] = set()  # the keys that a push has asked for

    def add(self, key: Key, **seeds: int) -> None:
        """Add a key, or encode pushes to it in another way from now on. seeds: those of the Sender."""
        self._senders[key.number] = Sender(key.packing, **seeds, reuses=self._links[key.server].copies)

    def push(
        self,
        key: Key,
        tensors: Sequence[Tensor | None],
        *,
        weight: float = 1.0,
        pulls: bool = False,
        deadline: float | None = None,
    ) -> None:
        """Send tensors, or None for those that have no gradient, to the server of a key. pulls: whether this asks for the newest
        tensors of the key too; pull() must then follow. deadline (time.monotonic()): the limit for all messages; None for the
        timeout_s of the link for each."""
        settings = self._new_settings(key.server)
        sender = self._senders[key.number]
        step = sender.steps
        forms, buffers = sender.encode(tensors)
        request: dict[str, Any] = {"push": [key.number, step, weight, forms]}
        if settings is not None:
            request["settings"] = settings
        if pulls:
            request["pull"] = [key.number, False]
            self._due.add(key.number)
        self._links[key.server].request(f"push to {key.title}", request, buffers, deadline)

    def pull(self, key: Key, rows: Tensor | None = None, deadline: float | None = None) -> tuple[int, list[Tensor]]:
        """Wait until the server lets this worker continue. Return the version of a key and its newest tensors, valid until the
        next pull of this key; or these rows of its only tensor. Raises as Entry.pull()."""
        link, operation = self._links[key.server], f"pull of {key.title}"
        if key.number in self._due:
            self._due.remove(key.number)
        else:
            wanted = {"pull": [key.number, rows is not None]}
            link.request(operation, wanted, [] if rows is None else [rows], deadline)
        if rows is not None:
            return link.answer(operation, deadline)
        version, buffers = link.answer(operation, deadline, self._pulled.get(key.number, []))
        self._pulled[key.number] = buffers
        return version, key.packing.flat.views(buffers)

    def refuse(self, reason: str) -> None:
        """Let all pulls of all workers raise CollectiveError."""
        for link in self._links.values():
            with suppress(CollectiveError):  # without the server, the other workers fail too
                link.request("refusal", {"refuse": reason})

    def counts(self) -> list[Counts]:
        """Return the Counts of all pushes so far, one for each server. All pushes of this worker have arrived then."""
        found = []
        for link in self._links.values():
            link.request("report", {"counts": True})
            found.append(Counts.from_record(link.answer("report")[0]))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the number of pushes to each key, equal for all, and the states of the Senders."""
        senders = self._senders.values()
        return {
            "steps": max((each.steps for each in senders), default=0),
            "senders": [each.state_dict() for each in senders],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of state_dict(), for the same keys."""
        for sender, saved in zip(self._senders.values(), state["senders"], strict=True):
            sender.load_state_dict(saved)
            sender.steps = state["steps"]

    def _new_settings(self, server: int) -> Any:
        """Return the settings that a server needs and does not have, as a record; None if it needs none."""
        if server not in self._settings:
            return None
        groups = self._settings[server].param_groups
        given = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        settings = json.loads(json.dumps(given, default=_number_of))
        if settings == self._sent.get(server):
            return None
        self._sent[server] = settings
        return settings


def _number_of(value: Any) -> Any:
    """Return the number in a scalar of torch or NumPy."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"the setting {value!r} of a param group cannot be sent to a rank that serves only")
