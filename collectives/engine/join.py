"""Ranks that have joined: they have no more data, and contribute zeros to the operations that the other ranks still call.

A joined rank does not know the next call of the other ranks, so they send the text of each call as news while any rank has
joined; from this text, the joined rank makes the same call with zeros. Before the first rank joins, the ranks send nothing, and
an operation only checks Channel.has_news.
"""

from __future__ import annotations

import ast
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.registry import CODECS
from gradwire.collectives.control.channel import Channel
from gradwire.collectives.diagnostics.mismatch import arguments_of

if TYPE_CHECKING:
    from gradwire.collectives.engine.engine import Engine

_JOINED, _CALLS = "joined", "calls for those who have joined"

#: The verbs whose calls have the numbers of elements of all parts in place of a shape.
_PARTS = ("allgather", "reduce_scatter")

#: Matches a tensor in the text of a call, and the rows of a list of tensors.
_TENSOR = re.compile(r"(\w+)(\[[\d, ]*\])(?: on (\w+))?")
_ROW = re.compile(r"shape=\[\.\.\., ([\d, ]*)\]")


def is_sum(call: str) -> bool:
    """Return whether the result of a call is correct if some ranks contribute zeros. A joined rank keeps no error feedback."""
    given = arguments_of(call)
    adds = given.get("op") in (["sum"], ["average"]) and "error feedback" not in given
    return call.startswith("barrier(") or (call.startswith("allreduce(") and adds)


class Joined:
    """The ranks of one Communicator that have joined, and the announcements of the other ranks to them.

    A round of joins ends when all ranks have joined. Attributes: allows, returns whether a joined rank may take part in a call;
    refused, the number of the last operation in which a joined rank may not; absent, the ranks that had joined before it;
    on_change, which the Monitor's thread calls after each piece of news.
    """

    def __init__(self, channel: Channel) -> None:
        self.allows: Callable[[str], bool] = is_sum
        self.refused = -1
        self.absent: tuple[int, ...] = ()
        self.on_change: Callable[[], object] | None = None
        self._channel = channel
        self._round = 0  # how many rounds have ended
        self._announced = -1
        self._lock = threading.Lock()
        self._missed: list[tuple[int, str, bool]] = []  # announced, and perhaps not received yet
        self._begun = 0  # the number of the first operation of this round

    def announce(self, sequence: int, calls: Iterable[tuple[int, str]]) -> None:
        """Announce this rank's running operation once to the ranks that joined before it.

        calls: the last operations that began, with their numbers. A rank that only sends may be several operations ahead of a
        joined rank.
        """
        with self._lock:  # the calling thread and the Channel's may both run this
            if sequence == self._announced or not (joined := self.ranks()) or self._channel.rank in joined:
                return
            absent = tuple(sorted(rank for rank, (first, _) in joined.items() if first <= sequence))
            if not absent:
                return
            first = min(joined[rank][0] for rank in absent)
            announced = max([first - 1, *(entry[0] for entry in self._missed)])
            news = [
                (number, call, self.allows(call)) for number, call in sorted(calls) if announced < number <= sequence
            ]
            self._missed = _since_met([entry for entry in self._missed if entry[0] >= first] + news)
            if not self._missed:  # the operation has ended meanwhile
                return
            if not self._missed[-1][-1]:
                self.absent, self.refused = absent, sequence
            self._announced = sequence
            self._channel.post(_CALLS, [self._round, self._missed])

    def note_news(self) -> None:
        """Set has_news if a rank has joined, so that every operation is announced. Call on_change."""
        if self.ranks():
            self._channel.has_news = True
        if self.on_change is not None:
            self.on_change()

    def join(self, first: int) -> None:
        """Post that this rank contributes zeros from operation `first` on, and the time by its clock."""
        self._channel.post(_JOINED, [self._round + 1, first, [first - self._begun, time.time()]])

    def ranks(self) -> dict[int, tuple[int, list[float]]]:
        """Return the ranks that have joined in this round. The value of each is the number of the first operation without its
        data, and its time of joining: operations since the round began, and seconds since the epoch by its own clock."""
        posted = list(self._channel.posts.get(_JOINED, {}).items())
        return {rank: (first, late) for rank, (number, first, late) in posted if number > self._round}

    def missed(self) -> dict[int, list[list[Any]]]:
        """Return by rank the operations in its last announcement of this round, each as number, text, and whether a joined rank
        may take part."""
        posted = list(self._channel.posts.get(_CALLS, {}).items())
        return {rank: missed for rank, (number, missed) in posted if number == self._round}

    def resume(self, first: int) -> None:
        """End the round before operation `first`, when all ranks have joined and none needs the announcements any more."""
        self._round += 1
        self._begun = first
        self.on_change = None
        self._channel.reset_has_news()
        self.note_news()  # some may have joined the next round already


def _since_met(entries: list[tuple[int, str, bool]]) -> list[tuple[int, str, bool]]:
    """Return the entries that some rank may still need. An allowed operation needs all ranks, so if another operation follows
    it, all ranks have taken part in it and in all before it."""
    met = [place for place, entry in enumerate(entries[:-1]) if entry[-1]]
    return entries[met[-1] + 1 :] if met else entries


@dataclass(frozen=True)
class WantedOperation:
    """An operation in which others wait for this joined rank: its number, and the text of its call."""

    sequence: int
    call: str

    @property
    def verb(self) -> str:
        """Return the name of the method of Communicator."""
        return self.call.partition("(")[0]

    @property
    def numel(self) -> int:
        """Return the number of elements of all tensors."""
        count = sum if self.verb in _PARTS else math.prod
        return sum(count(shape) for _, shape, _ in tensors_of(self.call))


class Absence:
    """Lets this rank join, on one Communicator, and take part with zeros until all ranks have joined.

    Joined ranks take part in sums, averages and barriers; another verb raises PeerJoined on the ranks that have not joined, and
    has no other effect. Call in this order: leave(); stand_in() whenever wanted() returns an operation, until everyone_left;
    then, when all ranks know of that, resume(). It costs nothing before the first rank leaves.

    verbs: the Communicator.
    """

    def __init__(self, verbs: Any, engine: Engine) -> None:
        self._verbs = verbs
        self._operations = engine.operations
        self._joined = engine.operations.monitor.joined
        self._channel = engine.channel

    @property
    def timeout_s(self) -> float:
        """Return the seconds that each operation may take."""
        return self._operations.timeout_s

    @property
    def is_usable(self) -> bool:
        """Return whether the Communicator is neither closed nor broken, as far as this rank has noticed."""
        return self._operations.usable

    @property
    def has_failed(self) -> bool:
        """Return whether an operation on this rank has failed, so that the Communicator is broken."""
        return self._operations.monitor.failure is not None

    @property
    def everyone_left(self) -> bool:
        """Return whether all ranks have joined."""
        return len(self._joined.ranks()) == self._channel.size

    @property
    def firsts(self) -> Mapping[int, int]:
        """Return the number of the first operation that each joined rank did not call itself, by rank."""
        return {rank: first for rank, (first, _) in self._joined.ranks().items()}

    @property
    def last(self) -> int:
        """Return the joined rank that took part in most operations before; of several, the last one by their clocks."""
        joined = self._joined.ranks()
        return max(joined, key=lambda rank: (joined[rank][1], rank))

    @property
    def is_broken(self) -> bool:
        """Return whether some rank has failed in an operation, or ended, or this rank has lost its connections to the
        others. Every further operation then raises an error that says why."""
        return bool(self._channel.reports or self._channel.lost or self._channel.failure)

    @property
    def has_leavers(self) -> bool:
        """Return whether some rank closes the Communicator."""
        return bool(self._channel.left)

    def allow(self, allows: Callable[[str], bool]) -> None:
        """Set the function that decides, by a call's text, whether a joined rank may take part. It must be the same on all
        ranks."""
        self._joined.allows = allows

    def leave(self, on_change: Callable[[], object]) -> None:
        """Finish the operations that this rank has issued, and post that it gives zeros from now on. on_change: called on
        another thread whenever there may be news."""
        self._operations.settle()
        self._joined.on_change = on_change
        self._joined.join(self._operations.queue.issued)

    def fail(self) -> None:
        """Raise the failure of other ranks, if is_broken or has_leavers."""
        self._operations.fail()

    def wanted(self) -> WantedOperation | None:
        """Return the operation that this rank must begin next, if others have announced it or a later one; else None.

        An operation that is not allowed is returned only when all ranks that have not joined are in it, so that all of them
        know that it is refused.
        """
        sequence = self._operations.queue.issued
        joined = self._joined.ranks()
        missed = [each for rank, each in self._joined.missed().items() if rank not in joined]
        there = [each for each in missed if each[-1][0] >= sequence]
        entries = [entry for each in there for entry in each if entry[0] == sequence]
        if there and (any(entry[-1] for entry in entries) or len(there) + len(joined) == self._channel.size):
            return WantedOperation(sequence, entries[0][1] if entries else "an unknown operation")
        return None

    def stand_in(self, wanted: WantedOperation, device: torch.device) -> None:
        """Take part in an operation with zeros. device: where they lie, if the others' numbers are on one of its kind; else on
        any of theirs. Raises what the verb raises, and RuntimeError for an operation that was not fully announced."""
        if not _call_with_zeros(self._verbs, wanted.call, device):
            rank = self._channel.rank
            raise RuntimeError(
                f"rank {rank}: has joined, and cannot take part in operation {wanted.sequence}: {wanted.call}"
            )

    def resume(self) -> None:
        """End the absence: this rank calls operations itself again. No operation may be under way."""
        self._joined.resume(self._operations.queue.issued)


def _call_with_zeros(verbs: Any, call: str, device: torch.device) -> bool:
    """Make a call of the other ranks with zeros. Return False, with nothing done, for a verb that is not known here. Arguments:
    see Absence.stand_in()."""
    verb, given = call.partition("(")[0], arguments_of(call)
    options: dict[str, Any] = {"algorithm": given["algorithm"][0] if len(set(given["algorithm"])) == 1 else "auto"}
    for name in given.keys() & {"src", "dst", "step", "prescale", "postscale"}:
        options[name] = ast.literal_eval(given[name][0].partition("=")[2])
    if "op" in given:
        (options["op"],) = given["op"]
    if "codec" in given:
        options["compression"] = _codec_of(given["codec"][0])

    def zeros(dtype: str, shape: list[int], kind: str) -> Tensor:
        place = device if device.type == kind else torch.device(kind)
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=place)

    described = tensors_of(call)
    if verb in _PARTS:
        ((dtype, lengths, kind),) = described
        parts, mine = [zeros(dtype, [length], kind) for length in lengths], zeros(dtype, [lengths[verbs.rank]], kind)
        if row := _ROW.search(call):
            shape = ast.literal_eval(f"[{row[1]}]")
            parts[0] = zeros(dtype, [lengths[0] // max(1, math.prod(shape)), *shape], kind)
        verbs.allgather(parts, mine, **options) if verb == "allgather" else verbs.reduce_scatter(mine, parts, **options)
        return True
    tensors = [zeros(*each) for each in described]
    if verb == "allreduce" and "codec" in given:
        (tensor,) = tensors
        if "error feedback" in given:
            options["feedback"] = verbs.new_feedback(options["compression"], tensor.numel(), tensor.device)
        verbs.allreduce(tensor, **options)
    elif verb == "allreduce":
        verbs.grouped_allreduce(tensors, **options)
    elif verb in ("gather", "scatter"):
        (tensor,) = tensors
        is_root = verbs.rank == options.get("dst", options.get("src"))
        getattr(verbs, verb)(tensor, [tensor.clone() for _ in range(verbs.size)] if is_root else None, **options)
    elif verb == "alltoall" and not tensors:  # with splits, of which this rank's are zeros
        nothing, splits = zeros(given["dtype"][0], [0], given.get("device", ["cpu"])[0]), [0] * verbs.size
        verbs.alltoall(nothing, nothing.clone(), splits, splits, **options)
    elif verb in ("alltoall", "broadcast", "reduce", "barrier"):
        getattr(verbs, verb)(*tensors, *(each.clone() for each in tensors if verb == "alltoall"), **options)
    else:
        return False
    return True


def tensors_of(call: str) -> list[tuple[str, list[int], str]]:
    """Return the dtype, shape and device type of each tensor in the text of a call."""
    return [(dtype, ast.literal_eval(shape), kind or "cpu") for dtype, shape, kind in _TENSOR.findall(call)]


def _codec_of(identity: str) -> Codec:
    """Return the codec whose identity this is, such as 'int8(block=256)'."""
    name, _, settings = identity.partition("(")
    read: Any = ast.parse(f"_({settings}", mode="eval").body
    # The step is an argument of the call: with it, this call would not be the one that the other ranks know.
    return CODECS[name](**{each.arg: ast.literal_eval(each.value) for each in read.keywords if each.arg != "step"})
