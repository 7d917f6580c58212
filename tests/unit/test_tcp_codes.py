"""Codes over connections of our own: the compiled loop gives the bits that the one in Python gives."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from gradwire.collectives.compression.algorithms_for import Ride, ride
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dense import (
    QSGD,
    BFloat16,
    Float8,
    Float16,
    Int4,
    Int8,
    Natural,
    OneBit,
    TernGrad,
)
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.partition import partition_of
from gradwire.collectives.compression.sparse import ChunkTopK
from gradwire.collectives.engine.executor import Codes, Scratch, execute
from gradwire.collectives.schedules.coded import CodedProgram
from gradwire.collectives.schedules.schedule import Place
from gradwire.collectives.transports.tcp import TcpTransport
from tests.unit.in_process import run_ranks
from tests.unit.over_tcp import Connect, in_time


def riding(codec: Codec) -> Ride:
    return ride("one_shot" if codec.one_shot else "two_shot")


def run_codes(
    transport: TcpTransport, codec: Codec, feedback: Feedback, result: torch.Tensor, step: int, *, compiled: bool
) -> None:
    """Average a buffer on one rank, by the compiled loop or by the one in Python."""
    size, rank, partition = transport.size, transport.rank, feedback.partition
    how = riding(codec)
    longest = codec.wire_bytes(partition.longest)
    schedule = how.planner(Place(rank, size))
    planned = CodedProgram(schedule, partition.chunks, longest, range(size), encodes_sums=how.encodes_sums)
    memory = Scratch(), Scratch()
    payload = Codes(planned, codec, partition, result.device, *memory, divisor=size, via_host=False)
    payload.begin(result, feedback, step, 3)
    if compiled:
        run = transport.follow_codes(planned, payload)
        assert run is not None
        run(step, in_time())
    else:
        execute(planned, payload, transport, tag=step, deadline=in_time())


CODED = [
    Float16(), BFloat16(), Float8("e5m2", block=48), Int8(stochastic=True), Int4(), OneBit(), QSGD(), TernGrad(), Natural(),
    ChunkTopK(),
]  # fmt: skip


def averaged(
    transports: Sequence[TcpTransport], codec: Codec, *, compiled: bool
) -> tuple[list[torch.Tensor], list[Feedback]]:
    """Each rank's result of the second step, and its error feedback."""
    size, hosts = len(transports), [[rank] for rank in range(len(transports))]
    planner = riding(codec).planner
    partitions = [partition_of(codec, 30_011, rank, hosts, 200, planner) for rank in range(size)]
    assert len(partitions[0].chunks) > 1
    feedbacks = [Feedback(codec, partition, torch.device("cpu")) for partition in partitions]
    generator = torch.Generator().manual_seed(1)
    first, second = ([torch.randn(30_011, generator=generator) for _ in range(size)] for _ in range(2))

    def body(rank: int) -> None:
        for step, results in enumerate((first, second)):
            run_codes(transports[rank], codec, feedbacks[rank], results[rank], step, compiled=compiled)

    run_ranks(size, body)
    return second, feedbacks


@pytest.mark.parametrize("codec", CODED, ids=repr)
def test_a_compiled_program_of_codes_gives_the_bits_that_python_gives(connect: Connect, codec: Codec) -> None:
    transports = connect(3)
    results, feedbacks = averaged(transports, codec, compiled=True)
    in_python, feedbacks_in_python = averaged(transports, codec, compiled=False)
    assert all(map(torch.equal, results, in_python))
    assert all(torch.equal(results[0], each) for each in results)
    for one, other in zip(feedbacks, feedbacks_in_python, strict=True):
        assert torch.equal(one.worker, other.worker)
        assert torch.equal(one.owner, other.owner)


@dataclass(frozen=True)
class Outside(ChunkTopK):
    """Writes indices beyond the numbers."""

    def _encode(self, values: torch.Tensor, wire: torch.Tensor, *_: object) -> None:
        wire.fill_(255)


def test_a_compiled_loop_finds_an_invalid_code(connect: Connect) -> None:
    transports, codecs = connect(2), (ChunkTopK(), Outside())
    assert codecs[1].c_functions() is None, "a derived class encodes by itself"
    raised = []

    def body(rank: int) -> None:
        partition = partition_of(codecs[0], 100, rank, [[0], [1]], 500, riding(codecs[0]).planner)
        feedback = Feedback(codecs[0], partition, torch.device("cpu"))
        with pytest.raises(ValueError, match="indices") as caught:
            run_codes(transports[rank], codecs[rank], feedback, torch.randn(100), 0, compiled=rank == 0)
        raised.append(caught)

    run_ranks(2, body)
    assert len(raised) == 2
