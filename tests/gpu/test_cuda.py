"""CUDA tensors: over gloo, staged through pinned memory, by several ranks that share a GPU; over NCCL by one rank."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from gradwire.collectives import Communicator
from tests.harness import EXCHANGE_TIMEOUT_S, Worlds
from tests.ranks.exact import ALLREDUCES, DTYPES, OPS, SEGMENT_BYTES, Checks, contribution, cover, reduced
from tests.ranks.test_collectives import NUMELS, clash
from tests.ranks.training import in_world

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def exact(backend: str) -> list[str]:
    checks = Checks()
    group = dist.new_group(backend=backend)
    with Communicator(group, timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=SEGMENT_BYTES) as comm:
        numels = [numel(comm.size) for numel in NUMELS.values()]
        for algorithm, dtype, op, numel in cover([*ALLREDUCES, "native", "auto"], DTYPES, OPS, numels, clash=clash):
            with checks.case(algorithm=algorithm, dtype=dtype, op=op, numel=numel):
                tensor = contribution(comm.rank, comm.size, numel, dtype, op).cuda()
                comm.allreduce(tensor, op, algorithm=algorithm)
                assert tensor.is_cuda
                checks.equal(tensor.cpu(), reduced(comm.size, numel, dtype, op))
    return checks.failures


def other_verbs(backend: str) -> None:
    group = dist.new_group(backend=backend)
    with Communicator(group, timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        rank, size = comm.rank, comm.size
        mine = torch.full((3,), rank + 1, device="cuda")
        everyone = torch.arange(1, size + 1, device="cuda").repeat_interleave(3)
        gathered, exchanged = torch.zeros_like(everyone), torch.zeros_like(everyone)
        scattered, broadcast, rooted = torch.zeros_like(mine), mine.clone(), mine.clone()
        comm.allgather(gathered, mine)
        comm.alltoall(exchanged, mine.repeat(size))
        comm.reduce_scatter(scattered, mine.repeat(size))
        comm.broadcast(broadcast, size - 1)
        comm.reduce(rooted, 0)
        comm.barrier()
        total = torch.full_like(mine, size * (size + 1) // 2)
        assert torch.equal(gathered, everyone)
        assert torch.equal(exchanged, everyone)
        assert torch.equal(scattered, total)
        assert torch.equal(broadcast, torch.full_like(mine, size))
        assert torch.equal(rooted, total if rank == 0 else mine)
        assert comm.allgather_object(rank) == list(range(size))


def follows_the_stream(backend: str) -> None:
    """The operation sees what was enqueued on the current stream before it, and what comes after wait() sees its result."""
    group = dist.new_group(backend=backend)
    with Communicator(group, timeout_s=EXCHANGE_TIMEOUT_S) as comm, torch.cuda.stream(torch.cuda.Stream()):
        for asynchronous in (False, True):
            tensor = torch.zeros(1 << 20, device="cuda")
            product = torch.ones(2048, 2048, device="cuda")
            for _ in range(20):
                product = product @ product / 2048
            tensor += product[0, 0] * (comm.rank + 1)
            comm.allreduce(tensor, async_op=asynchronous).wait()
            tensor *= 2
            assert torch.equal(tensor, torch.full_like(tensor, float(comm.size * (comm.size + 1))))


WITHOUT_NCCL = pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch built with NCCL")


@pytest.mark.parametrize(
    ("backend", "world"),
    [("gloo", 1), ("gloo", 2), ("gloo", 3), pytest.param("nccl", 1, marks=WITHOUT_NCCL)],
)
@pytest.mark.parametrize("check", [exact, other_verbs, follows_the_stream])
def test_tensors_of_a_gpu(ranks: Worlds, check: Callable[[str], object], backend: str, world: int) -> None:
    assert ranks(world).run(check, backend) == [[] if check is exact else None] * world


@in_world
def verbs_of_torch(backend: str) -> list[str]:
    """Return the verbs of torch.distributed that give this only rank anything else than its own CUDA tensor back."""
    group = dist.new_group(backend=backend)
    given = torch.arange(1.0, 7.0, device="cuda")

    def into(call: Callable[[Tensor], object]) -> Tensor:
        result = torch.zeros_like(given)
        call(result)
        return result

    def in_place(call: Callable[[Tensor], object]) -> Tensor:
        result = given.clone()
        call(result)
        return result

    results = {
        "all_reduce": in_place(partial(dist.all_reduce, group=group)),
        "reduce": in_place(partial(dist.reduce, dst=0, group=group)),
        "broadcast": in_place(partial(dist.broadcast, src=0, group=group)),
        "all_gather": into(lambda out: dist.all_gather([out], given, group=group)),
        "all_gather_into_tensor": into(lambda out: dist.all_gather_into_tensor(out, given, group=group)),
        "reduce_scatter": into(lambda out: dist.reduce_scatter(out, [given], group=group)),
        "reduce_scatter_tensor": into(lambda out: dist.reduce_scatter_tensor(out, given, group=group)),
        "all_to_all": into(lambda out: dist.all_to_all([out], [given], group=group)),
        "all_to_all_single": into(lambda out: dist.all_to_all_single(out, given, group=group)),
        "gather": into(lambda out: dist.gather(given, [out], dst=0, group=group)),
        "scatter": into(lambda out: dist.scatter(out, [given], src=0, group=group)),
        "functional all_gather": functional.all_gather_tensor(given, 0, group),
        "functional reduce_scatter": functional.reduce_scatter_tensor(given, "sum", 0, group),
        "functional all_to_all": functional.all_to_all_single(given, None, None, group),
        "functional coalesced": functional.all_gather_into_tensor_coalesced([given], group)[0],
    }
    dist.destroy_process_group(group)
    return [verb for verb, result in results.items() if not torch.equal(result, given)]


@WITHOUT_NCCL
def test_the_backend_gives_every_verb_to_nccl(ranks: Worlds) -> None:
    assert ranks(1).run(verbs_of_torch, "gradwire") == [[]]
