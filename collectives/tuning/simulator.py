"""Predict the time of the programs of all ranks, by a walk through them instead of a closed formula.

The walk follows every rank's Program in the order of time. A message occupies a processor at both ends, its connection, and one
direction of the two hosts' uplinks, which the ranks of a host share, first come first served. Ranks that share cores wait for a
free one. So contention, pipelining and idle links follow from the programs themselves.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from typing import Any, NamedTuple

from gradwire.collectives.schedules.program import Instruction, Kind, Program
from gradwire.collectives.tuning.cost_model import Costs, LinkCost

#: From this many segments on, the pipeline is full, and each further one takes the same time. Two such lengths are simulated,
#: and longer times are extrapolated.
_SHORT, _LONG = 5, 9

#: Kinds of instructions as plain integers: Kind.SEND takes longer to look up than to compare.
_SEND, _RECEIVE, _POST, _WAIT = map(int, (Kind.SEND, Kind.RECEIVE, Kind.POST, Kind.WAIT))
_REDUCE, _ENCODE, _COMPLETE = map(int, (Kind.REDUCE, Kind.ENCODE, Kind.COMPLETE))


class Leg(NamedTuple):
    """One of the Programs that a rank runs in a call. itemsize: bytes of an element. codec: the codec's identity, if the
    Program moves codes. code_bytes: returns the size of the code of a given number of elements."""

    program: Program
    itemsize: int
    codec: str = ""
    code_bytes: Callable[[int], int] | None = None

    def nbytes(self, length: int) -> int:
        """Return the bytes of a message of so many elements."""
        return length * self.itemsize if self.code_bytes is None else self.code_bytes(length)


def in_segments(count: int, simulated: Callable[[int], float]) -> float:
    """Return the seconds of `count` segments. simulated: returns the seconds of a number of segments. It is called for at most
    _LONG segments, which fill the pipeline; longer times are extrapolated."""
    if count <= _LONG:
        return simulated(count)
    short_s, long_s = simulated(_SHORT), simulated(_LONG)
    return long_s + (count - _LONG) * (long_s - short_s) / (_LONG - _SHORT)


def busiest_uplink_s(costs: Costs, legs: Sequence[Sequence[Leg]]) -> float:
    """Return the seconds that the busiest uplink needs for the bytes of programs, in the direction with more of them. legs: by
    rank."""
    host = {rank: index for index, ranks in enumerate(costs.hosts) for rank in ranks}
    moved: dict[tuple[int, int], int] = defaultdict(int)  # by direction and host
    for rank, of_rank in enumerate(legs):
        for leg in of_rank:
            for message in leg.program:
                ends = host[rank], host[message.peer]
                if message.kind == _SEND and ends[0] != ends[1]:
                    for direction, end in enumerate(ends):
                        moved[direction, end] += leg.nbytes(message.length)
    return max((nbytes * costs.uplinks[end] for (_, end), nbytes in moved.items()), default=0.0)


Alike = Callable[[int, int], tuple[int, int]]


def price(
    costs: Costs, legs: Sequence[Sequence[Leg]], alike: Alike = lambda sender, receiver: (sender, receiver)
) -> float:
    """Return the seconds until every rank has finished its programs, which it runs one after the other.

    legs: by rank. If every rank behaves like one of the first few ranks, the legs of these suffice. `alike` then takes the
    sender (one of the first ranks) and the receiver of a message, and returns the sender and receiver of the equivalent message
    whose receiver is one of the first ranks.
    """
    seconds = costs.call_s + max(_Simulation(costs, legs, alike).run(), default=0.0)
    # A link that allows bursts saves up for the next call while it idles. But it carries all calls at its lasting rate.
    return max(seconds, busiest_uplink_s(costs, legs)) if costs.burst_bytes else seconds


class _Simulation:
    """A run of the programs of all ranks. Times are in seconds from the beginning."""

    def __init__(self, costs: Costs, legs: Sequence[Sequence[Leg]], alike: Alike) -> None:
        self._costs = costs
        self._alike = alike
        self._ranks = [self._steps(rank, of_rank) for rank, of_rank in enumerate(legs)]
        self._clocks = [0.0] * len(legs)
        self._host = {rank: index for index, host in enumerate(costs.hosts) for rank in host}
        self._slow = {pair: link.byte_s for link in costs.slow_links for pair in (link.pair, link.pair[::-1])}
        # The times when shared resources are free again; cores only if they are fewer than their ranks. Links that allow bursts
        # have saved up for one: this many seconds of their rate.
        self._saved = [costs.burst_bytes * uplink for uplink in costs.uplinks]
        self._up, self._down = [0.0] * len(self._saved), [0.0] * len(self._saved)
        self._connections: dict[tuple[int, int], float] = defaultdict(float)
        self._cores: dict[int, list[float]] = {}
        for ranks, number in costs.cores:
            if number < len(ranks):
                self._cores.update(dict.fromkeys(ranks, [0.0] * number))
        # The next events: (time, rank), or for a message between hosts whose first byte reaches the receiver's uplink, (time,
        # -1, its number, channel, bytes, the time when its last byte has left).
        self._ready: list[tuple[Any, ...]] = [(0.0, rank) for rank in range(len(legs))]
        self._numbers = itertools.count()
        # By channel (sender, receiver, leg, segment): the sent messages, in order, and the rank that waits for a message that
        # is not sent yet.
        self._arrivals: dict[tuple[int, ...], deque[tuple[float, int]]] = defaultdict(deque)
        self._blocked: dict[tuple[int, ...], int] = {}

    def run(self) -> list[float]:
        """Return the time when each rank has finished."""
        ready, clocks = self._ready, self._clocks
        while ready:
            clock, rank, *message = heappop(ready)
            if message:
                self._arrive(clock, *message)
                continue
            clocks[rank] = max(clocks[rank], clock)
            if next(self._ranks[rank], False):
                heappush(ready, (clocks[rank], rank))
        assert not self._blocked, "a program waits for a message that nobody sends"
        return clocks

    def _steps(self, rank: int, legs: Sequence[Leg]) -> Iterator[bool]:
        """Follow a rank's instructions. Yield True when its clock has passed the next event, and False when it waits."""
        clocks, ready = self._clocks, self._ready
        for index, leg in enumerate(legs):
            sent: dict[int, float] = {}
            expected: dict[int, tuple[int, ...]] = {}
            outgoing: list[Instruction] = []
            for instruction in leg.program:
                kind, number = instruction.kind, instruction.number
                if kind == _SEND:
                    outgoing.append(instruction)
                elif kind == _RECEIVE:
                    expected[number] = (instruction.peer, rank, index, instruction.segment)
                elif kind == _POST:
                    for message in outgoing:
                        to = (*self._alike(rank, message.peer), index, message.segment)
                        sent[message.number] = self._send(rank, to, leg.nbytes(message.length))
                    outgoing.clear()
                elif kind != _WAIT:
                    self._compute(rank, self._seconds(leg, instruction))
                elif number in sent:
                    clocks[rank] = max(clocks[rank], sent.pop(number))
                else:
                    channel = expected.pop(number)
                    arrived = self._arrivals[channel]
                    if not arrived:
                        self._blocked[channel] = rank
                        yield False
                    link = self._link(channel[0], rank)
                    when, nbytes = arrived[0]
                    taking = nbytes * link.byte_cpu_s  # most of the message is copied before the last byte arrives
                    clocks[rank] = max(clocks[rank], when - taking)
                    if ready and clocks[rank] > ready[0][0]:  # another rank may use the processor first
                        yield True
                    arrived.popleft()
                    self._compute(rank, link.message_cpu_s + taking)
                if ready and clocks[rank] > ready[0][0]:
                    yield True

    def _seconds(self, leg: Leg, instruction: Instruction) -> float:
        """Return a processor's time for an instruction that moves no message."""
        nbytes = instruction.length * leg.itemsize
        if instruction.kind == _REDUCE:
            return nbytes * self._costs.reduce_byte_s
        if instruction.kind == _COMPLETE:
            return 0.0
        codec = self._costs.codec(leg.codec)
        return nbytes * (codec.encode_byte_s if instruction.kind == _ENCODE else codec.decode_byte_s)

    def _compute(self, rank: int, seconds: float) -> float:
        """Occupy a processor, from the rank's own clock on. Return the time when it is free again."""
        seconds *= self._costs.slowness[rank]
        begin = self._clocks[rank]
        cores = self._cores.get(rank)
        if cores is not None:
            begin = max(begin, cores[0])
            heapreplace(cores, begin + seconds)
        self._clocks[rank] = begin + seconds
        return begin + seconds

    def _link(self, sender: int, receiver: int) -> LinkCost:
        return self._costs.inside if self._host[sender] == self._host[receiver] else self._costs.between

    def _send(self, rank: int, channel: tuple[int, ...], nbytes: int) -> float:
        """Send a message. Return the time when its last byte has left. channel: of the message, or of the equivalent one (see
        price)."""
        pair = sender, receiver = channel[0], channel[1]
        link, costs = self._link(sender, receiver), self._costs
        copied = self._compute(rank, link.message_cpu_s + nbytes * link.byte_cpu_s)
        begin = max(copied - nbytes * link.byte_cpu_s, self._connections[pair])
        host, other = self._host[rank], self._host[receiver]
        byte_s = self._slow.get(pair, link.byte_s)
        if self._host[sender] == other:
            left = max(copied, begin + nbytes * byte_s)
            self._hand_over(channel, left + link.latency_s, nbytes)
        else:
            self._up[host] = max(begin, self._up[host]) + nbytes * costs.uplinks[host]
            left = max(copied, self._up[host] - self._saved[host])
            if byte_s > costs.uplinks[host]:
                left = max(left, begin + nbytes * byte_s)
            comes = max(begin + link.latency_s, left + link.latency_s - nbytes * costs.uplinks[host])
            heappush(self._ready, (comes, -1, next(self._numbers), channel, nbytes, left))
        self._connections[pair] = left
        return left

    def _arrive(self, comes: float, _: int, channel: tuple[int, ...], nbytes: int, left: float) -> None:
        """Occupy the receiving host's uplink with a message; messages use it in the order in which they reach it."""
        host = self._host[channel[1]]
        self._down[host] = max(comes, self._down[host]) + nbytes * self._costs.uplinks[host]
        arrived = max(left + self._costs.between.latency_s, self._down[host] - self._saved[host])
        self._hand_over(channel, arrived, nbytes)

    def _hand_over(self, channel: tuple[int, ...], arrived: float, nbytes: int) -> None:
        self._arrivals[channel].append((arrived, nbytes))
        if (blocked := self._blocked.pop(channel, None)) is not None:
            heappush(self._ready, (self._clocks[blocked], blocked))
