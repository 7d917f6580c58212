"""The codecs that each allreduce algorithm supports, and how often each algorithm encodes a number.

The error of an exchange grows with the number of encodings on the way of a number. 'two_shot' encodes a number twice for any
number of ranks: its schedule is `direct`, between hosts if there are several and ranks share them, after plain sums inside the
hosts. 'one_shot' has a single round: every rank sends its code to all other ranks, p/2 times the bytes with p ranks, and
nothing is encoded again. Any other schedule encodes each partial sum that it sends: `encodings()` in `schedules/check.py`
counts how often, and the table is in docs/guides/compression.md. The error of encoding a partial sum is not kept, so error
feedback of other codes, and codecs that keep state from step to step, need 'two_shot' or 'one_shot', whichever the codec
selects. Codes that can be added undecoded (fp16, bf16, randomk, none) use the other algorithms like plain numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.schedules.algorithms import BETWEEN_HOSTS, PLANNERS, direct
from gradwire.collectives.schedules.schedule import Planner

ONE_SHOT = "one_shot"
TWO_SHOT = "two_shot"


def shot_of(codec: Codec) -> str:
    """Return 'one_shot' or 'two_shot', as the codec selects. For codes that cannot be added undecoded, 'auto' runs this
    algorithm, and no other algorithm supports error feedback."""
    return ONE_SHOT if codec.one_shot else TWO_SHOT


def algorithms_for(codec: Codec, algorithms: Sequence[str], *, with_feedback: bool) -> tuple[str, ...]:
    """Return the algorithms that support a codec: first shot_of(), the best of those that encode, then those of `algorithms`,
    the names of all allreduce algorithms."""
    if codec.summable:
        return (shot_of(codec), *algorithms)
    if with_feedback or codec.needs_feedback or codec.keeps_state:
        return (shot_of(codec),)
    return (shot_of(codec), *(name for name in algorithms if name in PLANNERS["allreduce"]))


@dataclass(frozen=True)
class Ride:
    """How an allreduce algorithm exchanges codes.

    planner: makes the schedule of the ranks that exchange codes. by_hosts: whether ranks of one host first sum their numbers
    uncompressed. encodes_sums: whether the sum over all ranks is encoded and sent; False if each rank receives the codes of all
    other ranks, and adds them by itself.
    """

    planner: Planner
    by_hosts: bool
    encodes_sums: bool


def ride(algorithm: str) -> Ride:
    """Return the Ride of an algorithm: 'one_shot', 'two_shot', or one with a planner. Raises KeyError for an algorithm without
    a planner, such as a link's own."""
    if algorithm == ONE_SHOT:
        return Ride(direct.one_shot, by_hosts=True, encodes_sums=False)
    if algorithm == TWO_SHOT:
        return Ride(direct.allreduce, by_hosts=True, encodes_sums=True)
    if algorithm in BETWEEN_HOSTS:
        return Ride(BETWEEN_HOSTS[algorithm], by_hosts=True, encodes_sums=True)
    return Ride(PLANNERS["allreduce"][algorithm], by_hosts=False, encodes_sums=True)
