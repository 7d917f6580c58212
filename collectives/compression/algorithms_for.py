"""Which codec may ride which algorithm of allreduce, and what that costs.

What an exchange of codes loses grows with how often a number is encoded on its way. 'two_shot' encodes twice whatever the
number of ranks: its schedule is `direct`, inside hosts after plain sums where ranks share hosts and there are several.
'one_shot' is the same with a single round: every rank sends its code to all others, of p ranks p/2 times the bytes, and nothing
is encoded again. Any other schedule encodes each partial sum that it sends: `gradwire.collectives.check_algorithm` counts how
often, the table is in docs/guides/compression.md. The error of encoding a partial sum is not kept, so error feedback, and codecs
that remember anything from step to step, need one of the two: which, the codec says. Codes that can be added as they are (fp16,
bf16, randomk, none) ride the other algorithms as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.plan.algorithms import BETWEEN_HOSTS, PLANNERS, direct
from gradwire.collectives.plan.schedule import Planner

ONE_SHOT = "one_shot"
TWO_SHOT = "two_shot"


def shot_of(codec: Codec) -> str:
    """Return 'one_shot' or 'two_shot', whichever is the one for a codec: the algorithm that 'auto' runs for codes that cannot be
    added as they are, and the only one that encodes with error feedback."""
    return ONE_SHOT if codec.one_shot else TWO_SHOT


def algorithms_for(codec: Codec, algorithms: Sequence[str], *, with_feedback: bool) -> tuple[str, ...]:
    """Return those that a codec may ride: first what shot_of() says, the best of those that encode, then algorithms of allreduce.
    algorithms: the names that allreduce has."""
    if codec.summable:
        return (shot_of(codec), *algorithms)
    if with_feedback or codec.needs_feedback or codec.new_state(1, torch.device("cpu")) is not None:
        return (shot_of(codec),)
    return (shot_of(codec), *(name for name in algorithms if name in PLANNERS["allreduce"]))


@dataclass(frozen=True)
class Ride:
    """Says how codes travel in an allreduce by some algorithm.

    planner: makes the schedule of the ranks that exchange codes. by_hosts: whether ranks of one host first sum their numbers, as
    they are. encodes_sums: whether the sum over all ranks is encoded in its turn, since ranks are sent it; False where each rank
    is sent the codes of all others, and adds them up by itself.
    """

    planner: Planner
    by_hosts: bool
    encodes_sums: bool


def ride(algorithm: str) -> Ride:
    """Return how codes travel in an allreduce by an algorithm: 'one_shot', 'two_shot', or one that has a planner. Raises KeyError
    for what has none, as what a link does by itself."""
    if algorithm == ONE_SHOT:
        return Ride(direct.one_shot, by_hosts=True, encodes_sums=False)
    if algorithm == TWO_SHOT:
        return Ride(direct.allreduce, by_hosts=True, encodes_sums=True)
    if algorithm in BETWEEN_HOSTS:
        return Ride(BETWEEN_HOSTS[algorithm], by_hosts=True, encodes_sums=True)
    return Ride(PLANNERS["allreduce"][algorithm], by_hosts=False, encodes_sums=True)
