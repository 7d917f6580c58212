"""The check that all ranks make the same call: before any data moves if the call is new, else while ranks wait.

A call on which all ranks have agreed is *known*, and runs without a check. Ranks agree in the order of the operations, so all
ranks know the same calls, and forget them at the same time. For a new call, the ranks reduce a hash of its text over the
connections that carry data. Only if hashes differ, or a call takes long, do ranks post their calls with their numbers over the
Monitor. If ranks make different calls with the same number, those whose call is known may have moved data: ranks compare the
posts of others with the calls that they remember, and answer with their own.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import NamedTuple

import torch

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.errors import LinkError, Mismatch
from gradwire.collectives.reduction import COMBINE

#: How long a rank that knows of a difference waits for the calls of the others.
GRACE_S = 1.2

#: The maximum number of known calls. Before one more is added, all are forgotten.
_MOST_KNOWN = 4096

#: How many of its last calls a rank posts. A rank that compares an earlier call needs that one.
_POSTED = 4

#: Seconds between two checks of a wait, unless news comes first.
_POLL_S = 0.1

#: The bytes of a hash and its complement, by which ranks compare calls.
HASH_BYTES = 16
_COMPLEMENTS = bytes(range(255, -1, -1))

_TOPIC = "calls"

#: Replaces a tensor of HASH_BYTES bytes by its maximum over all ranks.
Maximum = Callable[[torch.Tensor], None]

#: The call with which a joined rank raises a failure that others reported. It agrees with every call.
ANY_CALL = "join()"

#: Matches one argument of a call: up to the next comma outside of brackets.
_ARGUMENT = re.compile(r"(?:[^,\[(]|\[[^\]]*\]|\([^)]*\))+")
_TENSOR = re.compile(r"(\w+)(\[.*\])")
_DEVICE = re.compile(r"([^(]*) on (\w+)")

#: The names of arguments whose text is only the value.
_MEANINGS = {"splits": "shape", "error feedback": "error feedback", **dict.fromkeys(COMBINE, "op")}

#: The argument that follows from dtype, shape and codec, so an error names it only if nothing else differs.
_FOLLOWS = "algorithm"


class Call(NamedTuple):
    """One rank's call. sequence: the operation's number. text: the part that must be equal on all ranks. place: of the
    call in the user's code, as 'file:line'; empty if unknown. moved: whether its data may have moved."""

    sequence: int
    text: str
    place: str = ""
    moved: bool = False


def first_difference(calls: Iterable[tuple[int, Call]], after: int = -1) -> dict[int, Call]:
    """Return each rank's call in the first operation after number `after` whose calls differ; empty if there is none.
    calls: pairs (rank, call); if a rank has several calls with one number, the first that has a place counts."""
    by_sequence: dict[int, dict[int, Call]] = defaultdict(dict)
    for rank, call in calls:
        if call.sequence > after and call.text != ANY_CALL:
            known = by_sequence[call.sequence]
            if rank not in known or not known[rank].place:
                known[rank] = call
    return next((found for _, found in sorted(by_sequence.items()) if len({c.text for c in found.values()}) > 1), {})


def mismatch(calls: Mapping[int, Call], rank: int, operation: str) -> Mismatch:
    """Return the Mismatch for calls that differ. calls: by rank."""
    texts = {caller: call.text for caller, call in calls.items()}
    places = {caller: call.place for caller, call in calls.items() if call.place}
    return Mismatch(texts, rank=rank, operation=operation, places=places, differing=differing(texts.values()))


def differing(calls: Iterable[str]) -> list[str]:
    """Return the names of the arguments that differ, such as ["dtype", "shape"]; ["the verb"] if the verbs differ."""
    distinct = list(dict.fromkeys(calls))
    if len({call.partition("(")[0] for call in distinct}) > 1:
        return ["the verb"]
    read = [arguments_of(call) for call in distinct]
    names = dict.fromkeys(name for each in read for name in each)
    found = [name for name in names if len({tuple(each.get(name, ())) for each in read}) > 1]
    return [name for name in found if name != _FOLLOWS] or found


def arguments_of(call: str) -> dict[str, list[str]]:
    """Return by name the arguments of a call such as 'allreduce(float32[6], prescale=2.0, ring, int8(block=256))'."""
    read: dict[str, list[str]] = defaultdict(list)
    for argument in map(str.strip, _ARGUMENT.findall(call.partition("(")[2].removesuffix(")"))):
        if on := _DEVICE.fullmatch(argument):
            argument = on[1]
            read["device"].append(on[2])
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
    """Compares the calls of one Communicator's ranks.

    Attributes: known, the signatures of the calls on which all ranks have agreed; settled, the number of the last operation in
    which calls differed before any data moved.
    """

    def __init__(self, channel: Channel) -> None:
        self.known: set[str] = set()
        self.settled = -1
        self._channel = channel
        self._own: list[Call] = []
        self._wait_by = math.inf  # when waits for the calls of others end, once calls are known to differ
        self._lock = threading.Lock()

    def post(self, call: Call) -> None:
        """Post a call of this rank, unless the rank has already posted a call with this number."""
        with self._lock:
            if all(own.sequence != call.sequence for own in self._own):
                self._own = [*self._own[1 - _POSTED :], call]
                self._channel.post(_TOPIC, self._own)

    def posted(self) -> list[tuple[int, Call]]:
        """Return the last posted calls of every rank, as pairs (rank, call)."""
        posts = list(self._channel.posts.get(_TOPIC, {}).items())
        return [(rank, Call(*fields)) for rank, calls in posts for fields in calls]

    def agree(self, call: Call, deadline: float, in_vain: Callable[[], bool], *, differs: bool = False) -> None:
        """Post a call, and compare it with those of the other ranks with its number.

        deadline: in time.monotonic() seconds. in_vain: returns whether a wait for posts cannot succeed any more. differs: whether
        the call is known to differ on some rank. Raises Mismatch, on all ranks, if calls differ and no data has moved. Raises
        LinkError if calls differ otherwise, or if calls are still missing at the end.
        """
        self.post(call)
        everyone = self._channel.others | {self._channel.rank}

        def compared() -> tuple[dict[int, Call], set[int], bool]:
            """Return the calls with this number, by rank, the missing ranks, and whether the calls differ."""
            posted = self.posted()
            calls = {rank: each for rank, each in posted if each.sequence == call.sequence}
            passed = {rank for rank, each in posted if each.sequence > call.sequence}  # these ranks have gone on
            missing = everyone - calls.keys() - passed
            return calls, missing, any(each.text != call.text for each in calls.values())

        def wait(until: float, *, for_all: bool) -> None:
            """Wait for the calls of all ranks. Without for_all, stop also if calls differ or a missing rank is lost."""

            def is_over() -> bool:
                _, missing, differ = compared()
                is_clear = not for_all and (differ or bool(missing & self._channel.lost.keys()))
                return not missing or is_clear or in_vain()

            while not is_over() and (left_s := until - time.monotonic()) > 0:
                self._channel.wait_for(is_over, min(left_s, _POLL_S))

        if not differs:
            wait(deadline, for_all=False)
        if differs or compared()[2]:
            wait(min(deadline, time.monotonic() + self.patience_s()), for_all=True)
        calls, missing, differ = compared()
        if differ and not missing and not any(each.moved for each in calls.values()):
            self.settled = call.sequence
            self._wait_by = math.inf
            raise mismatch(calls, self._channel.rank, call.text)
        if differ:
            raise LinkError(None, timed_out=False, detail="ranks called different operations")
        if missing:
            detail = "some ranks did not report their call"
            raise LinkError(None, timed_out=time.monotonic() >= deadline, detail=detail, awaited=missing)

    def take(self, signature: str) -> None:
        """Add the signature of a call to the known ones."""
        if len(self.known) == _MOST_KNOWN:
            self.known.clear()
        self.known.add(signature)

    def differs_from(self, remembered: Mapping[int, str], unagreed: int, call_of: Callable[[int, str], Call]) -> bool:
        """Return whether another rank has posted a different call with a number that this rank remembers, and some data of one
        of both may have moved, or the ranks that agree() waits for do not come.

        Post this rank's own call in answer, unless the calls are equal and this rank has posted one with this number or a later
        one. remembered: the texts of this rank's calls, by number. unagreed: the number of the call that agree() compares now.
        call_of: returns the Call with a number and a text."""
        differs = False
        for rank, call in self.posted():
            text = remembered.get(call.sequence)
            if rank == self._channel.rank or call.sequence <= self.settled or text is None or text == ANY_CALL:
                continue
            if not call.moved and call.sequence == unagreed:
                differs |= text != call.text and self.patience_s() <= 0.0
            elif text != call.text or all(own.sequence < call.sequence for own in self._own):
                if all(own.sequence != call.sequence for own in self._own):
                    self.post(call_of(call.sequence, text))
                differs |= text != call.text
        return differs

    def patience_s(self) -> float:
        """Return the seconds left to wait for the calls of others. The first call after a difference starts this
        wait."""
        now = time.monotonic()
        self._wait_by = min(self._wait_by, now + GRACE_S)
        return max(0.0, self._wait_by - now)

    def places(self, call: Call) -> dict[int, str]:
        """Return by rank the place of a call that all ranks run, for the ranks that post it within GRACE_S seconds."""
        self.post(call)

        def posted_places() -> dict[int, str]:
            return {rank: each.place for rank, each in self.posted() if each.sequence == call.sequence and each.place}

        self._channel.wait_for(lambda: len(posted_places()) == self._channel.size, GRACE_S)
        return posted_places()


def is_equal_everywhere(text: str, maximum: Maximum) -> bool:
    """Return whether all ranks give the same text. The maximum of a byte and that of its complement are complements again if
    the byte is the same on all ranks."""
    half = HASH_BYTES // 2
    given = blake2b(text.encode(), digest_size=half).digest()
    both = bytearray(given + given.translate(_COMPLEMENTS))
    maximum(torch.frombuffer(both, dtype=torch.uint8))
    return both[:half] == both[half:].translate(_COMPLEMENTS)
