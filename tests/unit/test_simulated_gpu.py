"""The simulated GPU finds each kind of wrong order, and nothing where the order is right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives.compression.registry import make_codec
from tests.harness import World, wait_until
from tests.simulated_gpu import asynchronous, check, install, reports
from tests.simulated_gpu.nccl import SimulatedNccl


def _tensor(*, device: str = "cuda") -> torch.Tensor:
    return torch.arange(6.0, device=device)


def _pinned() -> torch.Tensor:
    return torch.zeros(6, pin_memory=True)


def _here() -> Any:
    return torch.cuda.current_stream()


# Orders, and the kinds of reports on them


def after_an_event() -> None:
    tensor, side, event = _tensor(), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        doubled = tensor * 2
    _here().wait_stream(side)
    doubled += 1
    tensor += 1
    doubled.record_stream(_here())


def reads_too_early() -> None:
    tensor = _tensor()
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor.sum()


def writes_during_a_read() -> None:
    tensor, side = _tensor(), torch.cuda.Stream()
    side.wait_stream(_here())
    with torch.cuda.stream(side):
        tensor.sum()
    tensor.zero_()


def waits_for_a_stale_event() -> None:
    tensor, side = _tensor(), torch.cuda.Stream()
    event = _here().record_event()
    tensor += 1
    side.wait_event(event)
    with torch.cuda.stream(side):
        tensor.sum()


def waits_for_no_event() -> None:
    tensor, side = _tensor(), torch.cuda.Stream()
    side.wait_event(torch.cuda.Event())
    with torch.cuda.stream(side):
        tensor.sum()


def parts_of_a_tensor() -> None:
    tensor, side = _tensor(), torch.cuda.Stream()
    side.wait_stream(_here())
    with torch.cuda.stream(side):
        tensor[3:].zero_()
    tensor[:3].zero_()


def after_a_wait_of_the_host() -> None:
    tensor = _tensor()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor.zero_()
    torch.cuda.synchronize()


def another_thread_has_waited() -> None:
    tensor = _tensor()
    thread = threading.Thread(target=torch.cuda.synchronize)
    thread.start()
    thread.join()
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor.sum()


def memory_of_another_stream() -> None:
    """The memory may still be used by what its own stream did before."""
    _tensor()
    tensor = torch.empty(6, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor.zero_()


def given_back_early() -> None:
    tensor, side = _tensor(), torch.cuda.Stream()
    side.wait_stream(_here())
    with torch.cuda.stream(side):
        tensor.sum()
    del tensor


def given_back_when_recorded() -> None:
    tensor, side = _tensor(), torch.cuda.Stream()
    side.wait_stream(_here())
    with torch.cuda.stream(side):
        tensor.sum()
    tensor.record_stream(side)
    del tensor


def pinned_read_early() -> None:
    pinned = _pinned()
    pinned.copy_(_tensor(), non_blocking=True)
    pinned.sum()


def pinned_read_by_numpy() -> None:
    pinned = _pinned()
    pinned.copy_(_tensor(), non_blocking=True)
    pinned.numpy()


def pinned_read_after_its_event() -> None:
    pinned = _pinned()
    pinned.copy_(_tensor(), non_blocking=True)
    event = _here().record_event()
    event.synchronize()
    pinned.sum()


def pinned_written_early() -> None:
    pinned, tensor = _pinned(), _tensor()
    tensor.copy_(pinned, non_blocking=True)
    pinned.zero_()


def pinned_given_back() -> None:
    """torch's allocator of pinned memory knows the streams of its copies."""
    pinned = _pinned()
    pinned.copy_(_tensor(), non_blocking=True)
    del pinned


def copies_between_devices() -> None:
    other = _tensor().to("cuda:1")
    with torch.cuda.device(1):
        other.sum()
    _tensor().sum()


def hooks_of_autograd() -> None:
    weight = _tensor().requires_grad_()
    seen = []
    weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.device))
    (weight * 2).sum().backward()
    assert seen == [torch.device("cuda:0")]


ORDERS: dict[Callable[[], None], list[str]] = {
    after_an_event: [],
    reads_too_early: ["order"],
    writes_during_a_read: ["order"],
    waits_for_a_stale_event: ["order"],
    waits_for_no_event: ["order"],
    parts_of_a_tensor: ["freed"],
    after_a_wait_of_the_host: [],
    another_thread_has_waited: ["order"],
    memory_of_another_stream: ["order"],
    given_back_early: ["freed"],
    given_back_when_recorded: [],
    pinned_read_early: ["host"],
    pinned_read_by_numpy: ["host"],
    pinned_read_after_its_event: [],
    pinned_written_early: ["host"],
    pinned_given_back: [],
    copies_between_devices: [],
    hooks_of_autograd: [],
}


# Waits of the host


WAITS: dict[str, Callable[[], object]] = {
    "synchronize": lambda: torch.cuda.synchronize(),
    "stream": lambda: _here().synchronize(),
    "event": lambda: _here().record_event().synchronize(),
    "item": lambda: _tensor()[0].item(),
    "bool": lambda: bool(_tensor().any()),
    "tolist": lambda: _tensor().tolist(),
    "cpu": lambda: _tensor().cpu(),
    "copy to pageable memory": lambda: torch.zeros(6).copy_(_tensor(), non_blocking=True),
    "copy from pageable memory": lambda: _tensor().copy_(torch.zeros(6), non_blocking=True),
    "blocking copy": lambda: _pinned().copy_(_tensor()),
    "torch.tensor": lambda: torch.tensor([1.0], device="cuda"),
    "nonzero": lambda: _tensor().nonzero(),
    "mask": lambda: _tensor()[_tensor() > 2],
    "sleep": lambda: __import__("time").sleep(0.0),
    "another thread": lambda: threading.Event().wait(0.0),
}

NO_WAITS: dict[str, Callable[[], object]] = {
    "pinned": lambda: _pinned().copy_(_tensor(), non_blocking=True),
    "from pinned": lambda: _tensor().copy_(_pinned(), non_blocking=True),
    "to non_blocking": lambda: _tensor().to("cpu", non_blocking=True),
    "between devices": lambda: _tensor().to("cuda:1"),
    "factories": lambda: (torch.full((2,), 3.0, device="cuda"), torch.zeros_like(_tensor())),
    "stream": lambda: torch.cuda.Stream().wait_stream(_here()),
    "query": lambda: _here().record_event().query(),
}


def found_in(cases: str, name: str) -> list[str]:
    """Run a case of a table; return the kind of its first report."""
    table = globals()[cases]
    if cases == "ORDERS":
        next(case for case in table if case.__name__ == name)()
    else:
        with asynchronous():
            table[name]()
    torch.cuda.synchronize()
    return [each.kind for each in reports()][:1]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("gpu")
    world = World(1, folder, {}, arrive=partial(install, folder=folder))
    yield world
    world.kill()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("two")
    world = World(2, folder, {}, arrive=partial(install, folder=folder, nccl=True))
    yield world
    world.kill()


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_finds_wrong_orders_alone(gpu: World, order: Callable[[], None]) -> None:
    assert gpu.run(found_in, "ORDERS", order.__name__) == [ORDERS[order]]


@pytest.mark.parametrize("name", WAITS)
def test_finds_waits_of_the_host(gpu: World, name: str) -> None:
    assert gpu.run(found_in, "WAITS", name) == [["wait"]]


@pytest.mark.parametrize("name", NO_WAITS)
def test_finds_no_wait_where_there_is_none(gpu: World, name: str) -> None:
    assert gpu.run(found_in, "NO_WAITS", name) == [[]]


# What tensors say


def looks_like_a_gpu() -> None:
    tensor = _tensor()
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert tensor.device == torch.device("cuda:0")
    assert (tensor + 1)[2:].view(2, 2).device == tensor.device
    assert not tensor.cpu().is_cuda
    assert tensor.to("cuda:1").device == torch.device("cuda:1")
    assert tensor.to(torch.float16).is_cuda
    assert tensor.cpu().to(tensor).is_cuda
    assert torch.empty_like(tensor, device="cpu").is_cpu
    assert _pinned().is_pinned()
    assert not torch.zeros(2).is_pinned()
    with pytest.raises(RuntimeError, match="same device"):
        tensor + torch.ones(6)
    with pytest.raises(TypeError, match="to numpy"):
        tensor.numpy()
    model = nn.Linear(3, 2).cuda()
    assert all(each.is_cuda for each in model.parameters())
    check()


def codecs_write_the_same_bytes() -> None:
    numbers = torch.randn(5000)
    for name in ("int8", "onebit", "topk", "fp16"):
        codec = make_codec(name)
        results = []
        for device in ("cpu", "cuda"):
            values = numbers.to(device)
            wire = torch.empty(codec.wire_bytes(5000), dtype=torch.uint8, device=device)
            residual, out = torch.zeros_like(values), torch.zeros_like(values)
            codec.encode(values, wire, residual=residual)
            codec.decode(wire, out)
            results.append([each.cpu() for each in (wire, residual, out)])
        assert all(map(torch.equal, *results)), name
    side, values = torch.cuda.Stream(), _tensor()
    wire = torch.empty(make_codec("int8").wire_bytes(6), dtype=torch.uint8, device="cuda")
    reports()
    with torch.cuda.stream(side):
        make_codec("int8").encode(values, wire)
    assert {each.kind for each in reports()} == {"order"}


@pytest.mark.parametrize("body", [looks_like_a_gpu, codecs_write_the_same_bytes])
def test_stands_in_for_a_gpu(gpu: World, body: Callable[[], None]) -> None:
    gpu.run(body)


# NCCL


def _backend(name: str) -> SimulatedNccl:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return SimulatedNccl(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=60))


def _of(kind: Any, **given: Any) -> Any:
    options = kind()
    for name, value in given.items():
        setattr(options, name, value)
    return options


def every_verb() -> None:
    backend, rank = _backend("verbs"), dist.get_rank()
    mine, both = torch.full((2,), rank + 1.0, device="cuda"), torch.arange(4.0, device="cuda") * (rank + 1)

    def after(work: Any, result: torch.Tensor) -> list[float]:
        work.wait()
        return [float(each) for each in result.tolist()]

    total, rooted = mine.clone(), mine.clone()
    assert after(backend.allreduce([total]), total) == [3, 3]
    assert after(backend.reduce([rooted], _of(dist.ReduceOptions, rootRank=1)), rooted) == [[1, 1], [3, 3]][rank]
    assert after(backend.broadcast([rooted], _of(dist.BroadcastOptions, rootRank=1)), rooted) == [3, 3]
    largest = mine.clone()
    options = _of(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX, asyncOp=False)
    assert after(backend.allreduce([largest], options), largest) == [2, 2]
    everyone, part = torch.zeros(4, device="cuda"), torch.zeros(2, device="cuda")
    assert after(backend._allgather_base(everyone, mine), everyone) == [1, 1, 2, 2]
    assert after(backend._reduce_scatter_base(part, both), part) == [[0, 3], [6, 9]][rank]
    assert after(backend.alltoall_base(everyone, both, [], []), everyone) == [[0, 1, 0, 2], [2, 3, 4, 6]][rank]
    backend._start_coalescing()
    backend.send([mine], 1 - rank)
    backend.recv([part], 1 - rank)
    assert after(backend._end_coalescing(), part) == [[2, 2], [1, 1]][rank]
    backend.barrier().wait()
    backend.shutdown()
    check()


def result_without_a_wait() -> None:
    backend, tensor = _backend("early"), torch.ones(2, device="cuda")
    backend.allreduce([tensor])
    tensor.sum()
    assert {each.kind for each in reports()} == {"order"}
    torch.cuda.synchronize()
    backend.shutdown()


def a_rank_that_never_comes() -> None:
    backend, tensor = _backend("late"), torch.ones(2, device="cuda")
    backend.eager_connect_single_device(torch.device("cuda", 0))
    if dist.get_rank() == 0:
        work = backend.allreduce([tensor])
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work.wait()
        finished = side.record_event()
        with asynchronous():
            tensor.shape  # noqa: B018
            for _ in range(30):
                assert not work.is_completed()
                assert not finished.query()
        assert {each.kind for each in reports()} == {"wait"}, "a loop of query()"
        backend.abort()
        wait_until(work.is_completed, 5)
        with pytest.raises(RuntimeError, match="aborted"):
            backend.allreduce([tensor])


def different_verbs() -> None:
    backend, tensor = _backend("different"), torch.ones(2, device="cuda")
    if dist.get_rank() == 0:
        work = backend.allreduce([tensor])
    else:
        work = backend.broadcast([tensor], _of(dist.BroadcastOptions, rootRank=0))
    found: list[Any] = []
    wait_until(lambda: found.extend(reports()) or found, 5)
    assert {each.kind for each in found} == {"nccl"}
    assert not work.is_completed()
    backend.abort()


@pytest.mark.parametrize("body", [every_verb, result_without_a_wait, a_rank_that_never_comes, different_verbs])
def test_stands_in_for_nccl(two: World, body: Callable[[], None]) -> None:
    two.run(body)


def trained_with_ddp(device: str) -> list[torch.Tensor]:
    """Train with a hook that averages on a side stream, and gives DDP a future of it."""
    reports()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    side = torch.cuda.Stream()

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        side.wait_stream(_here())
        with torch.cuda.stream(side):
            buffer.div_(2)
            done.set_result(buffer)
        return done

    hook.__annotations__.update(bucket=dist.GradBucket)  # torch compares these
    hook.__annotations__["return"] = torch.futures.Future[torch.Tensor]
    wrapped.register_comm_hook(None, hook)
    wrapped(torch.ones(3, 4, device=device)).sum().backward()
    check()
    return [weight.grad.cpu() for weight in model.parameters() if weight.grad is not None]


def test_ddp_waits_for_the_futures_of_its_hook(two: World) -> None:
    expected = two.run(trained_with_ddp, "cpu")
    for found in two.run(trained_with_ddp, "cuda"):
        assert all(map(torch.equal, found, expected[0]))
