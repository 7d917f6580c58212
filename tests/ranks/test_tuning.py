"""Links are measured by all ranks together, or read from a file: all choose alike, and a fault meanwhile is a usual error."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import CollectiveError, Communicator, PeerLost
from gradwire.collectives.compression.registry import make_codec
from gradwire.collectives.environment import TUNING
from gradwire.collectives.tuning.cost_model import Costs, TuningError
from tests.harness import EXCHANGE_TIMEOUT_S, World, Worlds
from tests.interpreter import python
from tests.ranks.exact import Checks, contribution, on_host, reduced
from tests.ranks.programs import ended, start
from tests.ranks.test_failures import die
from tests.ranks.training import assert_survived, on_ranks

SIZE = 4
NBYTES = [1 << power for power in range(2, 24, 3)]


def hosts_of_two(rank: int) -> str:
    return str(rank % 2)


def chosen(comm: Communicator) -> list[str]:
    return [comm.chosen(verb, nbytes) for verb in ("allreduce", "allgather", "broadcast") for nbytes in NBYTES]


def tuned(file: str) -> tuple[str, list[str], list[str]]:
    """Measure, write, read, and sum by what was chosen."""
    os.environ[TUNING] = "1"
    checks = Checks()
    try:
        with on_host(hosts_of_two(dist.get_rank())), Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
            assert comm.costs is not None
            measured, first = comm.costs.to_json(), chosen(comm)
            for numel in (1, 5000, 300_000):
                tensor = contribution(comm.rank, comm.size, numel, torch.float32)
                for algorithm in ("auto", "ring"):
                    mine = tensor.clone()
                    comm.allreduce(mine, algorithm=algorithm)
                    with checks.case(numel=numel, algorithm=algorithm):
                        checks.equal(mine, reduced(comm.size, numel, torch.float32))
            if comm.rank == 0:
                Path(file).write_text(measured)
            comm.barrier()
            os.environ[TUNING] = file
            with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as reading:
                assert chosen(reading) == first
    finally:
        del os.environ[TUNING]
    return measured, first, checks.failures


@on_ranks(2)
def test_every_algorithm_of_a_host_is_timed_as_it_is_called() -> None:
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        costs = comm.tune()
        everyones = comm.allgather_record(costs.to_json())
        assert everyones == [costs.to_json()] * 2
        timed = {call.algorithm: dict(call.measured) for call in costs.calls}
        assert timed.keys() == {"direct", "recursive_doubling", "ring", "rsag", "shared", "tree"}
        measured_s = timed[comm.chosen("allreduce", 1 << 10)][1 << 10]
        assert math.isclose(comm.predict(256), measured_s)  # predict() multiplies by a measured ratio, which rounds


@on_ranks(3)
def test_tune_times_algorithms_that_are_predicted_to_be_near_and_all_ranks_select_the_same() -> None:
    with on_host(str(dist.get_rank())), Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        costs, mine = comm.tune(), chosen(comm)
        assert comm.allgather_record([costs.to_json(), mine]) == [[costs.to_json(), mine]] * 3
        timed = {call.algorithm: dict(call.measured) for call in costs.calls}
        assert comm.measured is not None
        for nbytes in {nbytes for taken in timed.values() for nbytes in taken}:
            ranked = {name: s for s, name in comm.measured.ranked("allreduce", nbytes) if nbytes in timed.get(name, {})}
            assert ranked[comm.chosen("allreduce", nbytes)] <= min(ranked.values()) / 0.95
        tensor, wanted = contribution(comm.rank, 3, 50_000, torch.float32), reduced(3, 50_000, torch.float32)
        comm.allreduce(tensor)
        assert torch.equal(tensor, wanted)


def refused(file: str, kind: type[ValueError] = TuningError, said: str = "") -> str:
    os.environ[TUNING] = file
    try:
        with pytest.raises(kind, match=said) as caught:
            Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
        return str(caught.value)
    finally:
        del os.environ[TUNING]


def test_all_ranks_measure_the_same_and_choose_alike_where_the_file_is_for_their_hosts(
    ranks: Worlds, tmp_path: Path
) -> None:
    file = str(tmp_path / "tuning.json")
    seen = ranks(SIZE).run(tuned, file)
    assert all(each == seen[0] for each in seen)
    measured, names, failed = seen[0]
    assert failed == []
    costs = Costs.from_json(measured, "tuning.json")
    assert costs.hosts == ((0, 2), (1, 3))
    assert min(*costs.uplinks, costs.reduce_byte_s) > 0
    assert len(names) == 3 * len(NBYTES)
    for said in ranks(SIZE).run(refused, file):  # on one host
        assert "here are ranks 0,1,2,3 on" in said
        assert "gradwire tune --out FILE" in said


def read_on_all_but_one(file: str) -> str:
    return refused(file + ".missing" * (dist.get_rank() == 1), ValueError, "same settings")


def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(ranks: Worlds, tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    file.write_text("{}")
    for said in ranks(SIZE).run(read_on_all_but_one, str(file)):
        assert "COLLECTIVES_TUNING=a file that cannot be read" in said


def measure_for_ever(comm: Communicator, codecs: list[str]) -> None:
    while True:
        comm.measure_codecs(codecs) if codecs else comm.tune()


def lose_a_rank(victim: int, codecs: list[str]) -> tuple[type[CollectiveError], str, tuple[int, ...]]:
    with on_host(hosts_of_two(dist.get_rank())):
        comm = Communicator(timeout_s=EXCHANGE_TIMEOUT_S)
    comm.barrier()
    if comm.rank == victim:
        threading.Timer(0.005, die).start()
    with pytest.raises(CollectiveError) as caught:
        measure_for_ever(comm, codecs)
    return type(caught.value), caught.value.operation.partition(",")[0], caught.value.ranks


@pytest.mark.parametrize("codecs", [[], ["int8", "topk"]], ids=["links", "codecs"])
def test_a_rank_that_dies_while_others_measure_is_named(
    failing_world: Callable[[int], World], codecs: list[str]
) -> None:
    victim = 2
    world = failing_world(SIZE)
    world.start(lose_a_rank, victim, codecs)
    assert assert_survived(world, [victim], EXCHANGE_TIMEOUT_S) == [(PeerLost, "tune", (victim,))] * (SIZE - 1)


@on_ranks(2, initialized=False)
def test_calls_correct_the_predictions_of_codecs() -> None:
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        comm.measure_codecs(["int8", "fp16"])
        costs = comm.measure_codecs(["int8", "topk"])
        assert comm.predict(1000, compression="fp16") > 0  # from the first measurement
        for name in ("int8", "topk"):
            measured = costs.measured("allreduce", make_codec(name).identity)
            assert len(measured) == 3
            assert [comm.predict(nbytes // 4, compression=name) for nbytes, _ in measured] == pytest.approx(
                [seconds for _, seconds in measured]
            )
        comm.tune()
        assert comm.predict(1000, compression="topk") > 0


@on_ranks(2, initialized=False)
def test_an_algorithm_that_is_set_by_hand_is_timed_and_stays() -> None:
    os.environ["COLLECTIVES_ALLREDUCE"] = "native"  # gloo's, which has no Program
    try:
        with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
            comm.measure_codecs(["int8", "fp16"])
            comm.tune()
            assert comm.predict(1000) > 0
            comm.allreduce(torch.ones(1000))
            assert comm.chosen("allreduce", 4000) == "native"
    finally:
        del os.environ["COLLECTIVES_ALLREDUCE"]


@on_ranks(3, initialized=False)
def test_a_rank_that_calls_something_else_meanwhile_is_named() -> None:
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm, pytest.raises(CollectiveError, match="tune") as caught:
        comm.barrier() if comm.rank == 1 else comm.tune()
    assert "barrier" in str(caught.value)


UNTUNED = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import gradwire as hvd
hvd.init()
with hvd.collectives.Communicator() as comm:
    comm.allreduce(torch.ones(3), compression="int8")
    print([name for name in sys.modules if name.startswith("gradwire.collectives.tuning")])
"""


def test_nothing_that_measures_is_imported_before_it_is_called(tmp_path: Path) -> None:
    status, said = ended(start([python(), "-c", UNTUNED], tmp_path))
    assert (status, said.splitlines()[-1]) == (0, "[]")


def test_the_command_replaces_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text("damaged")
    command = [python(), "-m", "gradwire", "tune", "--out", str(file)]
    status, said = ended(start(command, tmp_path, **{TUNING: str(file)}))
    assert status == 0, said
    assert Costs.from_json(file.read_text(), "links.json").size == 1
