"""How buffers are shared out for compressed allreduce, and the two-shot on a hostile transport."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.collectives.compression.algorithms_for import algorithms_for, ride, shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dense import Int4, Int8
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.partition import effective, partition_of
from gradwire.collectives.compression.registry import CODECS, make_codec
from gradwire.collectives.compression.seeds import rounding_seed
from gradwire.collectives.compression.sparse import DGC, ChunkTopK, RandomK, Threshold
from gradwire.collectives.engine.executor import Codes, Scratch, execute
from gradwire.collectives.schedules.coded import CodedProgram
from gradwire.collectives.schedules.schedule import Place
from tests.ranks.exact import cover
from tests.shot_model import CPU, ShotModel
from tests.unit.in_process import Hub, InProcessTransport, run_ranks

HOSTS = ([[0]], [[0, 1, 2]], [[0], [1], [2], [3]], [[0, 2], [1, 3]], [[0, 1, 4], [2, 3]], [[0, 3], [1], [2]])


class TestRegistry:
    def test_names(self) -> None:
        assert {"none", "fp16", "int8", "onebit", "topk"} < CODECS.keys()
        assert all(make_codec(name).name == name for name in CODECS)

    def test_codecs_pass(self) -> None:
        codec = Int8(block=128)
        assert make_codec(codec) is codec

    def test_unknown_names_list_the_known(self) -> None:
        with pytest.raises(ValueError, match=r"int9.*none, fp16.*powersgd"):
            make_codec("int9")

    def test_powersgd_is_no_codec_of_buffers(self) -> None:
        with pytest.raises(ValueError, match="matrices"):
            make_codec("powersgd")

    def test_which_codec_rides_which_algorithm(self) -> None:
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


CODED = [Int8(stochastic=True), Int4(), Threshold(), RandomK(ratio=0.2), ChunkTopK()]


@pytest.mark.parametrize(("codec", "size", "eager"), cover(CODED, (1, 2, 3, 5), (True, False)))
def test_every_order_of_messages_gives_the_result_of_the_model(size: int, eager: bool, codec: Codec) -> None:
    numel, hosts = 60_011, [[rank] for rank in range(size)]
    model = ShotModel(codec, numel, hosts, 200, with_feedback=True)
    assert len(model.partitions[0].chunks) > 5
    hub = Hub(size, eager=eager)
    how = ride(shot_of(codec))
    feedbacks = [Feedback(codec, partition, CPU) for partition in model.partitions]
    scratches = [Scratch() for _ in range(size)]
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        inputs = [torch.randn(numel, generator=generator) for _ in range(size)]
        outputs = [tensor.clone() for tensor in inputs]

        def run(rank: int, step: int = step, outputs: list[torch.Tensor] = outputs) -> None:
            partition = model.partitions[rank]
            used = effective(codec.at(step), partition)
            program = CodedProgram(
                how.planner(Place(rank, size)),
                partition.chunks,
                used.wire_bytes(partition.longest),
                range(size),
                encodes_sums=how.encodes_sums,
            )
            memory = scratches[rank], Scratch()
            codes = Codes(program, used, partition, CPU, *memory, divisor=size, via_host=False)
            codes.begin(outputs[rank], feedbacks[rank], step, 0)
            transport = InProcessTransport(hub, rank)
            execute(program, codes, transport, tag=1000 * step, deadline=time.monotonic() + 20)

        run_ranks(size, run)
        expected = model.step(inputs, "average", step)
        assert all(torch.equal(output, expected) for output in outputs)
        assert model.feedbacks is not None
        for mine, wanted in zip(feedbacks, model.feedbacks, strict=True):
            saved = wanted.state_dict()
            assert all(torch.equal(tensor, saved[name]) for name, tensor in mine.state_dict().items())


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


class TestFeedback:
    def test_saved_and_restored(self) -> None:
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

    def test_of_another_world(self) -> None:
        two, three = (partition_of(Int8(), 3000, 0, hosts, 1000) for hosts in ([[0, 1]], [[0, 1, 2]]))
        saved = Feedback(Int8(), two, CPU).state_dict()
        with pytest.raises(ValueError, match=r"number of ranks: owner have shapes \[\(1536,\)\], not \[\(1024,\)\]"):
            Feedback(Int8(), three, CPU).load_state_dict(saved)
