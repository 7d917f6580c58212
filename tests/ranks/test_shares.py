"""The two halves of an allreduce: what lies between them is, to the bit, what the whole would have made."""

import pytest
import torch

from gradwire.collectives import Communicator, Mismatch
from tests.harness import EXCHANGE_TIMEOUT_S, Worlds, wide_rows
from tests.ranks.exact import SEGMENT_BYTES, SEVERAL_SEGMENTS
from tests.ranks.training import on_ranks

ALGORITHMS = ["auto", "ring", "rsag", "direct", "tree"]
"""With halves, but for the last, and for what shared memory takes by itself."""
SCALES = [("sum", 1.0, 1.0), ("average", 0.3, 1.7)]


def rounded(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers whose sum depends on the order in which those of the ranks are added."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def halves_are_the_whole() -> None:
    """By every algorithm."""
    for algorithm in ALGORITHMS:
        with pytest.MonkeyPatch.context() as patch:
            if algorithm != "auto":
                patch.setenv("COLLECTIVES_ALLREDUCE", algorithm)
            with Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=SEGMENT_BYTES) as comm:
                _compare(comm, algorithm)


def _compare(comm: Communicator, algorithm: str) -> None:
    kinds = [(torch.float32, numel) for numel in (0, comm.size - 1, comm.size + 1, SEVERAL_SEGMENTS)]
    for turn, (dtype, numel) in enumerate([*kinds, (torch.bfloat16, SEVERAL_SEGMENTS), (torch.float32, 70_001)]):
        shares = comm.shares(numel, dtype)
        owners = torch.full((numel,), -1)
        for rank, mine in enumerate(shares):
            for part in mine:
                assert (owners[part] == -1).all()
                owners[part] = rank
        counts = [int((owners == rank).sum()) for rank in range(comm.size)]
        assert sum(counts) == numel, "every element is somebody's"
        whole_lines = comm.shares_memory and algorithm == "auto"
        assert max(counts) - min(counts) <= (2 * 128 // dtype.itemsize if whole_lines else len(shares[0]))
        for op, prescale, postscale in SCALES if numel == SEVERAL_SEGMENTS else SCALES[turn % 2 :][:1]:
            whole = rounded(comm.rank, numel, dtype)
            comm.allreduce(whole, op, prescale=prescale, postscale=postscale)
            tensor = rounded(comm.rank, numel, dtype)
            comm.reduce_shares(tensor, op, prescale=prescale, postscale=postscale, async_op=True).wait()
            mine = owners == comm.rank
            assert torch.equal(tensor[mine], whole[mine]), (dtype, numel, op)
            prepared = comm.empty(numel, dtype=dtype)
            operation = comm.prepare_reduce_shares(prepared, op, prescale=prescale, postscale=postscale)
            for run in (operation, lambda operation=operation: operation.start().wait(), operation):
                prepared.copy_(rounded(comm.rank, numel, dtype))
                run()
                assert torch.equal(prepared[mine], whole[mine]), (dtype, numel, op, "prepared")
            for each in (tensor, prepared):
                each[~mine] = float("nan")
                comm.gather_shares(each)
                assert torch.equal(each, whole), (dtype, numel, op)
    if comm.size > 2 and algorithm == "ring":
        sums = torch.stack([rounded(rank, SEVERAL_SEGMENTS, torch.float32) for rank in range(comm.size)])
        tensor = rounded(comm.rank, SEVERAL_SEGMENTS, torch.float32)
        comm.allreduce(tensor)
        assert not torch.equal(tensor, sums.sum(0)), "the order matters to these numbers"


@pytest.mark.parametrize(
    ("ranks", "size"),
    [
        ("shared_memory", 3),
        *wide_rows(("shared_memory", 1), ("shared_memory", 8), ("sockets", 3), ("process_group", 3)),
    ],
    indirect=["ranks"],
)
def test_the_halves_of_an_allreduce_make_its_bits(ranks: Worlds, size: int) -> None:
    ranks(size).run(halves_are_the_whole)


@on_ranks(2, initialized=False)
def test_what_is_wrong_with_shares_is_told() -> None:
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        with pytest.raises(TypeError, match=f"rank {comm.rank}: a torch.Tensor is needed"):
            comm.gather_shares("tensor")  # type: ignore[arg-type]
        with pytest.raises(Mismatch, match="gather_shares"):
            comm.gather_shares(torch.zeros(4 + comm.rank))
