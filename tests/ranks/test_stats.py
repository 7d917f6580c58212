"""How many bytes of gradients a rank has sent: `stats` of the DDP hook and of DistributedOptimizer."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.sparse import DGC
from gradwire.trainer.ddp import UNSETTLED_STEPS
from gradwire.trainer.reducer.compression import Compressor
from gradwire.trainer.reducer.traffic import ExchangeStats
from tests.harness import Worlds
from tests.ranks.training import in_world

STEPS = 5
MATRIX, VECTOR = 64 * 96, 64
"""Elements of the model's two parameters. Divided by 2 and by 3 ranks, the matrix is still whole blocks of 256 numbers,
so that the length of its code is known by hand."""


def sends_by_hook(compression: Compressor) -> ExchangeStats:
    hook = gradwire.ddp_comm_hook(compression)
    assert hook.stats == ExchangeStats(0, 0, 0)
    ddp = DistributedDataParallel(nn.Linear(96, 64))
    ddp.register_comm_hook(None, hook)
    for _ in range(STEPS):
        ddp(torch.randn(4, 96)).sum().backward()
    stats = hook.stats
    hook.close()
    assert hook.stats == stats  # which can still be read
    return stats


@in_world
def sends_by_optimizer(compression: Compressor, op: str = gradwire.Average) -> ExchangeStats:
    module = nn.Linear(96, 64)
    gradwire.broadcast_parameters(module.state_dict(), root_rank=0)
    optimizer = gradwire.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), compression=compression, op=op
    )
    assert optimizer.stats == ExchangeStats(0, 0, 0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        module(torch.randn(4, 96)).sum().backward()
        optimizer.step()
    return optimizer.stats


def sends_by_adasum(compression: Compressor) -> ExchangeStats:
    return sends_by_optimizer(compression, op=gradwire.Adasum)


#: By codec: what the code of the matrix takes, by the table in docs/guides/compression.md, and the vector beside it.
CODE_BYTES: dict[str, tuple[float, int]] = {
    "none": (4 * MATRIX, 4 * VECTOR),
    "fp16": (2 * MATRIX, 2 * VECTOR),
    "int8": ((1 + 4 / 256) * MATRIX, 4 * VECTOR),
    "powersgd": (4 * 4 * (64 + 96), 4 * VECTOR),
}


@pytest.mark.parametrize(
    ("size", "sends", "compression"),
    [
        *((3, sends_by_hook, name) for name in CODE_BYTES),
        (1, sends_by_hook, "int8"),
        (2, sends_by_optimizer, "int8"),
        (2, sends_by_adasum, "fp16"),
    ],
)
def test_what_codes_take_is_counted(
    ranks: Worlds, size: int, sends: Callable[[Compressor], ExchangeStats], compression: str
) -> None:
    plain = UNSETTLED_STEPS if sends is sends_by_hook and compression in ("int8", "powersgd") else 0
    expected = plain * 4 * (MATRIX + VECTOR) + (STEPS - plain) * sum(CODE_BYTES[compression])
    shares = 2 * (size - 1) / size  # how often a rank sends a message's length in an allreduce
    for stats in ranks(size).run(sends, PowerSGD() if compression == "powersgd" else compression):
        assert stats.exchanges == STEPS
        # Shares are rounded up, to 16 bytes and more; half of what the vector takes is more than that.
        assert stats.bytes_uncompressed == pytest.approx(shares * STEPS * 4 * (MATRIX + VECTOR), abs=100 * STEPS)
        assert stats.bytes_sent == pytest.approx(shares * expected, abs=100 * STEPS)
        assert size > 1 or stats == ExchangeStats(STEPS, 0, 0)


def test_a_ratio_that_falls_is_followed(ranks: Worlds) -> None:
    """DGC sends a quarter of the numbers at first, here a quarter of that in each next step."""
    falling = ranks(2).run(sends_by_optimizer, DGC(ratio=0.001, ramp_steps=STEPS - 1))
    fixed = ranks(2).run(sends_by_optimizer, DGC(ratio=0.001))
    expected = 8 * MATRIX * sum(0.25 / 4**step - 0.001 for step in range(STEPS - 1))
    for more, fewer in zip(falling, fixed, strict=True):
        assert more.bytes_sent - fewer.bytes_sent == pytest.approx(expected, abs=32 * STEPS)


def test_it_tells_people_what_was_saved() -> None:
    stats = ExchangeStats(exchanges=3, bytes_sent=1_000_000, bytes_uncompressed=4_000_000)
    assert str(stats) == "3 exchanges sent 1.000 MB instead of 4.000 MB, 4.00 times fewer bytes"
    assert str(ExchangeStats(3)) == "3 exchanges had nothing to send"
    assert ExchangeStats(3).ratio == 1.0
    more = ExchangeStats(2, 5_000_000, 4_000_000)
    assert str(more) == "2 exchanges sent 5.000 MB instead of 4.000 MB, 1.25 times as many bytes"
    assert str(ExchangeStats(2, 4_000_000, 4_000_000)) == "2 exchanges sent 4.000 MB, uncompressed"
