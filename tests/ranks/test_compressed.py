"""Compressed allreduce against its model in one process, bit for bit; test_failures.py and test_mismatch.py have its faults."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import Communicator
from gradwire.collectives.compression.algorithms_for import shot_of
from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.dense import Float8, Int4, Int8, OneBit
from gradwire.collectives.compression.registry import CODECS, make_codec
from gradwire.collectives.compression.sparse import DGC, RandomK, TopK
from gradwire.collectives.schedules.algorithms import PLANNERS, hierarchical
from gradwire.collectives.schedules.schedule import Place, Schedule
from tests.harness import ABOVE_TRANSPORTS, EXCHANGE_TIMEOUT_S, Worlds, wide
from tests.ranks.exact import ALLREDUCES, SEVERAL_SEGMENTS, Checks, contribution, cover, on_host, reduced
from tests.ranks.training import on_ranks
from tests.shot_model import ShotModel

SUMMABLE = [name for name in CODECS if CODECS[name].summable and name != "none"]
SEGMENT_BYTES = 2000
LARGE = 100_003

#: All codecs, and settings other than the defaults that take other ways through the code.
COMPRESSING: dict[str, Codec] = {
    **{name: make_codec(name) for name in CODECS if name != "none"},
    "int8, stochastic": Int8(block=64, stochastic=True),
    "int4, stochastic": Int4(stochastic=True),
    "e5m2": Float8(format="e5m2"),
    "onebit, short blocks": OneBit(block=16),
    "topk, half of it": TopK(ratio=0.5),
    "dgc, warming up": DGC(ratio=0.01, ramp_steps=2),
    "randomk, more of it": RandomK(ratio=0.3, seed=7),
}


def communicator(segment_bytes: int = SEGMENT_BYTES) -> Communicator:
    return Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=segment_bytes)


def by_layout(ranks: Worlds, layouts: Sequence[str], check: Callable[[list[Any]], None], rows: list[Any]) -> None:
    """Run a check on worlds whose ranks are on these hosts, each with the rows that begin with it."""
    for layout in layouts:
        ranks(len(layout)).run(on_hosts_of, layout, check, [row[1:] for row in rows if row[0] == layout])


def on_hosts_of(layout: str, check: Callable[[list[Any]], None], rows: list[Any]) -> None:
    with on_host(layout[dist.get_rank()]):
        check(rows)


def elements(numel: int | str, size: int) -> int:
    """Return a number of elements, which may be said by how it differs from the number of ranks."""
    return numel if isinstance(numel, int) else size + int(numel)


def inputs(size: int, numel: int, step: int) -> list[torch.Tensor]:
    """Of every rank: numbers of very different magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(1000 * step + numel)
    numbers = [torch.randn(numel, generator=generator) ** 3 for _ in range(size)]
    for rank, tensor in enumerate(numbers):
        tensor[rank :: 7 + size] = 0
    return numbers


NUMELS = (0, 1, "-1", "+0", "+1", 2999, LARGE)
IN_MANY_CHUNKS = ("int8", "onebit", "topk", "chunktopk", "dgc")


def same_as_model(rows: list[tuple[str, int | str, str, bool]]) -> None:
    with Checks() as checks, communicator() as comm:
        for name, numel, op, with_feedback in rows:
            codec, numel = COMPRESSING[name], elements(numel, comm.size)
            with_feedback &= codec.takes_feedback
            model = ShotModel(codec, numel, comm.topology.hosts, SEGMENT_BYTES, with_feedback=with_feedback)
            feedback = comm.new_feedback(codec, numel) if with_feedback else None
            for step in range(3):
                numbers = inputs(comm.size, numel, step)
                mine = numbers[comm.rank].clone()
                with checks.case(name=name, numel=numel, op=op, feedback=with_feedback, step=step):
                    options = {"compression": codec, "feedback": feedback, "step": step, "seed": numel}
                    comm.allreduce(mine, op, algorithm=shot_of(codec), **options)
                    checks.equal(mine, model.step(numbers, op, step, seed=numel))
                    if feedback is not None and model.feedbacks is not None:
                        wanted = model.feedbacks[comm.rank].tensors()
                        for key, tensor in feedback.tensors().items():
                            checks.equal(tensor, wanted[key])


@ABOVE_TRANSPORTS
@pytest.mark.parametrize(
    "layouts", [("a", "aa", "aaa", "aab", "abaca"), *wide(("aaaaa", "ab", "abab", "aaabb"))], ids="-".join
)
def test_the_shot_equals_its_model(ranks: Worlds, layouts: tuple[str, ...]) -> None:
    """Full precision inside hosts; in many chunks, where the shares are long."""

    def clash(one: object, other: object) -> bool:
        return other == LARGE and one not in (*IN_MANY_CHUNKS, *layouts)

    rows = cover(layouts, [*COMPRESSING], NUMELS, ("sum", "average"), (True, False), clash=clash)
    by_layout(ranks, layouts, same_as_model, rows)


def digests(rows: list[tuple[str, str]], numel: int = 30_011) -> list[str]:
    """Of codecs and algorithms, one of the bits of each result, at the end."""
    found = []
    with communicator() as comm:
        for name, algorithm in rows:
            codec = COMPRESSING[name]
            feedback = comm.new_feedback(codec, numel) if codec.takes_feedback else None
            for step in range(3):
                mine = inputs(comm.size, numel, step)[comm.rank]
                comm.allreduce(
                    mine, compression=codec, feedback=feedback, step=step, algorithm=algorithm, async_op=step == 1
                ).wait()
                found.append(hashlib.sha256(mine.numpy().tobytes()).hexdigest())
    return found


def exact_sums(rows: list[tuple[str, str, str, int | str]]) -> None:
    """Numbers so small that their sums are exact in any float."""
    with Checks() as checks, communicator(200) as comm:
        for name, algorithm, op, numel in rows:
            codec, numel = make_codec(name), elements(numel, comm.size)
            for step in (0, 1):
                mine = contribution(comm.rank, comm.size, numel, torch.float32)
                with checks.case(name=name, algorithm=algorithm, op=op, numel=numel, step=step):
                    feedback = comm.new_feedback(codec, numel)
                    comm.allreduce(mine, op, compression=codec, feedback=feedback, step=step, algorithm=algorithm)
                    expected = reduced(comm.size, numel, torch.float32, op)
                    if name == "randomk":
                        assert bool((mine != 0).any()) or numel == 0
                        expected = torch.where(mine != 0, expected, mine)
                    tolerance = 0.01 if op == "average" and comm.size & (comm.size - 1) else 0
                    if not torch.allclose(mine, expected, rtol=tolerance, atol=0):
                        checks.equal(mine, expected)


@ABOVE_TRANSPORTS
@pytest.mark.parametrize("layouts", [("a", "aaaa")], ids="-".join)
def test_summable_codecs_ride_any_algorithm(ranks: Worlds, layouts: tuple[str, ...]) -> None:
    algorithms = (*ALLREDUCES, "native", "auto", "two_shot")
    rows = cover(layouts, SUMMABLE, algorithms, ("sum", "average"), (0, 1, "+1", SEVERAL_SEGMENTS))
    by_layout(ranks, layouts, exact_sums, rows)
    size = len(layouts[-1])
    found = ranks(size).run(digests, cover(SUMMABLE, algorithms), 10_007)
    assert found == [found[0]] * size


@on_ranks(2, initialized=False)
def test_what_a_summable_codec_leaves_out_is_returned_later() -> None:
    """The codes of all ranks are added as they are, with headroom for the sum, which is exact here."""
    with communicator() as comm:
        for name in SUMMABLE:
            mine = torch.full((40,), 0.0 if comm.rank else 1 / 3)
            feedback, total = comm.new_feedback(name, mine.numel()), torch.zeros_like(mine)
            for _ in range(20):
                result = mine.clone()
                comm.allreduce(result, compression=name, feedback=feedback)
                total += result
            kept = feedback.tensors()["worker"].clone()
            comm.allreduce(kept)
            torch.testing.assert_close(total + kept, torch.full((40,), 20 / 3), rtol=0, atol=1e-5)


@on_ranks(2, initialized=False)
def test_numbers_in_place_of_codes() -> None:
    """What is too short for a code goes as it is, but in the shards of its codec, which differ from codec to codec."""
    with Checks() as checks, communicator() as comm:
        for _ in range(2):
            for codec in (make_codec("fp16"), Int8(), make_codec("natural")):
                mine, feedback = contribution(comm.rank, comm.size, 8, torch.float32), comm.new_feedback(codec, 8)
                with checks.case(codec=codec):
                    comm.allreduce(mine, compression=codec, feedback=feedback, algorithm="two_shot")
                    checks.equal(mine, reduced(comm.size, 8, torch.float32))


def ride_all_algorithms(rows: list[tuple[str, bool, int | str]]) -> None:
    """Codes that are decoded and encoded on their way: the same bits everywhere, near the sum."""
    with Checks() as checks, communicator(400) as comm:
        for algorithm, stochastic, numel in rows:
            numel = elements(numel, comm.size)
            numbers = inputs(comm.size, numel, 0)
            mine, expected = numbers[comm.rank].clone(), torch.stack(numbers).sum(0)
            with checks.case(algorithm=algorithm, stochastic=stochastic, numel=numel):
                codec = Int8(block=16, stochastic=stochastic)
                comm.allreduce(mine, compression=codec, algorithm=algorithm, seed=3)
                first = mine.clone()
                comm.broadcast(first)
                checks.equal(mine, first)
                scale = max((float(tensor.abs().max()) for tensor in numbers if numel), default=0.0)
                assert bool(((mine - expected).abs() <= (2 * comm.size + 1) * comm.size * scale / 127).all())


@ABOVE_TRANSPORTS
@pytest.mark.parametrize("layouts", [("a", "aaa", "aabb", "abaca")], ids="-".join)
def test_codes_ride_all_algorithms(ranks: Worlds, layouts: tuple[str, ...]) -> None:
    rows = cover(layouts, [*PLANNERS["allreduce"]], (False, True), (0, 1, "+1", SEVERAL_SEGMENTS))
    by_layout(ranks, layouts, ride_all_algorithms, rows)


@on_ranks(3, initialized=False)
def test_codes_ride_what_was_registered() -> None:
    """An algorithm that goes by the hosts, and one that cannot plan, which is found before anything is sent."""

    def broken(place: Place) -> Schedule:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PLANNERS["allreduce"], "mine", lambda place: hierarchical.allreduce(place))
        patch.setitem(PLANNERS["allreduce"], "broken", broken)
        with communicator() as comm:
            tensor = torch.ones(999)
            for options in ({}, {"compression": "int8"}, {"compression": "fp16"}):
                with pytest.raises(ZeroDivisionError):
                    comm.allreduce(tensor, algorithm="broken", **options)
                tensor.fill_(1)
                comm.allreduce(tensor, algorithm="mine", **options)
                assert torch.allclose(tensor, torch.full((999,), float(comm.size)), rtol=1e-2)


def poisoned(rows: list[tuple[str, float]]) -> None:
    """One rank has a number that is not finite, once."""
    numel, at = 4001, 1234
    with Checks() as checks, communicator() as comm:
        for name, value in rows:
            codec = COMPRESSING[name]
            for algorithm in ("auto", shot_of(codec)):
                feedback = comm.new_feedback(codec, numel) if codec.takes_feedback else None
                options = {"compression": codec, "feedback": feedback, "algorithm": algorithm}
                for step in range(3):
                    mine = inputs(comm.size, numel, step)[comm.rank]
                    if step == 1 and comm.rank == comm.size - 1:
                        mine[at] = value
                    comm.allreduce(mine, "average", step=step, **options)
                    case = f"{name}, {value}, {algorithm}, step {step}"
                    if bool(mine.isfinite().all()) != (step != 1):
                        checks.failures.append(f"{case}: {int((~mine.isfinite()).sum())} not finite")
                    if step == 1 and bool(mine[at].isfinite()) and "randomk" not in name:
                        checks.failures.append(f"{case}: finite where it was not")
                kept = {} if feedback is None else feedback.state_dict()
                infinite = [key for key, tensor in kept.items() if not bool(tensor.isfinite().all())]
                checks.failures += [f"{name}, {value}, {algorithm}: {key}" for key in infinite]


def test_not_a_number_reaches_every_rank(ranks: Worlds) -> None:
    layouts = ("a", "aaa")
    rows = cover(layouts, [*COMPRESSING], (float("nan"), float("-inf")))
    by_layout(ranks, layouts, poisoned, rows)


@on_ranks(1, 2, 3, initialized=False)
def test_other_tensors() -> None:
    """Other dtypes, views, scales; 'none', which is no codec; a sum beyond half precision."""
    with Checks() as checks, communicator() as comm:
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            values = contribution(comm.rank, comm.size, 600, dtype).view(20, 30)
            padded = torch.full((20, 60), 7, dtype=dtype)
            padded[:, ::2] = values
            flat = values.to(torch.float32).reshape(-1) * 0.5
            with checks.case(dtype=dtype):
                comm.allreduce(padded[:, ::2], compression="int8", prescale=0.5, postscale=4.0)
                comm.allreduce(flat, compression="int8")
                checks.equal(padded[:, ::2], (flat * 4.0).view(20, 30).to(dtype))
                checks.equal(padded[:, 1::2], torch.full((20, 30), 7, dtype=dtype))
        with checks.case(codec="none"):
            mine = contribution(comm.rank, comm.size, 600, torch.int64)
            comm.allreduce(mine, "max", compression="none")
            checks.equal(mine, reduced(comm.size, 600, torch.int64, "max"))
        with checks.case(codec="fp16"):
            mine = torch.full((SEVERAL_SEGMENTS,), 57344.0)
            comm.allreduce(mine, compression="fp16")
            checks.equal(mine, torch.full((SEVERAL_SEGMENTS,), 57344.0 * comm.size))


@on_ranks(2, initialized=False)
def test_calls_are_counted() -> None:
    """Calls that do not say step and seed are those that do, also when a checkpoint comes between."""
    numel = 3000
    with Checks() as checks, communicator() as comm:
        for name in ("randomk", "int8, stochastic", "dgc, warming up"):
            codec = COMPRESSING[name]
            counting, told = comm.new_feedback(codec, numel, seed=5), comm.new_feedback(codec, numel)
            results = []
            for step in range(4):
                mine, wanted = (inputs(comm.size, numel, 0)[comm.rank] for _ in range(2))
                if step == 2:
                    saved, counting = counting.state_dict(), comm.new_feedback(codec, numel, seed=5)
                    counting.load_state_dict(saved)
                comm.allreduce(mine, compression=codec, feedback=counting)
                comm.allreduce(wanted, compression=codec, feedback=told, step=step, seed=5)
                with checks.case(name=name, step=step):
                    checks.equal(mine, wanted)
                results.append(mine)
            assert not torch.equal(results[0] != 0, results[1] != 0) or name != "randomk", "another draw in every step"
