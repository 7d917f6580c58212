"""How operations and messages are handed to NCCL, shown by a backend that notes its calls and reduces CPU tensors as if all ranks
had given the same."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives import torch_internals
from gradwire.collectives.control.membership import Membership
from gradwire.collectives.errors import LinkError
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.transports.base import KIND_BITS, Operation
from gradwire.collectives.transports.nccl import NcclConnections
from gradwire.collectives.transports.process_group import ProcessGroupTransport
from tests.harness import wait_until

RANK, SIZE = 1, 3
ONE, OTHER, LATE = (torch.device("cuda", index) for index in range(3))

_FOLDS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda each: each * SIZE,
    dist.ReduceOp.PRODUCT: lambda each: each**SIZE,
    dist.ReduceOp.MIN: lambda each: each,
    dist.ReduceOp.MAX: lambda each: each,
}


class Nccl:
    """Notes the calls; those of `blocked` wait until they may go on."""

    def __init__(self, blocked: str = "", refused: int = -1, rank: int = RANK) -> None:
        self._rank = rank
        self.calls: list[str] = []
        self.threads: list[int] = []
        self.blocked, self.may_go_on = blocked, threading.Event()
        self._refused = refused  # the number of the message that is refused

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return SIZE

    def _called(self, name: str, options: Any = None) -> None:
        if name == self.blocked:
            assert self.may_go_on.wait(10)
        self.calls.append(name if options is None or not options.asyncOp else f"{name}, on a stream of its own")
        self.threads.append(threading.get_ident())

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self._called("a wait on the host")

    def synchronize(self) -> None:
        self._called("a wait of the stream")

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._called(f"connect {device}")
        if device == LATE:
            raise RuntimeError("no such device")

    def abort(self) -> None:
        self._called("abort")

    def shutdown(self) -> None:
        self._called("shutdown")

    def _start_coalescing(self) -> None:
        self._called("start")

    def _end_coalescing(self) -> "Nccl":
        self._called("end")
        return self

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "Nccl":
        return self._message(f"send {peer}")

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> "Nccl":
        return self._message(f"receive {peer}")

    def _message(self, name: str) -> "Nccl":
        if sum(call[:2] in ("se", "re") for call in self.calls) == self._refused:
            raise RuntimeError("refused")
        self._called(name)
        return self

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        self._called("allreduce", options)
        tensors[0].copy_(_FOLDS[options.reduceOp.op](tensors[0]))

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any) -> None:
        self._called("allreduce_coalesced", options)
        for tensor in tensors:
            tensor.copy_(_FOLDS[options.reduceOp.op](tensor))

    def reduce(self, tensors: list[Tensor], options: Any) -> None:
        self._called("reduce", options)
        if options.rootRank == self._rank:
            tensors[0].copy_(_FOLDS[options.reduceOp.op](tensors[0]))

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any) -> None:
        self._called("reduce_scatter", options)
        output.copy_(_FOLDS[options.reduceOp.op](source.view(SIZE, -1)[self._rank]))

    def reduce_scatter(self, outputs: list[Tensor], sources: list[list[Tensor]], options: Any) -> None:
        self._called("reduce_scatter of unequal parts", options)
        outputs[0].copy_(_FOLDS[options.reduceOp.op](sources[0][RANK]))

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        self._called(f"broadcast from {options.rootRank}", options)

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any) -> None:
        self._called("allgather", options)
        output.view(SIZE, -1).copy_(source.clone().expand(SIZE, -1))

    def allgather(self, outputs: list[list[Tensor]], sources: list[Tensor], options: Any) -> None:
        self._called("allgather of unequal parts", options)
        for part in outputs[0]:
            part.copy_(sources[0].repeat(part.numel())[: part.numel()])

    def gather(self, outputs: list[list[Tensor]], sources: list[Tensor], options: Any) -> None:
        self._called(f"gather to {options.rootRank}", options)
        for part in outputs[0] if outputs else []:
            part.copy_(sources[0])

    def scatter(self, outputs: list[Tensor], sources: list[list[Tensor]], options: Any) -> None:
        self._called(f"scatter from {options.rootRank}", options)
        if sources:
            outputs[0].copy_(sources[0][RANK])

    def alltoall_base(
        self, output: Tensor, source: Tensor, incoming: list[int], outgoing: list[int], options: Any
    ) -> None:
        self._called(f"alltoall {incoming} {outgoing}", options)
        output.copy_(torch.cat([torch.split(source, outgoing)[RANK]] * SIZE))


class OnCuda:
    """A tensor of a message."""

    is_cuda = True

    def __init__(self, device: torch.device = ONE) -> None:
        self.device = device

    def view(self, dtype: torch.dtype) -> "OnCuda":
        return self


def over(nccl: Nccl, timeout_s: float = 10.0) -> ProcessGroupTransport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_internals, "nccl_backend", lambda *_: nccl)
        hosts = (tuple(range(SIZE)),)
        return ProcessGroupTransport(Membership(nccl.rank(), SIZE, hosts, dist.HashStore(), ("cuda",), b""), timeout_s)


def ran(nccl: Nccl, operation: Operation, source: Tensor, destination: Tensor) -> None:
    over(nccl).prepare(operation)(source, destination, 0, time.monotonic() + 10)


INTEGERS = torch.arange(7, dtype=torch.int64)
ODD = [-3.0, 7.5, float("nan"), -0.0, 1e-40, float("inf")]


@pytest.mark.parametrize(
    ("op", "dtype", "given", "wanted"),
    [
        ("sum", torch.float32, [1.0, -2.5], [3.0, -7.5]),
        ("sum", torch.int16, [1, -2], [3, -6]),  # which NCCL lacks
        ("average", torch.bfloat16, [1.0, -2.5], [1.0, -2.5]),
        ("average", torch.int64, [1, -2], [1, -2]),
        ("product", torch.float64, [2.0, -1.5], [8.0, -3.375]),
        ("min", torch.float32, ODD, ODD),  # NCCL's min and max lose NaNs
        ("max", torch.float16, ODD, ODD),
        ("max", torch.uint8, [0, 255], [0, 255]),
    ],
)
def test_reductions_are_those_of_nccl_after_a_conversion_where_it_lacks_them(
    op: str, dtype: torch.dtype, given: list[float], wanted: list[float]
) -> None:
    source, result = torch.tensor(given, dtype=dtype), torch.tensor(wanted, dtype=dtype)

    def equal(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)

    def reduced(verb: str, name: str, numel: int, destination: Tensor, **more: Any) -> Tensor:
        nccl = Nccl()
        contribution = destination if numel == len(destination) else source.repeat(SIZE)
        ran(nccl, Operation(verb, "native", dtype, "cuda", numel, op, **more), contribution, destination)
        assert nccl.calls[1:] == [name]
        return destination

    numel = len(given)
    equal(reduced("allreduce", "allreduce", numel, source.clone()), result)
    equal(reduced("reduce", "reduce", numel, source.clone(), root=RANK), result)
    equal(reduced("reduce", "reduce", numel, source.clone(), root=0), source)
    equal(reduced("reduce_scatter", "reduce_scatter", SIZE * numel, torch.empty_like(source)), result)
    unequal = {"outgoing": (0, numel, 2 * numel)}
    own = reduced(
        "reduce_scatter", "reduce_scatter of unequal parts", SIZE * numel, torch.empty_like(source), **unequal
    )
    equal(own, result)

    nccl, several = Nccl(), [source.clone(), source[:1].clone()]
    group = over(nccl).prepare_group(Operation("allreduce", "native", dtype, "cuda", numel + 1, op))
    assert group is not None
    group(several, 0, time.monotonic() + 10)
    equal(torch.cat(several), torch.cat([result, result[:1]]))
    assert nccl.calls[1:] == ["allreduce_coalesced"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint16, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("verb", "call", "source", "destination", "wanted", "more"),
    [
        ("broadcast", "broadcast from 2", INTEGERS, None, INTEGERS, {"root": 2}),
        ("allgather", "allgather", INTEGERS, torch.empty(21), INTEGERS.repeat(3), {}),
        ("allgather", "allgather", INTEGERS, torch.empty(21), INTEGERS.repeat(3), {"incoming": (7, 7, 7)}),
        (
            "allgather",
            "allgather of unequal parts",
            INTEGERS[:2],
            torch.empty(5),
            torch.tensor([0, 1, 0, 0, 1]),
            {"incoming": (3, 2, 0)},
        ),
        ("gather", "gather to 1", INTEGERS, torch.empty(21), INTEGERS.repeat(3), {"root": 1}),
        ("gather", "gather to 0", INTEGERS, torch.empty(0), torch.empty(0), {}),
        ("gather", "gather to 1", torch.empty(0), torch.empty(0), torch.empty(0), {"root": 1}),
        ("scatter", "scatter from 1", torch.arange(6), torch.empty(2), torch.tensor([2, 3]), {"root": 1}),
        ("scatter", "scatter from 2", torch.empty(0), torch.zeros(2), torch.zeros(2), {"root": 2}),
        (
            "alltoall",
            "alltoall {2} {1, 2, 0}",
            torch.arange(3),
            torch.empty(6),
            torch.tensor([1, 2] * 3),
            {"incoming": (2, 2, 2), "outgoing": (1, 2, 0)},
        ),
    ],
)
def test_verbs_that_move_any_dtype_are_one_call_of_nccl(
    verb: str,
    call: str,
    source: Tensor,
    destination: Tensor | None,
    wanted: Tensor,
    more: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    nccl, moved = Nccl(), source.to(dtype)
    landed = moved if destination is None else destination.to(dtype)
    ran(nccl, Operation(verb, "native", dtype, "cuda", len(source), **more), moved, landed)
    width = dtype.itemsize
    splits = {"{2}": [2 * width] * 3, "{1, 2, 0}": [width, 2 * width, 0]}
    for text, in_bytes in splits.items():
        call = call.replace(text, str(in_bytes))
    assert nccl.calls[1:] == [call]
    assert torch.equal(landed.view(torch.uint8), wanted.to(dtype).view(torch.uint8))


@pytest.mark.parametrize(("numel", "rank"), [(0, 1), (2, 1), (2, 2), (6, 0), (8, 1), (8, 2)])
@pytest.mark.parametrize(("op", "dtype"), [("average", torch.float32), ("sum", torch.int16), ("max", torch.bfloat16)])
def test_the_halves_of_an_allreduce_are_one_group_on_the_equal_parts_and_on_the_rest(
    numel: int, rank: int, op: str, dtype: torch.dtype
) -> None:
    tensor, each = torch.arange(numel).to(dtype), numel // SIZE
    own = slice(rank * each, numel if rank == SIZE - 1 else (rank + 1) * each)
    factor = SIZE if op == "sum" else 1
    for verb, names in (("reduce_shares", ["reduce_scatter", "reduce"]), ("gather_shares", ["allgather", "broadcast"])):
        nccl, shared = Nccl(rank=rank), tensor.clone()
        ran(nccl, Operation(verb, "native", dtype, "cuda", numel, op), shared, shared)
        parts = [name for name, length in zip(names, (each, numel % SIZE), strict=True) if length]
        grouped = ["start", *parts, "end"] if len(parts) == 2 else parts
        assert [call.removesuffix(" from 2") for call in nccl.calls[1:]] == grouped
        if verb == "reduce_shares":
            assert torch.equal(shared[own], tensor[own] * factor)
        else:
            assert torch.equal(shared[: SIZE * each], tensor[rank * each : (rank + 1) * each].repeat(SIZE))


def test_a_barrier_is_a_reduction_which_blocks_no_host() -> None:
    nccl, token = Nccl(), torch.zeros(1, dtype=torch.uint8)
    ran(nccl, Operation("barrier", "native", torch.uint8, "cuda", 1, "max"), token, token)
    assert (nccl.calls[1:], token.tolist()) == (["allreduce"], [0])


def test_nccl_runs_every_verb_and_has_both_ends_of_a_message_posted_together() -> None:
    gloo = ProcessGroupTransport(Membership(0, 2, ((0, 1),), dist.HashStore(), ("cpu",), b""), 1.0)
    for transport, device_types in ((over(Nccl()), ("cuda",)), (gloo, ())):
        assert transport.capabilities.posts_together == device_types
        assert transport.capabilities.preferred_on_gpu == dict.fromkeys(PLANNERS if device_types else [], "native")


@pytest.mark.parametrize("counts", [(2, 1), (2, 0), (0, 2)])
def test_a_round_is_one_group_of_calls_with_a_handle_for_every_message(counts: tuple[int, int]) -> None:
    nccl = Nccl()
    messages: list[Any] = [(0, OnCuda()), (2, OnCuda())]
    sends, receives = (messages[:count] for count in counts)
    transport = over(nccl)
    for wanted in ([f"connect {ONE}", "start"], ["start"]):
        nccl.calls.clear()
        sent, received = transport.post(sends, receives, 0)
        assert (nccl.calls[: len(wanted)], nccl.calls[-1]) == (wanted, "end")
        assert (len(sent), len(received)) == counts
        for pending in (*sent, *received):
            pending.wait(0.0)
        assert nccl.calls[-1] == "a wait of the stream"


@pytest.mark.parametrize("refused", range(4))
def test_a_group_of_calls_is_not_left_open_by_an_error(refused: int) -> None:
    nccl = Nccl(refused=refused)
    messages: list[Any] = [(0, OnCuda()), (2, OnCuda())]
    with pytest.raises(LinkError, match="refused"):
        over(nccl).post(messages, messages, 0)
    assert nccl.calls[-1] == "end"


def test_two_ranks_connect_by_themselves_before_all_ranks_do() -> None:
    """Else the message waits for ranks that take no part in it."""
    nccl = Nccl()
    message: list[Any] = [(0, OnCuda())]
    transport = over(nccl)
    transport.post(message, [], 1 << KIND_BITS)
    assert nccl.calls == ["send 0"]
    transport.post([], message, 0)
    nccl.calls.clear()
    transport.post(message, [], 1 << KIND_BITS)
    assert nccl.calls == ["start", "send 0", "end"]


def allreduce(transport: ProcessGroupTransport, numel: int = 2) -> Callable[[float], None]:
    run = transport.prepare(Operation("allreduce", "native", torch.float32, "cuda", numel))
    tensor = torch.ones(numel)
    return lambda within_s: run(tensor, tensor, 0, time.monotonic() + within_s)


def test_only_the_first_call_of_a_kind_of_operation_runs_on_another_thread() -> None:
    nccl, here = Nccl(), threading.get_ident()
    transport = over(nccl)
    for numel, runs_here in ((2, False), (2, True), (3, False)):
        run = allreduce(transport, numel)
        nccl.threads.clear()
        for _ in range(3):
            run(10)
        assert [thread == here for thread in nccl.threads[-3:]] == [runs_here, True, True]
    assert sum("connect" in call for call in nccl.calls) == 1


@contextmanager
def released(nccl: Nccl) -> Iterator[None]:
    try:
        yield
    finally:
        nccl.may_go_on.set()


@pytest.mark.parametrize("blocked", [f"connect {torch.device('cpu')}", "allreduce"])
def test_the_first_call_of_an_operation_has_a_deadline_and_ends_with_abort(blocked: str) -> None:
    nccl = Nccl(blocked)
    with released(nccl):
        transport = over(nccl)
        with pytest.raises(LinkError) as caught:
            allreduce(transport)(0.05)
        assert caught.value.timed_out
        threading.Timer(0.05, transport.abort).start()
        with pytest.raises(LinkError) as caught:
            allreduce(transport)(60)
        assert not caught.value.timed_out


def test_devices_are_connected_once() -> None:
    nccl = Nccl()
    connections = NcclConnections(nccl)
    with pytest.raises(LinkError, match="no such device"):
        connections.connect(LATE, time.monotonic() + 10)
    for device in (OTHER, OTHER, ONE, OTHER):
        connections.connect(device, time.monotonic() + 10)
    assert nccl.calls == [f"connect {device}" for device in (LATE, OTHER, ONE)]


def test_abort_blocks_nobody_and_happens_once() -> None:
    nccl = Nccl("abort")
    with released(nccl):
        transport = over(nccl)
        transport.abort()
        transport.abort()
        assert not nccl.calls
    transport.close()
    assert nccl.calls == ["abort"]


def test_close_ends_nccl_after_the_enqueued_operations() -> None:
    nccl = Nccl()
    transport = over(nccl)
    transport.close()
    transport.close()
    assert nccl.calls == ["shutdown"]


def test_an_error_that_nccl_finds_is_reported_until_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, found = Nccl("abort"), {0x10: None, 0x20: "a remote process exited"}
    nccl._comm_ptr = iter(found).__next__  # type: ignore[attr-defined]
    monkeypatch.setattr(torch_internals, "nccl_error", found.get)
    transport = over(nccl)
    for device, wanted in ((ONE, None), (OTHER, "a remote process exited")):
        assert transport.trouble() is None
        message: list[Any] = [(0, OnCuda(device))]
        transport.post(message, [], 0)
        assert transport.trouble() == wanted
    with released(nccl):
        transport.abort()
        wait_until(lambda: transport.trouble() is None)


def test_nothing_but_gradwire_ends_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else NCCL would end the process at the first timeout, though a longer one was set later."""
    made: list[Any] = []

    class ProcessGroupNCCL:
        class Options:
            config = SimpleNamespace(blocking=0)

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            made.append((os.environ["TORCH_NCCL_BLOCKING_WAIT"], store.timeout, options._timeout))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    served: Any = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for before in ("0", None):
        if before is None:
            monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
        else:
            monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
        torch_internals.nccl_backend(dist.PrefixStore("nccl", served), 0, 1)
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    month = timedelta(days=30)
    for mode, store_timeout, timeout in made:
        assert (mode, store_timeout > month, timeout > month) == ("1", True, True)
    assert served.timeout < month
