"""How buffers are shared out for compressed allreduce, and codes on every algorithm, in Python and compiled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.collectives.compression.algorithms_for import algorithms_for, ride, shot_of
from gradwire.collectives.compression.codec import Codec, Raw, rounding_seed
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
from gradwire.collectives.compression.partition import Partition, effective, partition_of
from gradwire.collectives.compression.registry import CODECS, make_codec
from gradwire.collectives.compression.sparse import DGC, ChunkTopK, RandomK, Threshold
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.coded import CodedProgram
from gradwire.collectives.schedules.schedule import Place, Planner, Schedule
from gradwire.collectives.transports.base import Operation
from gradwire.collectives.transports.codes import CodedNumbers, Codes
from gradwire.collectives.transports.loop import Scratch, execute
from tests.ranks.exact import cover
from tests.shot_model import CPU, ShotModel
from tests.unit.in_process import Hub, InProcessTransport, hosts_of, run_ranks
from tests.unit.over_tcp import Connect, in_time

HOSTS = ([[0]], [[0, 1, 2]], [[0], [1], [2], [3]], [[0, 2], [1, 3]], [[0, 1, 4], [2, 3]], [[0, 3], [1], [2]])


def test_codecs_by_name() -> None:
    assert {"none", "fp16", "int8", "onebit", "topk"} < CODECS.keys()
    assert all(make_codec(name).name == name for name in CODECS)
    codec = Int8(block=128)
    assert make_codec(codec) is codec
    with pytest.raises(ValueError, match=r"'zip'; known are none, fp16.*powersgd"):
        make_codec("zip")
    for near in ("int-8", "Int8", "in8"):
        with pytest.raises(ValueError, match=rf"{near}.*did you mean 'int8'\?.*none, fp16.*powersgd"):
            make_codec(near)
    with pytest.raises(ValueError, match="matrices"):
        make_codec("powersgd")


def test_which_codec_rides_which_algorithm() -> None:
    algorithms = ("ring", "native", "shared")
    ridden = {name: algorithms_for(codec(), algorithms, with_feedback=False) for name, codec in CODECS.items()}
    assert all("native" in ridden[name] for name in ("none", "fp16", "bf16", "randomk"))
    assert all(ridden[name] == ("two_shot",) for name in ("onebit", "topk", "threshold", "dgc"))
    assert ridden["chunktopk"] == ("one_shot",)
    assert ridden["int8"] == ("two_shot", "ring")
    assert algorithms_for(Int8(), algorithms, with_feedback=True) == ("two_shot",)


@given(
    numel=st.integers(0, 5000),
    hosts=st.sampled_from(HOSTS),
    name=st.sampled_from(list(CODECS)),
    segment_bytes=st.integers(1, 4096),
)
def test_shares_cover_the_buffer_once(numel: int, hosts: list[list[int]], name: str, segment_bytes: int) -> None:
    codec = make_codec(name)
    partitions = [partition_of(codec, numel, rank, hosts, segment_bytes) for host in hosts for rank in host]
    by_group = {partition.group: partition for partition in partitions if partition.group}
    pieces = [span for partition in by_group.values() for chunk in partition.chunks for span in chunk if span.length]
    cuts = sorted(pieces)
    assert [span.start for span in cuts] == [0, *(span.stop for span in cuts[:-1])][: len(cuts)]
    assert sum(span.length for span in cuts) == numel
    assert all(span.start % codec.alignment == 0 for span in pieces)
    for partition in partitions:
        assert all(by_group[partition.group].chunks == partition.chunks for _ in partition.group)
        owned = [chunk[partition.group.index(partition.rank)] for chunk in partition.chunks] if partition.group else []
        assert sum(span.length for span in owned) == partition.shard.length


def test_a_gpu_encodes_few_chunks() -> None:
    """A launch costs more than to encode a CPU's chunk."""
    chunks = {
        device_type: len(partition_of(Int8(), 6_500_000, 0, [[0, 1]], 96 << 10, device_type=device_type).chunks)
        for device_type in ("cpu", "cuda")
    }
    assert chunks["cuda"] == 1 < 30 < chunks["cpu"]


def test_seeds_differ() -> None:
    seeds = {
        rounding_seed(step, rank, chunk, shard, shot)
        for step in range(4)
        for rank in range(5)
        for chunk in range(6)
        for shard in range(5)
        for shot in range(2)
    }
    assert len(seeds) == 4 * 5 * 6 * 5 * 2


def test_what_is_shorter_as_it_is_goes_as_it_is() -> None:
    few, many = (partition_of(Int8(), numel, 0, [[0, 1]], 1 << 20) for numel in (8, 800))
    assert effective(Int8(), few).name == "none"
    assert effective(Int8(), many).name == "int8"
    assert effective(DGC(ratio=1.0), many).name == "dgc", "whose momentum is part of the result"


def run_codes(
    transport: Any,
    codec: Codec,
    partition: Partition,
    planner: Planner,
    result: torch.Tensor,
    feedback: Feedback | None = None,
    *,
    step: int = 0,
    memory: Scratch | None = None,
    compiled: bool = False,
    **options: Any,
) -> None:
    """Average a buffer on one rank, by the loop in Python or the compiled one. options: those of the program."""
    size, deadline = len(partition.group), in_time()
    longest = codec.wire_bytes(partition.longest)
    program = CodedProgram(planner(Place(partition.rank, size)), partition.chunks, longest, range(size), **options)
    codes = Codes(program, codec, partition, CPU, memory or Scratch(), Scratch(), divisor=size)
    numbers = CodedNumbers(codes, result, feedback, step, 0)
    if compiled:
        operation = Operation("allreduce", "some", torch.uint8, "cpu", 0, program=program, codes=codes)
        transport.prepare(operation)(numbers, numbers, step, deadline)
    else:
        execute(program, numbers, transport, tag=step, deadline=deadline)


IN_PYTHON = [Int8(stochastic=True), Int4(), Threshold(), RandomK(ratio=0.2), ChunkTopK()]
COMPILED = [
    Float16(), BFloat16(), Float8("e5m2", block=48), Int8(stochastic=True), Int4(), OneBit(), QSGD(), TernGrad(), Natural(),
    ChunkTopK(),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "size", "way"), cover(IN_PYTHON, (1, 2, 3, 5), ("early", "late")), ids=str)
def test_codes_exchanged_in_python_give_the_result_of_the_model(codec: Codec, size: int, way: str) -> None:
    """With messages as early or as late as allowed."""
    hub = Hub(size, eager=way == "early")
    assert_as_the_model([InProcessTransport(hub, rank) for rank in range(size)], codec, compiled=False)


@pytest.mark.parametrize("codec", COMPILED, ids=str)
def test_codes_exchanged_by_the_compiled_loop_give_the_result_of_the_model(connect: Connect, codec: Codec) -> None:
    assert_as_the_model(connect(3), codec, compiled=True)


def assert_as_the_model(transports: Sequence[Any], codec: Codec, *, compiled: bool) -> None:
    size, numel = len(transports), 60_011
    model = ShotModel(codec, numel, [[rank] for rank in range(size)], 200, with_feedback=True)
    assert len(model.partitions[0].chunks) > 5
    how = ride(shot_of(codec))
    feedbacks = [Feedback(codec, partition, CPU) for partition in model.partitions]
    memories = [Scratch() for _ in range(size)]
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        inputs = [torch.randn(numel, generator=generator) for _ in range(size)]
        outputs = [tensor.clone() for tensor in inputs]

        def run(rank: int, step: int = step, outputs: list[torch.Tensor] = outputs) -> None:
            partition = model.partitions[rank]
            run_codes(
                transports[rank], effective(codec.at(step), partition), partition, how.planner, outputs[rank], feedbacks[rank],
                step=step, memory=memories[rank], compiled=compiled, encodes_sums=how.encodes_sums,
            )  # fmt: skip

        run_ranks(size, run)
        expected = model.step(inputs, "average", step)
        assert all(torch.equal(output, expected) for output in outputs)
        assert model.feedbacks is not None
        for mine, wanted in zip(feedbacks, model.feedbacks, strict=True):
            saved = wanted.state_dict()
            assert all(torch.equal(tensor, saved[name]) for name, tensor in mine.state_dict().items())


@dataclass(frozen=True)
class Outside(ChunkTopK):
    """Writes indices beyond the numbers."""

    def _encode(self, values: torch.Tensor, wire: torch.Tensor, *_: object) -> None:
        wire.fill_(255)


def test_a_compiled_loop_finds_an_invalid_code(connect: Connect) -> None:
    transports, codecs, planner = connect(2), (ChunkTopK(), Outside()), ride("one_shot").planner

    def body(rank: int) -> None:
        partition = partition_of(codecs[0], 100, rank, [[0], [1]], 500, planner)
        options = {"compiled": rank == 0, "encodes_sums": False}  # a derived class encodes in Python
        with pytest.raises(ValueError, match="indices"):
            run_codes(transports[rank], codecs[rank], partition, planner, torch.randn(100), **options)

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["none", "int8", "int8, stochastic"])
@pytest.mark.parametrize("algorithm", list(PLANNERS["allreduce"]))
@settings(max_examples=4)
@given(
    size=st.integers(1, 7),
    numel=st.integers(0, 200),
    segment_bytes=st.integers(1, 300),
    eager=st.booleans(),
    lookahead=st.integers(0, 1),
)
def test_codes_ride_every_algorithm(
    name: str, algorithm: str, size: int, numel: int, segment_bytes: int, eager: bool, lookahead: int
) -> None:
    """All ranks have the same bits, of the mean where nothing is lost, and close to it where something is."""
    codec = Raw() if name == "none" else Int8(block=16, stochastic="stochastic" in name)
    hub = Hub(size, eager=eager)
    results = [torch.arange(numel) * 7.0 + 1000 * (rank + 1) for rank in range(size)]
    expected = torch.stack(results).sum(0) / size

    def planner(place: Place) -> Schedule:
        return PLANNERS["allreduce"][algorithm](replace(place, hosts=hosts_of(size)))

    def body(rank: int) -> None:
        partition = partition_of(codec, numel, rank, [range(size)], segment_bytes, planner)
        run_codes(InProcessTransport(hub, rank), codec, partition, planner, results[rank], lookahead=lookahead)

    run_ranks(size, body)
    assert all(torch.equal(result, results[0]) for result in results)
    # Of the last encoding; no other is larger, and the mean is less.
    step = expected.abs().max() / 127 if numel and name != "none" else 0
    assert bool(((results[0] - expected).abs() <= (2 * size + 1) * step).all())


@pytest.mark.parametrize(
    ("algorithm", "sent"), [("one_shot", 12), ("two_shot", 6), ("ring", 6), ("rsag", 6), ("recursive_doubling", 8)]
)
def test_bytes_are_read_off_the_plan(algorithm: str, sent: int) -> None:
    """Count codes of four shards; recursive doubling sends all four twice, one shot to three others."""
    how = ride(algorithm)
    partition = partition_of(Int8(), 4096, 1, [[0, 1, 2, 3]], 1 << 20, how.planner)
    schedule = how.planner(Place(1, 4))
    longest = Int8().wire_bytes(partition.longest)
    program = CodedProgram(schedule, partition.chunks, longest, range(4), encodes_sums=how.encodes_sums)
    assert program.sent_bytes(Int8().wire_bytes) == sent * Int8().wire_bytes(1024)


def test_feedback_is_saved_and_restored() -> None:
    partition = partition_of(DGC(ratio=0.1), 3000, 1, [[0, 1]], 1000)
    first, second = Feedback(DGC(ratio=0.1), partition, CPU), Feedback(DGC(ratio=0.1), partition, CPU)
    for tensor in first.tensors().values():
        tensor.normal_()
    first.step = 7
    saved = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    assert {"worker", "owner", "state.0.0.momentum"} <= saved.keys()
    second.load_state_dict(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in second.state_dict().items())
    assert second.step == 7
    two, three = (partition_of(Int8(), 3000, 0, hosts, 1000) for hosts in ([[0, 1]], [[0, 1, 2]]))
    with pytest.raises(ValueError, match=r"number of ranks: owner have shapes \[\(1536,\)\], not \[\(1024,\)\]"):
        Feedback(Int8(), three, CPU).load_state_dict(Feedback(Int8(), two, CPU).state_dict())
