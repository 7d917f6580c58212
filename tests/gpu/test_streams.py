"""Operations between streams: what wrote a tensor comes before, what reads the result comes after, and the host does not wait."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import Communicator
from tests.gpu.test_cuda import WITHOUT_NCCL
from tests.harness import EXCHANGE_TIMEOUT_S, Worlds

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NUMEL = 1 << 20


def busy() -> torch.Tensor:
    """Keep the current stream busy for some milliseconds; return a one that it computes at the end."""
    product = torch.eye(2048, device="cuda")
    for _ in range(30):
        product = product @ product
    return product[0, 0]


def between_streams(comm: Communicator) -> None:
    """The producer and the consumer have a stream each."""
    for codec in (None, "int8"):
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor = torch.full((NUMEL,), float(comm.rank + 1), device="cuda") * busy()
            work = comm.allreduce(tensor, compression=codec, async_op=True)
        consumer = torch.cuda.Stream()
        with torch.cuda.stream(consumer):
            work.wait()
            total = tensor * 2
        consumer.synchronize()
        wanted = torch.full((NUMEL,), float(comm.size * (comm.size + 1)), device="cuda")
        torch.testing.assert_close(total, wanted, rtol=0 if codec is None else 0.02, atol=0)
        assert work.is_completed()
        assert work.seconds is not None
        assert work.seconds > 0


def one_after_the_other(comm: Communicator) -> None:
    """Operations on one tensor that nobody waits for in between."""
    tensor = torch.full((NUMEL,), 1.0, device="cuda") * busy()
    works = [comm.allreduce(tensor, async_op=True) for _ in range(4)]
    works.append(comm.broadcast(tensor, comm.size - 1, async_op=True))
    parts = torch.empty(comm.size * NUMEL, device="cuda")
    works.append(comm.allgather(parts, tensor, async_op=True))
    for work in works:
        work.wait()
    assert torch.equal(parts, torch.full_like(parts, float(comm.size**4)))


def dropped(comm: Communicator) -> None:
    """A tensor is deleted while it travels, and other tensors get its memory."""
    for _ in range(20):
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor = torch.ones(NUMEL, device="cuda") * busy()
            part = torch.empty(NUMEL // comm.size, device="cuda") if NUMEL % comm.size == 0 else None
            if part is not None:
                comm.reduce_scatter(part, tensor, async_op=True)
            work = comm.allreduce(tensor, async_op=True)
            del tensor
            others = [torch.full((NUMEL,), float("nan"), device="cuda") for _ in range(2)]
        work.wait()
        if part is not None:
            assert torch.equal(part, torch.full_like(part, float(comm.size)))
        del others


def of_16_bits(comm: Communicator) -> None:
    """Codes of bfloat16 and float16 are those of the same numbers in float32, and so are results, rounded."""
    generator = torch.Generator().manual_seed(comm.rank)
    for codec in ("int8", "onebit", "topk", "bf16"):
        for dtype in (torch.bfloat16, torch.float16):
            narrow = torch.randn(100_001, generator=generator).cuda().to(dtype)
            wide = narrow.float()
            feedbacks = [comm.new_feedback(codec, narrow.numel(), device=narrow.device) for _ in range(2)]
            for _ in range(3):
                one, other = narrow.clone(), wide.clone()
                comm.allreduce(one, "average", compression=codec, feedback=feedbacks[0])
                comm.allreduce(other, "average", compression=codec, feedback=feedbacks[1])
                assert torch.equal(one, other.to(dtype)), (codec, dtype)


def without_waits(comm: Communicator) -> None:
    """No call of torch makes the host wait on the asynchronous path."""
    tensors = [torch.ones(NUMEL, device="cuda", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for codec in (None, "int8", "onebit"):
        for tensor in tensors:
            comm.allreduce(tensor, compression=codec)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for codec in (None, "int8", "onebit"):
            works = [comm.allreduce(tensor, compression=codec, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
        comm.grouped_allreduce(tensors, async_op=True).wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def messages(comm: Communicator) -> None:
    sent = torch.full((NUMEL,), float(comm.rank), device="cuda") * busy()
    received = torch.empty(NUMEL, device="cuda")
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return
    works = [comm.isend(sent, after), comm.irecv(received, before)]
    for work in works:
        work.wait()
    assert torch.equal(received, torch.full_like(received, float(before)))


def over(backend: str, check: Callable[[Communicator], None]) -> None:
    with Communicator(dist.new_group(backend=backend), timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        check(comm)


@pytest.mark.parametrize(("backend", "world"), [("gloo", 2), ("gloo", 3), pytest.param("nccl", 1, marks=WITHOUT_NCCL)])
@pytest.mark.parametrize("check", [between_streams, one_after_the_other, dropped, of_16_bits, without_waits, messages])
def test_operations_follow_streams(
    ranks: Worlds, check: Callable[[Communicator], None], backend: str, world: int
) -> None:
    ranks(world).run(over, backend, check)
