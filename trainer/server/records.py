"""Records, as JSON can have them, on their way through a Communicator."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from collectives import Communicator


def to_bytes(record: Any, default: Callable[[Any], Any] | None = None) -> Tensor:
    """Return a record as a tensor of uint8. default: makes of a value what JSON can have, as json.dumps takes it."""
    return torch.frombuffer(bytearray(json.dumps(record, default=default).encode()), dtype=torch.uint8)


def from_bytes(text: Tensor) -> Any:
    """Return what to_bytes() was given, as JSON has it: with lists for tuples, and keys that are text."""
    return json.loads(text.numpy().tobytes())


def receive(communicator: Communicator, nbytes: int, sender: int) -> Any:
    """Return a record that a rank sends as so many bytes."""
    text = torch.empty(nbytes, dtype=torch.uint8)
    communicator.recv(text, sender)
    return from_bytes(text)
