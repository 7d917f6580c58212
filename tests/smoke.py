"""What must work on every version that gradwire claims to run with, in few seconds, on two ranks or more.

torchrun --standalone --nproc-per-node 2 tests/smoke.py

It imports nothing of the tests, so that it can run beside an installed gradwire.
"""

import platform
import sys
from importlib.metadata import version

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def allreduce() -> None:
    """The sum of the ranks' tensors, by the link that there is, on every algorithm."""
    size = gradwire.size()
    with gradwire.collectives.Communicator(timeout_s=60) as communicator:
        for algorithm in ("auto", *communicator.algorithms("allreduce")):
            tensor = torch.arange(1000.0) + gradwire.rank()
            communicator.allreduce(tensor, algorithm=algorithm)
            expected = size * torch.arange(1000.0) + size * (size - 1) / 2
            assert tensor.equal(expected), (algorithm, tensor, expected)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a task that can be learnt."""
    inputs = torch.from_numpy(np.random.default_rng(gradwire.rank()).standard_normal((32, 64))).float()
    return inputs, inputs.roll(1, dims=1)


def check_replicas(module: nn.Module) -> None:
    mine = nn.utils.parameters_to_vector(module.parameters()).detach()
    for theirs in gradwire.allgather(mine.unsqueeze(0)):
        assert theirs.equal(mine), "replicas differ"


def train(module: nn.Module, forward: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Some steps, after which the loss is lower and all ranks have the same bits."""
    inputs, targets = batch()
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(forward(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    check_replicas(module)


def with_the_optimizer() -> None:
    module = model()
    wrapped = torch.optim.SGD(module.parameters(), lr=0.5)
    train(module, module, gradwire.DistributedOptimizer(wrapped, module.named_parameters(), compression="int8"))


def with_the_hook() -> None:
    module = model()
    parallel = DistributedDataParallel(module)
    parallel.register_comm_hook(None, gradwire.ddp_comm_hook("onebit"))
    train(module, parallel, torch.optim.SGD(module.parameters(), lr=0.5))


def main() -> None:
    gradwire.init(timeout_s=60)
    try:
        allreduce()
        with_the_optimizer()
        with_the_hook()
        if gradwire.rank() == 0:
            versions = f"torch {torch.__version__}, numpy {np.__version__}, numba {version('numba')}"
            print(
                f"ok: {platform.python_implementation()} {platform.python_version()}, {versions}, {gradwire.size()} ranks"
            )
            print(f"gradwire from {gradwire.collectives.__path__[0]}", file=sys.stderr)
    finally:
        gradwire.shutdown()


if __name__ == "__main__":
    main()
