"""Gradients that are pushed as codes: against the same pushes made in one process, and across a checkpoint."""

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.trainer.reducer.compression import Compressor, Policy, encoding_for
from gradwire.trainer.servers.packing import Packing, Sender
from tests.ranks.training import (
    assert_equal,
    assert_goes_on,
    assert_same_on_all_ranks,
    batch_of,
    copies,
    loss_of,
    network,
    on_ranks,
    train,
)

STEPS = 5
CODECS = ["fp16", "int8", "topk", "randomk", hvd.ErrorFeedback("int4", warmup_steps=2)]


def simulated(size: int, compression: Compressor) -> list[Tensor]:
    """Return the parameters after the same steps, with one server, on rank 0."""
    model = network(700)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    policy = Policy(compression)
    packing = Packing(parameters, [encoding_for(policy.encoding("", each), each.dtype) for each in parameters])
    senders = [Sender(packing, rank << 16) for rank in range(size)]
    for step in range(STEPS):
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        for rank in range(size):
            optimizer.zero_grad()
            loss_of(model, batch_of(step, rank)).backward()
            pushed = senders[rank].encode([parameter.grad for parameter in parameters])
            for total, gradient in zip(totals, packing.decode(*pushed, step), strict=True):
                assert gradient is not None
                total.add_(gradient, alpha=1 / size)
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total
        optimizer.step()
    return copies(parameters)


@pytest.mark.parametrize("compression", CODECS, ids=str)
@on_ranks(2)
def test_codes_are_what_one_process_makes_of_the_same_gradients(compression: Compressor) -> None:
    model = network(700)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.servers.ParameterServer(sgd, compression=compression, servers=[0])
    train(model, optimizer, range(STEPS))
    assert_same_on_all_ranks(model.parameters())
    assert_equal(model.parameters(), simulated(hvd.size(), compression))
    optimizer.close()


@pytest.mark.parametrize("compression", ["dgc", "randomk"])
@on_ranks(2)
def test_a_checkpoint_has_what_encodings_have_lost(compression: Compressor) -> None:
    def made() -> tuple[nn.Module, hvd.servers.ParameterServer]:
        model = network(700)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        return model, hvd.servers.ParameterServer(sgd, compression=compression)

    assert_goes_on(made, [2], STEPS)


@on_ranks(2)
def test_what_cannot_ride_is_refused() -> None:
    sgd = torch.optim.SGD(network(700).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"compression='powersgd' compresses sums over all ranks, .* codec of buffers"):
        hvd.servers.ParameterServer(sgd, compression="powersgd")
    with pytest.raises(ValueError, match=r"compression is .* on rank 0; .* on rank 1"):
        hvd.servers.ParameterServer(sgd, compression="int8" if hvd.rank() else "topk")
