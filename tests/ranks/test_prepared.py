"""Operations that are prepared once and run often: what they return, and what they refuse."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import Communicator
from tests.harness import ABOVE_TRANSPORTS, EXCHANGE_TIMEOUT_S
from tests.ranks.exact import contribution, reduced
from tests.ranks.training import on_ranks

CASES = [
    (5, torch.float32, "sum"),
    (0, torch.float32, "sum"),
    (300_000, torch.float32, "average"),
    (1000, torch.float16, "max"),
    (1000, torch.int64, "average"),
    (1000, torch.bool, "sum"),
]


@ABOVE_TRANSPORTS
@on_ranks(1, 3, initialized=False)
def test_a_prepared_operation_is_the_verb() -> None:
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        for (numel, dtype, op), algorithm in product(CASES, ("auto", "ring", "native")):
            tensor = torch.empty(numel, dtype=dtype)
            operation = comm.prepare_allreduce(tensor, op, algorithm=algorithm)
            mine = contribution(comm.rank, comm.size, numel, dtype)
            expected = mine.clone()
            comm.allreduce(expected, op, algorithm=algorithm)
            assert torch.equal(expected, reduced(comm.size, numel, dtype, op))
            for how in ("call", "start", "call"):
                tensor.copy_(mine)
                if how == "call":
                    operation()
                else:
                    operation.start()
                    operation.wait()
                assert torch.equal(tensor, expected), (numel, dtype, op, how)
        for algorithm in ("auto", "ring", "native"):
            strided = torch.ones(6, 2)[:, 0]
            comm.prepare_allreduce(strided, prescale=2.0, postscale=3.0, algorithm=algorithm)()
            assert strided.tolist() == [6.0 * comm.size] * 6


@on_ranks(2, initialized=False)
def test_what_a_prepared_operation_refuses() -> None:
    with Communicator(timeout_s=EXCHANGE_TIMEOUT_S) as comm:
        tensor = torch.ones(5)
        with pytest.raises(ValueError, match="op is 'mean'"):
            comm.prepare_allreduce(tensor, "mean")
        operation = comm.prepare_allreduce(tensor)
        with pytest.raises(RuntimeError, match=r"allreduce\(float32\[5\].*wait\(\) before start\(\)"):
            operation.wait()
        if comm.rank > 0:
            dist.barrier()  # so that rank 0 cannot be through before
        operation.start()
        if comm.rank == 0:
            for again in (operation.start, operation):
                with pytest.raises(RuntimeError, match="still running"):
                    again()
            dist.barrier()
        operation.wait()
        operation()
        operation.start().wait()
        assert tensor.tolist() == [comm.size**3] * 5
        tensor.data = torch.ones(5)
        for moved in (operation.start, operation):
            with pytest.raises(RuntimeError, match="other memory than when it was prepared"):
                moved()
