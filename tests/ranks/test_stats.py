"""How many bytes of gradients a rank has sent: `stats` of the DDP hook and of DistributedOptimizer."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire as hvd
from gradwire.collectives.compression.dense import Int8
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.sparse import DGC
from gradwire.trainer.ddp import UNSETTLED_STEPS
from gradwire.trainer.gradients.combination import ExchangeStats
from gradwire.trainer.gradients.compression import Compressor
from tests.harness import Worlds
from tests.ranks.training import in_world

STEPS = 5
MATRIX, VECTOR = 64 * 96, 64
"""Elements of the model's two parameters. Divided by 2 and by 3 ranks, the matrix is still whole blocks of 256 numbers,
so that the length of its code is known by hand."""


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 64)


def code_bytes(compression: str) -> float:
    """What the code of the matrix takes, by the table in docs/guides/compression.md."""
    return {
        "none": 4 * MATRIX,
        "fp16": 2 * MATRIX,
        "int8": (1 + 4 / 256) * MATRIX,
        "powersgd": 4 * 4 * (64 + 96),
    }[compression]


def shares(size: int) -> float:
    """How often a rank sends a message's length in an allreduce."""
    return 2 * (size - 1) / size


def sends_by_hook(compression: str) -> ExchangeStats:
    hook = gradwire.ddp_comm_hook(PowerSGD() if compression == "powersgd" else compression)
    assert hook.stats == ExchangeStats(0, 0, 0)
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(None, hook)
    for _ in range(STEPS):
        ddp(torch.randn(4, 96)).sum().backward()
    stats = hook.stats
    hook.close()
    assert hook.stats == stats  # which can still be read
    return stats


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("compression", ["none", "fp16", "int8", "powersgd"])
def test_the_hook_counts_what_its_codes_take(ranks: Worlds, size: int, compression: str) -> None:
    vector = (2 if compression == "fp16" else 4) * VECTOR
    plain = 0 if compression in ("none", "fp16") else UNSETTLED_STEPS
    expected = plain * 4 * (MATRIX + VECTOR) + (STEPS - plain) * (code_bytes(compression) + vector)
    for stats in ranks(size).run(sends_by_hook, compression):
        assert stats.exchanges == STEPS
        # Shares are rounded up, to 16 bytes and more; half of what the vector takes is more than that.
        assert stats.bytes_uncompressed == pytest.approx(shares(size) * STEPS * 4 * (MATRIX + VECTOR), abs=100 * STEPS)
        assert stats.bytes_sent == pytest.approx(shares(size) * expected, abs=100 * STEPS)


@in_world
def sends_by_optimizer(compression: Compressor) -> ExchangeStats:
    module = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), compression=compression)
    assert optimizer.stats == ExchangeStats(0, 0, 0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        module(torch.randn(4, 96)).sum().backward()
        optimizer.step()
    return optimizer.stats


def test_the_optimizer_counts_what_its_codes_take(ranks: Worlds) -> None:
    for stats in ranks(2).run(sends_by_optimizer, Int8()):
        assert stats.exchanges == STEPS
        assert stats.bytes_uncompressed == pytest.approx(STEPS * 4 * (MATRIX + VECTOR), abs=64 * STEPS)
        assert stats.bytes_sent == pytest.approx(STEPS * (code_bytes("int8") + 4 * VECTOR), abs=64 * STEPS)


def test_a_ratio_that_falls_is_followed(ranks: Worlds) -> None:
    """DGC sends a quarter of the numbers at first, here a quarter of that in each next step."""
    falling = ranks(2).run(sends_by_optimizer, DGC(ratio=0.001, ramp_steps=STEPS - 1))
    fixed = ranks(2).run(sends_by_optimizer, DGC(ratio=0.001))
    expected = 8 * MATRIX * sum(0.25 / 4**step - 0.001 for step in range(STEPS - 1))
    for more, fewer in zip(falling, fixed, strict=True):
        assert more.bytes_sent - fewer.bytes_sent == pytest.approx(expected, abs=32 * STEPS)


def test_alone_nothing_is_sent(ranks: Worlds) -> None:
    (stats,) = ranks(1).run(sends_by_hook, "int8")
    assert stats == ExchangeStats(STEPS, 0, 0)
    assert stats.ratio == 1.0


def test_it_tells_people_what_was_saved() -> None:
    stats = ExchangeStats(exchanges=3, bytes_sent=1_000_000, bytes_uncompressed=4_000_000)
    assert str(stats) == "3 exchanges sent 1.000 MB instead of 4.000 MB, 4.00 times fewer bytes"
    assert str(ExchangeStats(3)) == "3 exchanges had nothing to send"
    more = ExchangeStats(2, 5_000_000, 4_000_000)
    assert str(more) == "2 exchanges sent 5.000 MB instead of 4.000 MB, 1.25 times as many bytes"
    assert str(ExchangeStats(2, 4_000_000, 4_000_000)) == "2 exchanges sent 4.000 MB, uncompressed"
