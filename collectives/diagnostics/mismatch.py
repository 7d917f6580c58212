"""Whether all ranks call the same: compared before any data moves when a call is new, and while they wait when it is not.

Over link.watch, each rank posts what it calls under which number. A call that all ranks have once agreed upon is known: it is
only looked up. As agreements come in the order of the operations, all ranks know the same calls, and forget them alike. When
calls are known on some ranks only, or all are known and differ, those that run them have begun to move data: such a rank
compares what others have posted with the calls that it remembers, and answers.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from gradwire.collectives.errors import LinkError, Mismatch
from gradwire.collectives.link.watch import Watch
from gradwire.collectives.reduction import COMBINE

#: How long ranks that know that they differ wait for the others to post what they called.
GRACE_S = 1.2

#: How many calls are known at most; then all are forgotten.
_MOST_KNOWN = 4096

#: How many of its calls are in a rank's latest post. A rank can be past what another one still compares.
_POSTED = 4

#: How often a wait looks for what is no news, and how often while messages of this rank move only when it is nudged.
_LOOK_S, _NUDGE_S = 0.1, 0.001

_TOPIC = "calls"

#: What a rank that has joined calls where it only wants to know what has failed: it agrees with any other call.
ANY_CALL = "join()"

#: One argument of a call: up to the next comma that is in no brackets.
_ARGUMENT = re.compile(r"(?:[^,\[(]|\[[^\]]*\]|\([^)]*\))+")
_TENSOR = re.compile(r"(\w+)(\[.*\])")

#: What some arguments mean.
_MEANINGS = {"splits": "shape", "error feedback": "error feedback", **dict.fromkeys(COMBINE, "op")}

#: What the ranks choose by dtype, shape or codec: where these differ, a difference here says nothing.
_FOLLOWS = "algorithm"


class Call(NamedTuple):
    """One rank's call. sequence: the operation's number. text: what all ranks must call alike. place: where in the user's code,
    as 'file:line'; empty where that is not known. moved: whether data may have moved."""

    sequence: int
    text: str
    place: str = ""
    moved: bool = False


def first_difference(calls: Iterable[tuple[int, Call]], after: int = -1) -> dict[int, Call]:
    """Return each rank's call in the first operation beyond number `after` in which they differ; nothing where none does. calls:
    (rank, call); of two of one rank, that with a place counts."""
    by_sequence: dict[int, dict[int, Call]] = defaultdict(dict)
    for rank, call in calls:
        if call.sequence > after and call.text != ANY_CALL:
            known = by_sequence[call.sequence]
            if rank not in known or not known[rank].place:
                known[rank] = call
    return next((found for _, found in sorted(by_sequence.items()) if len({c.text for c in found.values()}) > 1), {})


def mismatch(calls: Mapping[int, Call], rank: int, operation: str) -> Mismatch:
    """Return the error for calls, by rank, that differ."""
    texts = {caller: call.text for caller, call in calls.items()}
    places = {caller: call.place for caller, call in calls.items() if call.place}
    return Mismatch(texts, rank=rank, operation=operation, places=places, differing=differing(texts.values()))


def differing(calls: Iterable[str]) -> list[str]:
    """Return what is not the same in all calls, such as ["dtype", "shape"]; ["the verb"] where they are of several."""
    distinct = list(dict.fromkeys(calls))
    if len({call.partition("(")[0] for call in distinct}) > 1:
        return ["the verb"]
    read = [_read(call) for call in distinct]
    names = dict.fromkeys(name for each in read for name in each)
    found = [name for name in names if len({tuple(each.get(name, ())) for each in read}) > 1]
    return [name for name in found if name != _FOLLOWS] or found


def _read(call: str) -> dict[str, list[str]]:
    """Return the arguments of a call such as 'allreduce(float32[6], sum, prescale=2.0, ring, int8(block=256))', by what they
    are."""
    read: dict[str, list[str]] = defaultdict(list)
    for argument in map(str.strip, _ARGUMENT.findall(call.partition("(")[2].removesuffix(")"))):
        if tensor := _TENSOR.fullmatch(argument):
            read["dtype"].append(tensor[1])
            read["shape"].append(tensor[2])
            continue
        name = _MEANINGS.get(argument, _FOLLOWS)
        if isinstance(getattr(torch, argument, None), torch.dtype):
            name = "dtype"
        elif argument.endswith(")"):
            name = "codec"
        elif "=" in argument:
            name = argument.partition("=")[0]
        read[name].append(argument)
    return read


class Agreement:
    """What the ranks of one Communicator call, as far as this rank knows.

    Attributes: known, the signatures that all ranks have agreed upon; settled, the number of the last operation in which ranks
    differed and no harm was done.
    """

    def __init__(self, watch: Watch) -> None:
        self.known: set[str] = set()
        self.settled = -1
        self._watch = watch
        self._said: list[Call] = []
        self._hear_by = math.inf  # until when to wait for the calls of others, once it is known that they differ
        self._lock = threading.Lock()

    def say(self, call: Call) -> None:
        """Post what this rank calls, unless it has posted a call of that number before."""
        with self._lock:
            if all(said.sequence != call.sequence for said in self._said):
                self._said = [*self._said[1 - _POSTED :], call]
                self._watch.post(_TOPIC, self._said)

    def said(self) -> list[tuple[int, Call]]:
        """Return what all ranks have posted, as (rank, call)."""
        posts = list(self._watch.posts.get(_TOPIC, {}).items())
        return [(rank, Call(*fields)) for rank, calls in posts for fields in calls]

    def agree(self, call: Call, deadline: float, nudge: Callable[[], bool], in_vain: Callable[[], bool]) -> None:
        """Return when all ranks have posted this call.

        nudge: moves what this rank has under way, and returns whether there is anything. in_vain: returns whether some rank will
        never post its call. Raises Mismatch where ranks differ and no data has moved, on all of them alike, and LinkError
        where they differ in a worse way, or not all came before the deadline.
        """
        self.say(call)
        everyone = self._watch.others | {self._watch.rank}

        def heard() -> tuple[dict[int, Call], set[int], bool]:
            """Return who called what under this number, who has not come so far, and whether they differ."""
            said = self.said()
            calls = {rank: each for rank, each in said if each.sequence == call.sequence}
            passed = {rank for rank, each in said if each.sequence > call.sequence}  # what it saw was agreement
            missing = everyone - calls.keys() - passed
            return calls, missing, any(each.text != call.text for each in calls.values())

        def wait(until: float, *, for_all: bool) -> None:
            """Wait for the calls of others: for all of them, or until it is known that some will not come or differ."""

            def is_over() -> bool:
                _, missing, differ = heard()
                is_clear = not for_all and (differ or bool(missing & self._watch.lost.keys()))
                return not missing or is_clear or in_vain()

            while not is_over() and (left_s := until - time.monotonic()) > 0:
                self._watch.wait_for(is_over, min(left_s, _NUDGE_S if nudge() else _LOOK_S))

        wait(deadline, for_all=False)
        if heard()[2]:
            wait(min(deadline, time.monotonic() + self.patience_s()), for_all=True)
        calls, missing, differ = heard()
        if differ and not missing and not any(each.moved for each in calls.values()):
            self.settled = call.sequence
            self._hear_by = math.inf
            raise mismatch(calls, self._watch.rank, call.text)
        if differ:
            raise LinkError(None, timed_out=False, detail="ranks called different operations")
        if missing:
            detail = "some ranks did not report their call"
            raise LinkError(None, timed_out=time.monotonic() >= deadline, detail=detail, awaited=missing)

    def take(self, signature: str) -> None:
        """Know a call from now on, by what makes it new."""
        if len(self.known) == _MOST_KNOWN:
            self.known.clear()
        self.known.add(signature)

    def differs_from(self, remembered: Mapping[int, str], tell: Callable[[int], Call]) -> bool:
        """Return whether another rank has posted another call than this rank's under the same number. remembered: what this rank
        has run, by number. tell: returns one of them as a Call, with which this rank answers the other."""
        differs = False
        for rank, call in self.said():
            mine = remembered.get(call.sequence)
            if rank != self._watch.rank and call.sequence > self.settled and mine not in (None, ANY_CALL):
                if mine != call.text or all(said.sequence < call.sequence for said in self._said):
                    self.say(tell(call.sequence))
                differs = differs or mine != call.text
        return differs

    def patience_s(self) -> float:
        """Return for how many seconds more to wait for the calls of others, now that it is known that they differ."""
        now = time.monotonic()
        self._hear_by = min(self._hear_by, now + GRACE_S)
        return max(0.0, self._hear_by - now)

    def places(self, call: Call) -> dict[int, str]:
        """Return where each rank made a call that all are in; only of those that post it in time."""
        self.say(call)

        def told() -> dict[int, str]:
            return {rank: each.place for rank, each in self.said() if each.sequence == call.sequence and each.place}

        self._watch.wait_for(lambda: len(told()) == self._watch.size, GRACE_S)
        return told()
