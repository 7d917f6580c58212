"""NCCL on a GPU: its operations are enqueued without a wait of the host, and have deadlines."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives import CollectiveTimeout, Communicator, Work, torch_internals
from tests.harness import EXCHANGE_TIMEOUT_S, Worlds
from tests.ranks.exact import Checks

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a GPU and a torch built with NCCL"
)


def enqueued() -> list[str]:
    """Every verb of a rank alone returns its own numbers, in the order of the stream, and no call waits for the GPU."""
    checks = Checks()
    group = dist.new_group(backend="nccl")
    with Communicator(group, timeout_s=EXCHANGE_TIMEOUT_S) as comm, torch.cuda.stream(torch.cuda.Stream()):
        given = torch.arange(1.0, 1001.0, device="cuda")
        halves = given.to(torch.bfloat16)
        tensor, result, late = torch.empty_like(given), torch.empty_like(given), torch.empty_like(halves)
        calls: dict[str, Callable[[], Work]] = {
            "allreduce": lambda: comm.allreduce(tensor, "average", async_op=True),
            "allreduce of minima": lambda: comm.allreduce(tensor, "min", async_op=True),
            "allreduce of scaled numbers": lambda: comm.allreduce(tensor, prescale=2.0, postscale=0.5, async_op=True),
            "grouped allreduce": lambda: comm.grouped_allreduce([tensor, late, result], async_op=True),
            "allreduce of codes": lambda: comm.allreduce(tensor, compression="fp16", async_op=True),
            "reduce": lambda: comm.reduce(tensor, 0, async_op=True),
            "reduce_shares": lambda: comm.reduce_shares(tensor, "average", async_op=True),
            "gather_shares": lambda: comm.gather_shares(tensor, async_op=True),
            "reduce_scatter": lambda: comm.reduce_scatter(result, tensor, async_op=True),
            "broadcast": lambda: comm.broadcast(tensor, 0, async_op=True),
            "allgather": lambda: comm.allgather(result, tensor, async_op=True),
            "gather": lambda: comm.gather(tensor, [result], 0, async_op=True),
            "scatter": lambda: comm.scatter(result, [tensor], 0, async_op=True),
            "alltoall": lambda: comm.alltoall(result, tensor, async_op=True),
        }
        out_of_place = ("reduce_scatter", "allgather", "gather", "scatter", "alltoall")
        found: dict[str, Tensor] = {}
        for repeated in (False, True):
            torch.cuda.set_sync_debug_mode("error" if repeated else "default")
            try:
                for name, call in calls.items():
                    tensor.copy_(given)
                    late.copy_(halves)
                    result.zero_()
                    call().wait()
                    found[name] = result.clone() if name in out_of_place else tensor.clone()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for name, numbers in found.items():
            with checks.case(verb=name):
                checks.equal(numbers.cpu(), given.cpu())
    return checks.failures


def test_every_verb_is_enqueued_without_a_wait(ranks: Worlds) -> None:
    assert ranks(1).run(enqueued) == [[]]


def alone_in_a_collective() -> float:
    """Rank 0 calls a collective that rank 1 never calls; return how long it waits for NCCL to connect the two."""
    group = dist.new_group(backend="nccl")
    began = time.monotonic()
    with Communicator(group, timeout_s=3.0) as comm:
        if comm.rank == 0:
            tensor = torch.ones(1000, device="cuda")
            with pytest.raises(CollectiveTimeout):
                comm.allreduce(tensor)
        dist.barrier()
    return time.monotonic() - began


def test_connecting_has_a_deadline(ranks: Worlds) -> None:
    world = ranks.fresh(2)
    try:
        assert max(world.run(alone_in_a_collective)) < EXCHANGE_TIMEOUT_S
    finally:
        world.kill()


def test_the_errors_of_nccl_can_be_asked_for() -> None:
    backend = torch_internals.nccl_backend(torch_internals.HashStore(), 0, 1)
    backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    communicator = torch_internals.nccl_communicator(backend)
    assert communicator
    assert torch_internals.nccl_error(communicator) == ""
    backend.shutdown()
