"""Gradients that are pushed as codes: against the same pushes made in one process, and across a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.trainer.gradients.compression import Compressor, Policy
from gradwire.trainer.servers.pushed import Packing, Sender
from tests.ranks.training import assert_same_on_all_ranks, copies, loss_of, on_ranks

STEPS = 5
CODECS = ["fp16", "int8", "topk", "randomk", hvd.ErrorFeedback("int4", warmup_steps=2)]


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 64, generator=generator), torch.randn(4, 3, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch_of(step, hvd.rank())).backward()
        optimizer.step()


def simulated(size: int, compression: Compressor) -> list[Tensor]:
    """Return the parameters after the same steps, with one server, on rank 0."""
    model = model_of()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    packing = Packing([""] * len(parameters), parameters, Policy(compression))
    senders = [Sender(packing, rank << 16) for rank in range(size)]
    for step in range(STEPS):
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        for rank in range(size):
            optimizer.zero_grad()
            loss_of(model, batch_of(step, rank)).backward()
            pushed = senders[rank].encode([parameter.grad for parameter in parameters], step)
            for total, gradient in zip(totals, packing.flat.views(packing.decode(pushed, step)), strict=True):
                total.add_(gradient, alpha=1 / size)
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total
        optimizer.step()
    return copies(parameters)


@pytest.mark.parametrize("compression", CODECS, ids=str)
@on_ranks(2)
def test_codes_are_what_one_process_makes_of_the_same_gradients(compression: Compressor) -> None:
    model = model_of()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.ParameterServer(sgd, compression=compression, servers=[0])
    train(model, optimizer, range(STEPS))
    assert_same_on_all_ranks(model.parameters())
    for parameter, expected in zip(model.parameters(), simulated(hvd.size(), compression), strict=True):
        assert torch.equal(parameter, expected)
    optimizer.close()


@on_ranks(2)
def test_codes_are_of_float32_whatever_the_default_is() -> None:
    model = model_of()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = hvd.ParameterServer(sgd, compression=hvd.ErrorFeedback("int4", warmup_steps=2), servers=[0])
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, targets = batch_of(step, hvd.rank())
            loss_of(model, (inputs.float(), targets.float())).backward()
            optimizer.step()
        optimizer.close()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("compression", ["topk", "randomk"])
@on_ranks(2)
def test_a_checkpoint_has_what_encodings_have_lost(compression: Compressor) -> None:
    def made() -> tuple[nn.Module, hvd.ParameterServer]:
        model = model_of()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        return model, hvd.ParameterServer(sgd, compression=compression)

    model, optimizer = made()
    train(model, optimizer, range(2))
    saved, parameters = optimizer.state_dict(), copies(model.parameters())
    train(model, optimizer, range(2, STEPS))
    again, resumed = made()
    with torch.no_grad():
        for parameter, value in zip(again.parameters(), parameters, strict=True):
            parameter.copy_(value)
    resumed.load_state_dict(saved)
    train(again, resumed, range(2, STEPS))
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    optimizer.close()
    resumed.close()


@on_ranks(2)
def test_what_cannot_ride_is_refused() -> None:
    sgd = torch.optim.SGD(model_of().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"compression='powersgd' compresses sums over all ranks, .* codec of buffers"):
        hvd.ParameterServer(sgd, compression="powersgd")
    with pytest.raises(ValueError, match=r"compression is .* on rank 0; .* on rank 1"):
        hvd.ParameterServer(sgd, compression="int8" if hvd.rank() else "topk")
