"""Deadlines and programs for the tests of TcpTransport."""

import time
from collections.abc import Callable

from gradwire.collectives.link.tcp import TcpTransport
from gradwire.collectives.plan.algorithms import PLANNERS
from gradwire.collectives.plan.program import Program
from gradwire.collectives.plan.schedule import Place
from gradwire.collectives.plan.spans import segments_of_buffer

DEADLINE_S = 20.0
SEGMENT = 50  # elements: so few that longer buffers have several segments
Connect = Callable[[int], list[TcpTransport]]


def in_time() -> float:
    return time.monotonic() + DEADLINE_S


def program(algorithm: str, rank: int, size: int, numel: int) -> Program:
    schedule = PLANNERS["allreduce"][algorithm](Place(rank, size))
    return Program(schedule, segments_of_buffer(numel, schedule.blocks, SEGMENT), answered=True)
