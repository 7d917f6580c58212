"""The absence of a rank that has no more data: it joins, and from then on makes the others' calls with zeros."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.compression.registry import CODECS
from gradwire.collectives.engine.engine import Engine
from gradwire.collectives.verbs import Verbs


@dataclass(frozen=True)
class WantedOperation:
    """An operation in which others wait for this joined rank: its number, and the fields of its DescribedCall."""

    sequence: int
    call: str
    verb: str
    tensors: list[Any]
    arguments: dict[str, Any]

    @property
    def numel(self) -> int:
        """The number of elements of all tensors."""
        return sum(math.prod(shape) for shape, _, _ in self.tensors)


class Absence:
    """Lets this rank join, on one Communicator, and take part with zeros until all ranks have joined.

    Joined ranks take part in sums, averages and barriers; another verb raises PeerJoined on the ranks that have not joined, and
    has no other effect. Call in this order: leave(); stand_in() whenever wanted() returns an operation, until everyone_left;
    then, when all ranks know of that, resume(). It costs nothing before the first rank leaves.
    """

    def __init__(self, verbs: Verbs, engine: Engine) -> None:
        self._verbs = verbs
        self._operations = engine.operations
        self._joined = engine.operations.joined
        self._watch = engine.watch

    @property
    def timeout_s(self) -> float:
        """Seconds that each operation may take."""
        return self._operations.timeout_s

    @property
    def is_usable(self) -> bool:
        """Whether the Communicator is neither closed nor broken, as far as this rank has noticed."""
        return self._operations.usable

    @property
    def has_failed(self) -> bool:
        """Whether an operation on this rank has failed, so that the Communicator is broken."""
        return self._operations.has_failed

    @property
    def everyone_left(self) -> bool:
        """Whether all ranks have joined."""
        return len(self._joined.ranks()) == self._watch.size

    @property
    def firsts(self) -> Mapping[int, int]:
        """The number of the first operation that each joined rank did not call itself, by rank."""
        return {rank: first for rank, (first, _) in self._joined.ranks().items()}

    @property
    def last(self) -> int:
        """The joined rank that took part in most operations before; of several, the last one by their clocks."""
        joined = self._joined.ranks()
        return max(joined, key=lambda rank: (joined[rank][1], rank))

    @property
    def is_broken(self) -> bool:
        """Whether some rank has failed in an operation, or ended, or this rank has lost its connections to the others. Every
        further operation then raises an error that says why."""
        return bool(self._watch.reports or self._watch.lost or self._watch.failure)

    @property
    def has_leavers(self) -> bool:
        """Whether some rank closes the Communicator."""
        return bool(self._watch.left)

    def allow(self, allows: Callable[[str], bool]) -> None:
        """Set the function that decides, by a call's text, whether a joined rank may take part. It must be the same on all
        ranks."""
        self._joined.allows = allows

    def leave(self, on_change: Callable[[], object]) -> None:
        """Finish the operations that this rank has issued, and post that it gives zeros from now on. on_change: called on
        another thread whenever there may be news."""
        self._operations.settle()
        self._joined.on_change = on_change
        self._joined.join(self._operations.issued, time.time())

    def fail(self) -> None:
        """Raise the failure of other ranks, if is_broken or has_leavers."""
        self._operations.fail()

    def wanted(self) -> WantedOperation | None:
        """Return the operation that this rank must begin next, if others have announced it or a later one; else None.

        An operation that is not allowed is returned only when all ranks that have not joined are in it, so that all of them
        know that it is refused.
        """
        sequence = self._operations.issued
        joined = self._joined.ranks()
        missed = [each for rank, each in self._joined.missed().items() if rank not in joined]
        there = [each for each in missed if each[-1][0] >= sequence]
        entries = [entry for each in there for entry in each if entry[0] == sequence]
        if there and (any(entry[-1] for entry in entries) or len(there) + len(joined) == self._watch.size):
            _, *wanted, _ = entries[0] if entries else (sequence, "an unknown operation", "", [], {}, False)
            return WantedOperation(sequence, *wanted)
        return None

    def stand_in(self, wanted: WantedOperation, device: torch.device) -> None:
        """Take part in an operation with zeros. device: where they lie, if the others' numbers are on one of its kind; else on
        any of theirs. Raises what the verb raises, and RuntimeError for an operation that was not fully announced."""
        verbs, verb, arguments = self._verbs, wanted.verb, dict(wanted.arguments)
        if not arguments:
            raise RuntimeError(
                f"rank {verbs.rank}: has joined, and cannot take part in operation {wanted.sequence}: {wanted.call}"
            )
        tensors = [_zeros(shape, dtype, kind, device) for shape, dtype, kind in wanted.tensors]
        if "compression" in arguments:
            name, settings = arguments["compression"]
            arguments["compression"] = codec = CODECS[name](**settings)
            has_feedback = arguments["feedback"]
            (tensor,) = tensors
            arguments["feedback"] = verbs.new_feedback(codec, tensor.numel(), tensor.device) if has_feedback else None
            verbs.allreduce(tensor, **arguments)
        elif verb == "allreduce":
            verbs.grouped_allreduce(tensors, **arguments)
        else:
            root = arguments.get("src", arguments.get("dst"))
            getattr(verbs, verb)(**_by_name(verb, tensors, verbs.rank, verbs.size, root), **arguments)

    def resume(self) -> None:
        """End the absence: this rank calls operations itself again. No operation may be under way."""
        self._joined.resume(self._operations.issued)


def _zeros(shape: list[int], dtype: str, device_type: str, device: torch.device) -> Tensor:
    place = device if device.type == device_type else torch.device(device_type)
    return torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=place)


def _by_name(verb: str, tensors: list[Tensor], rank: int, size: int, root: int | None) -> dict[str, Any]:
    """Return the tensor arguments of a verb on a rank, made from the tensors of its DescribedCall."""
    if verb in ("allgather", "reduce_scatter"):
        mine = torch.zeros_like(tensors[rank])
        return {"output": tensors, "input": mine} if verb == "allgather" else {"output": mine, "input": tensors}
    if verb in ("gather", "scatter"):
        (mine,) = tensors
        every = [torch.zeros_like(mine) for _ in range(size)] if rank == root else None
        return {"input": mine, "output": every} if verb == "gather" else {"output": mine, "input": every}
    if verb == "alltoall":
        (mine,) = tensors
        return {"output": torch.zeros_like(mine), "input": mine}
    return {"tensor": tensors[0]} if tensors else {}  # of broadcast and reduce; barrier has none
