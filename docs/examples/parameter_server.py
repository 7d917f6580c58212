"""Backup workers: each update uses the first two of three gradients: torchrun --nproc-per-node 4 parameter_server.py"""

import time

import torch

import gradwire as hvd

hvd.init()
torch.manual_seed(0)  # all ranks start with the same weights
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
checked = torch.randn(64, 8)
generator = torch.Generator().manual_seed(1 + hvd.rank())  # every rank has its own data
sgd = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = hvd.servers.ParameterServer(sgd, workers=[1, 2, 3], quorum=2, late="drop")  # rank 0 serves


def loss_of(inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


if hvd.rank() == 0:
    optimizer.serve()  # returns when all workers have called close()
    print(optimizer.report(), flush=True)
else:
    first = loss_of(checked).item()
    for _ in range(40):
        time.sleep(0.02 if hvd.rank() == 3 else 0.0)  # rank 3 is slow, and the others do not wait for it
        optimizer.zero_grad()
        loss_of(torch.randn(16, 8, generator=generator)).backward()
        optimizer.step()
    print(f"rank {hvd.rank()}: loss {first:.3f} to {loss_of(checked).item():.3f}", flush=True)
optimizer.close()
hvd.shutdown()
