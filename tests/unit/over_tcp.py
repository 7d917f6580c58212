"""Deadlines and programs for the tests of TcpTransport."""

import time
from collections.abc import Callable

import torch

from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Place
from gradwire.collectives.schedules.spans import segments_of_buffer
from gradwire.collectives.transports.base import Operation, Run
from gradwire.collectives.transports.tcp import TcpTransport

DEADLINE_S = 20.0
SEGMENT = 50  # elements: so few that longer buffers have several segments
Connect = Callable[[int], list[TcpTransport]]


def in_time() -> float:
    return time.monotonic() + DEADLINE_S


def program(algorithm: str, rank: int, size: int, numel: int) -> Program:
    schedule = PLANNERS["allreduce"][algorithm](Place(rank, size))
    return Program(schedule, segments_of_buffer(numel, schedule.blocks, SEGMENT), answered=True)


def prepared(transport: TcpTransport, followed: Program, dtype: torch.dtype, op: str = "sum") -> Run:
    """What runs a program on numbers of the CPU."""
    return transport.prepare(Operation("allreduce", "some", dtype, "cpu", 0, op, program=followed))
