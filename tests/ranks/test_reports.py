"""What training tells of itself: stragglers, replicas that differ, the numbers of a step, a timeline of all ranks."""

import copy
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as hvd
from gradwire.collectives import CollectiveError, Communicator, ReplicasDiffer
from gradwire.trainer.reducer.compression import Compressor
from gradwire.trainer.reducer.replicas import ReplicaCheck
from gradwire.trainer.world.world import current_world
from tests.harness import Worlds, wait_until
from tests.ranks.training import copies, in_world, on_ranks, perceptron, share


def wrapped(model: nn.Module, **options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), **options)


def train(
    optimizer: hvd.DistributedOptimizer,
    model: nn.Module,
    steps: int,
    before: Callable[[int], object] = lambda step: None,
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        before(step)
        inputs, targets = share(step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def wide() -> nn.Sequential:
    """With a matrix that is large enough for a codec."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 128), nn.Linear(128, 3))


# Stragglers

SLOW_S = 0.2


@in_world
def slow_rank(slow: int) -> tuple[hvd.reports.Stragglers, list[str], list[int | None]]:
    model = perceptron()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    seen: list[int | None] = []
    optimizer = wrapped(model, straggler_report_every=4, on_step=lambda metrics: seen.append(metrics.slowest_rank))
    try:
        assert optimizer.stragglers() is None
        train(optimizer, model, 16, lambda step: time.sleep(SLOW_S if hvd.rank() == slow else 0))
        wait_until(lambda: (known := optimizer.stragglers()) is not None and known.last == 15)
        hvd.barrier()
        train(optimizer, model, 1)  # in which rank 0 says what is known by now
        report = optimizer.stragglers()
    finally:
        logging.getLogger("gradwire").removeHandler(handler)
    assert report is not None
    hvd.barrier()
    return report, said, seen


def test_a_slow_rank_is_named_with_what_it_costs(ranks: Worlds) -> None:
    slow = 1
    results = ranks(3).run(slow_rank, slow)
    for report, _, seen in results:
        assert report.slowest == slow
        assert report.steps == 4
        assert 0.75 * SLOW_S <= report.cost_s[slow] <= report.worst_s[slow]
        assert report.step_s >= SLOW_S
        assert report.share > 0.1
        assert report.batch_shares[slow] == min(report.batch_shares)
        for rank in {0, 1, 2} - {slow}:
            assert report.waited_s[rank][slow] >= 0.75 * SLOW_S
            assert report.waited_s[slow][rank] < report.waited_s[rank][slow]
        assert seen[-1] == slow
    assert [f"for rank {slow}" in line for line in results[0][1] if "waited" in line] == [True]
    assert not [line for _, said, _ in results[1:] for line in said if "waited" in line]


# Replicas


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    tensor.data.view(-1)[-1:].view(torch.int32).bitwise_xor_(1 << bit)


#: What becomes other on one rank, and how that is named.
CHANGES: list[tuple[Callable[[torch.optim.Optimizer, torch.Tensor], object], str]] = [
    (lambda adam, weight: flip(weight), "parameter '2.weight'"),
    (lambda adam, weight: flip(weight, 31), "parameter '2.weight'"),  # the sign of a zero
    (lambda adam, weight: flip(adam.state[weight]["exp_avg_sq"], 31), "state 'exp_avg_sq' of parameter '2.weight'"),
    (lambda adam, weight: adam.state[weight].pop("exp_avg"), "state 'exp_avg' of parameter '2.weight'"),
    (lambda adam, _: adam.param_groups[0].update(betas=(0.9, 0.99)), "setting 'betas.1' of param group 0"),
]


@on_ranks(3)
def test_one_bit_that_differs_is_named_on_all_ranks() -> None:
    for change, name in CHANGES:
        model = perceptron()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        names = {parameter: name for name, parameter in model.named_parameters()}
        train(hvd.DistributedOptimizer(adam, model.named_parameters(), check_replicas_every=2), model, 4)
        weight = model[2].weight
        weight.data.view(-1)[-1] = 0.0
        check = ReplicaCheck(current_world().communicator(), adam, lambda names=names: names, with_state=True)
        check.compare(4)
        if hvd.rank() == 2:
            change(adam, weight)
        with pytest.raises(ReplicasDiffer) as caught:
            check.compare(5)
        assert isinstance(caught.value, CollectiveError)
        assert (caught.value.tensor, caught.value.ranks, caught.value.count) == (name, (2,), 1)
        for part in (name, "after step 5", "random numbers on the CPU"):
            assert part in str(caught.value)


@on_ranks(2)
def test_the_check_is_made_every_so_many_steps() -> None:
    model, steps = perceptron(), 0
    optimizer = wrapped(model, check_replicas_every=2)

    def before(step: int) -> None:
        nonlocal steps
        steps = step
        if step == 2 and hvd.rank() == 1:
            flip(model[0].weight, 20)

    with pytest.raises(ReplicasDiffer, match=r"parameter 0 is not that of rank 0") as caught:
        train(optimizer, model, 9, before)
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum)  # nothing is broken
    assert total == hvd.size()
    train(optimizer, model, 1)  # and no check is due
    assert (steps, caught.value.ranks) == (3, (1,))


@on_ranks(4)
def test_of_sharded_parameters_each_rank_compares_its_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    fully_shard(model, mesh=mesh["shard"])
    group = mesh.get_group("replicate")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), model.named_parameters(), process_set=group, check_replicas_every=1
    )
    train(optimizer, model, 2)
    if hvd.rank() in (2, 3):  # both shards of the second replica, or half of the ranks would go on alone
        flip(next(iter(model.parameters())).to_local())
    with pytest.raises(ReplicasDiffer) as caught:
        train(optimizer, model, 1)
    assert (caught.value.tensor, caught.value.ranks) == ("parameter '0.weight'", (1,))  # of those with the same shards


@on_ranks(2)
def test_parameters_alone_are_compared_with_adasum() -> None:
    """With Adasum each rank steps by itself, so that only the parameters are to be equal."""
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, op=hvd.Adasum, check_replicas_every=1)
    train(optimizer, model, 3)
    with torch.no_grad():
        next(model.parameters())[0, 0] += hvd.rank()
    with pytest.raises(ReplicasDiffer, match="parameter 0"):
        train(optimizer, model, 1)


@on_ranks(2)
def test_ranks_that_check_differently_are_told() -> None:
    model = perceptron()
    with pytest.raises(ValueError, match="check_replicas_every is 5 on rank 0; 0 on rank 1"):
        wrapped(model, check_replicas_every=5 if hvd.rank() == 0 else 0)


# The numbers of a step


@pytest.mark.parametrize("compression", ["none", "onebit", "powersgd"])
@on_ranks(2)
def test_the_numbers_of_a_step_are_those_of_the_stats(compression: str) -> None:
    model = wide()
    seen: list[hvd.reports.StepMetrics] = []
    optimizer = wrapped(model, compression=compression, on_step=seen.append)
    train(optimizer, model, 12)
    assert [of_step.step for of_step in seen] == list(range(1, 13))
    assert sum(of_step.bytes_uncompressed for of_step in seen) == optimizer.stats.bytes_uncompressed
    # When buckets are laid out once more, the residuals move along, which are sent after the first step.
    assert 0 < sum(of_step.bytes_sent for of_step in seen) <= optimizer.stats.bytes_sent
    assert sum(of_step.wait_s for of_step in seen) == pytest.approx(optimizer.communication_wait_s)
    for of_step in seen:
        assert of_step.seconds >= of_step.wait_s > 0
        assert of_step.exchange_s is not None
        assert of_step.seconds >= of_step.exchange_s > 0
        assert of_step.busbw_gb_s is not None
        assert of_step.busbw_gb_s > 0
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert sum(bucket.nbytes for bucket in seen[-1].buckets) >= gradients
    codecs = {bucket.codec for bucket in seen[-1].buckets}
    assert codecs == ({"none"} if compression == "none" else {"none", str(compression)})
    assert ("two_shot" in {bucket.algorithm for bucket in seen[-1].buckets}) == (compression == "onebit")
    errors = [of_step.compression_error for of_step in seen]
    measured = [compression != "none" and step % 10 == 0 for step in range(1, 13)]
    assert [error is not None for error in errors] == measured
    assert all(0 < error < 100 for error in errors if error is not None)


@on_ranks(1)
def test_a_rank_alone_exchanges_nothing_and_waits_for_nobody() -> None:
    model = perceptron()
    seen: list[hvd.reports.StepMetrics] = []
    optimizer = wrapped(model, straggler_report_every=1, on_step=seen.append)
    train(optimizer, model, 3)
    assert optimizer.stragglers() is None
    assert [(of_step.bytes_sent, of_step.slowest_rank) for of_step in seen] == [(0, None)] * 3


@on_ranks(2)
def test_reports_go_on_after_an_earlier_step_is_loaded() -> None:
    model = wide()
    seen: list[hvd.reports.StepMetrics] = []
    optimizer = wrapped(model, compression="onebit", on_step=seen.append, straggler_report_every=2)
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, model, 6)
    optimizer.load_state_dict(saved)
    before = optimizer.stragglers()
    assert before is not None
    train(optimizer, model, 4)
    assert all(of_step.exchange_s and of_step.busbw_gb_s for of_step in seen)
    wait_until(lambda: (known := optimizer.stragglers()) is not None and known.last > before.last)
    hvd.barrier()
    optimizer.close()


@on_ranks(2)
def test_bus_bandwidth_counts_the_halves_of_an_allreduce() -> None:
    """With rules.Sharded, gradients are reduce-scattered, except for those of a codec, which are all reduced."""
    for options, halves in (
        ({}, 2),
        ({"rule": hvd.rules.Sharded()}, 1),
        ({"rule": hvd.rules.Sharded(), "policy": {"*": "int8"}}, 2),
    ):
        model = wide()
        seen: list[hvd.reports.StepMetrics] = []
        optimizer = wrapped(model, named_parameters=model.named_parameters(), on_step=seen.append, **options)
        train(optimizer, model, 3)
        optimizer.close()
        last = seen[-1]
        assert last.busbw_gb_s is not None
        assert last.exchange_s is not None
        nbytes = sum(bucket.nbytes for bucket in last.buckets)
        assert last.busbw_gb_s * 1e9 * last.exchange_s == pytest.approx(halves * nbytes * (hvd.size() - 1) / hvd.size())


@on_ranks(2)
def test_the_buckets_of_a_step_show_a_selection_that_has_changed() -> None:
    model = wide()
    seen: list[hvd.reports.StepMetrics] = []
    with Communicator() as communicator:
        optimizer = wrapped(model, process_set=communicator, on_step=seen.append)
        train(optimizer, model, 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(communicator, "chosen", lambda *_, **__: "tree")  # as calls may correct it
            train(optimizer, model, 1)
    assert {bucket.algorithm for bucket in seen[-2].buckets} == {"shared"}
    assert {bucket.algorithm for bucket in seen[-1].buckets} == {"tree"}


@on_ranks(2)
def test_what_the_callable_raises_comes_out_after_the_step() -> None:
    model = perceptron()

    def stop(metrics: hvd.reports.StepMetrics) -> None:
        raise KeyboardInterrupt

    optimizer = wrapped(model, on_step=stop)
    before = copies(model.parameters())
    with pytest.raises(KeyboardInterrupt):
        train(optimizer, model, 1)
    assert optimizer.steps == 1
    assert not any(map(torch.equal, before, model.parameters()))
    hvd.barrier()


# The timeline


@in_world
def record(path: Path, compression: Compressor) -> int:
    model = wide()
    optimizer = wrapped(model, compression=compression, process_set=dist.new_group())
    hvd.start_timeline(path, mark_cycles=True)
    with pytest.raises(ValueError, match="is being recorded"):
        hvd.start_timeline(path)
    train(optimizer, model, 3)
    hvd.allreduce(torch.ones(1000))
    hvd.allgather(torch.ones(3 + hvd.rank(), 2))
    hvd.broadcast(torch.ones(5), root_rank=0)
    hvd.stop_timeline()
    with pytest.raises(ValueError, match="no timeline is being recorded"):
        hvd.stop_timeline()
    again = path.with_name("again.json")
    hvd.start_timeline(again)
    hvd.stop_timeline()
    hvd.barrier()
    if hvd.rank() == 0:
        assert not [e for e in json.loads(again.read_text())["traceEvents"] if e["ph"] != "M"]
    return model[1].weight.nbytes


@pytest.mark.parametrize("compression", ["none", "onebit"])
def test_the_timeline_shows_all_ranks(ranks: Worlds, tmp_path: Path, compression: str) -> None:
    path = tmp_path / "timeline.json"
    nbytes, *_ = ranks(3).run(record, path, compression)
    trace = json.loads(path.read_text())
    assert sorted(path.parent.iterdir()) == [path.with_name("again.json"), path]
    assert {name: told["events_dropped"] for name, told in trace["otherData"].items()} == {
        f"rank {r}": 0 for r in range(3)
    }
    events = trace["traceEvents"]
    assert min(event["ts"] for event in events if event["ph"] != "M") == 0
    exchanges = []
    for rank in range(3):
        mine = [event for event in events if event["pid"] == rank]
        lanes = {event["tid"]: event["args"]["name"] for event in mine if event["name"] == "thread_name"}
        assert set(lanes.values()) >= {"verbs: operations", "communicator 1: operations", "communicator 1: training"}
        found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for event in (event for event in mine if event["ph"] != "M"):
            found[lanes[event["tid"]].split(": ")[1], event["name"]].append(event)
        passes, waits, steps = (found["training", name] for name in ("backward", "wait", "step"))
        assert len(passes) == len(waits) == len(steps) == len(found["training", "exchange begins"]) == 3
        assert len(found["buckets", "bucket ready"]) >= 3
        for one, wait, step in zip(passes, waits, steps, strict=True):
            assert one["ts"] + one["dur"] <= wait["ts"] + 1e-3  # rounding of microseconds
            assert wait["ts"] + wait["dur"] <= step["ts"] + 1e-3
        assert all(found["operations", verb] for verb in ("allreduce", "allgather", "broadcast"))
        assert all("float32[" in event["args"]["call"] for event in found["operations", "allreduce"])
        large = [e for e in found["operations", "allreduce"] if e["args"].get("bytes", 0) >= nbytes]
        assert len(large) >= 3
        assert all(event["args"]["algorithm"] for event in large)
        if compression == "onebit":
            assert all(found["operations", part] for part in ("encode", "send", "wait", "decode"))
        exchanges.append(waits)
    for step in range(3):  # all end the exchange together, as far as clocks and machine tell
        ends = [waits[step]["ts"] + waits[step]["dur"] for waits in exchanges]
        assert max(waits[step]["ts"] for waits in exchanges) <= min(ends) + 5e6


@in_world
def record_to_the_end(path: Path) -> None:
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="there is no folder"):
            hvd.start_timeline(path / "nowhere" / "timeline.json")
    hvd.barrier()
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(10))


def test_the_timeline_is_written_when_the_world_ends(ranks: Worlds, tmp_path: Path) -> None:
    ranks(2).run(record_to_the_end, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "allreduce"} == {0, 1}


@in_world
def leave_one_by_one(path: Path) -> None:
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(10))
    world = current_world()
    communicator = world.communicator()
    dist.barrier()
    if hvd.rank() == 1:
        communicator.close()  # as if it had failed
    with pytest.raises(CollectiveError):
        world.stop_timeline()
    dist.barrier()


def test_without_the_others_each_rank_writes_its_own(ranks: Worlds, tmp_path: Path) -> None:
    ranks(2).run(leave_one_by_one, tmp_path / "timeline.json")
    assert not (tmp_path / "timeline.json").exists()
    for rank in range(2):
        events = json.loads((tmp_path / f"timeline.json.rank{rank}").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        assert any(event["name"] == "allreduce" for event in events)
