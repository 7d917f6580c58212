"""Which codec may ride which algorithm of allreduce, and what that costs.

What an exchange of codes loses grows with how often a number is encoded on its way. 'two_shot' encodes twice whatever the number
of ranks: its schedule is `direct`, inside hosts after plain sums where ranks share hosts and there are several. Any other
schedule encodes each partial sum that it sends: `collectives.check_algorithm` counts how often, the table is in
docs/guides/compression.md. What is lost of partial sums nobody keeps, so error feedback, and codecs that remember anything from
step to step, need 'two_shot'. Codes that can be added as they are (fp16, bf16, randomk, none) ride the other algorithms as
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.compression.codec import Codec
from collectives.plan.algorithms import BETWEEN_HOSTS, PLANNERS, direct
from collectives.plan.schedule import Planner

TWO_SHOT = "two_shot"


def algorithms_for(codec: Codec, algorithms: Sequence[str], *, with_feedback: bool) -> tuple[str, ...]:
    """Return those that a codec may ride: two_shot, the best of those that encode, and of the algorithms of allreduce."""
    if codec.summable:
        return (TWO_SHOT, *algorithms)
    if with_feedback or codec.needs_feedback or codec.new_state(1, torch.device("cpu")) is not None:
        return (TWO_SHOT,)
    return (TWO_SHOT, *(name for name in algorithms if name in PLANNERS["allreduce"]))


def planner_for_codes(algorithm: str) -> tuple[Planner, bool]:
    """Return what ranks follow that exchange codes, and whether those of a host sum their numbers first, as they are."""
    if algorithm == TWO_SHOT:
        return direct.allreduce, True
    if algorithm in BETWEEN_HOSTS:
        return BETWEEN_HOSTS[algorithm], True
    return PLANNERS["allreduce"][algorithm], False
