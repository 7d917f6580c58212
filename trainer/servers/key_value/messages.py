"""A worker's calls to Keys: by messages if they are on another rank, whose threads answer; directly if on the same rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.trainer.servers.key_value.keys import Keys, KeySpec
from gradwire.trainer.servers.serving import OWN, Answer, Client, LocalClient

PUSH, PULL, ROWS = range(OWN, OWN + 3)

_UNCODED = -1
"""The number sent in place of a step with a tensor that is not encoded."""


def answer(
    keys: Keys, worker: int, communicator: Communicator, kind: int, numbers: Sequence[float]
) -> Callable[[], Answer] | None:
    """Handle a request for these keys from a worker on another rank, as serving.Answering describes."""
    number, argument, _ = map(int, numbers)
    if kind == PUSH:
        step = None if argument == _UNCODED else argument
        payload = keys.new_payload(number, step)
        communicator.recv(payload, 0)
        keys.push(worker, number, payload, step)
        return None
    if kind not in (PULL, ROWS):
        raise ValueError(f"rank {worker} sent {kind}, which is none of PUSH ({PUSH}), PULL ({PULL}) and ROWS ({ROWS})")
    rows = None
    if kind == ROWS:
        rows = torch.empty(argument, dtype=torch.int64, device="cpu")
        communicator.recv(rows, 0)
    return lambda: (0, [keys.pull(worker, number, rows)])


class RemoteKeys(Client):
    """Calls the Keys on another rank."""

    def __init__(self, rank: int, server: int, communicator: Communicator) -> None:
        super().__init__("the server", rank, server, communicator)

    def push(self, spec: KeySpec, payload: Tensor, step: int | None) -> None:
        """Send the arguments of Keys.push()."""
        with self._reached(f"push of key {spec.name!r}"):
            self._request(PUSH, spec.number, _UNCODED if step is None else step, tensors=[payload])

    def pull(self, spec: KeySpec, rows: Tensor | None = None) -> Tensor:
        """Wait for the result of Keys.pull(), and return it. Raises the errors of Keys.pull()."""
        value = torch.empty(
            spec.shape if rows is None else (len(rows), *spec.shape[1:]), dtype=spec.dtype, device="cpu"
        )
        with self._reached(f"pull of key {spec.name!r}"):
            if rows is None:
                self._request(PULL, spec.number)
            else:
                self._request(ROWS, spec.number, len(rows), tensors=[rows])
            self._receive([value])
        return value


class LocalKeys(LocalClient[Keys]):
    """Calls the Keys on the same rank."""

    def push(self, spec: KeySpec, payload: Tensor, step: int | None) -> None:
        """Push a copy of the tensor: see Keys.push()."""
        self._served.push(self.server, spec.number, payload.clone(), step)

    def pull(self, spec: KeySpec, rows: Tensor | None = None) -> Tensor:
        """Return the result of Keys.pull()."""
        return self._served.pull(self.server, spec.number, rows)
