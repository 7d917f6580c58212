"""Trains on two processes that a cell of a notebook starts. This is the cell; it also runs as a script.

python notebook.py
"""

import torch
from accelerate import notebook_launcher
from torch import nn

import gradwire as hvd


def train():
    """Train in one of the processes. They are forks of the notebook, which must not call init() itself."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), compression="int8"
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(20):
        inputs = torch.randn(16, 64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, 1))
        loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        print(f"loss {loss.item():.3f}; {optimizer.stats}")
    hvd.shutdown()


notebook_launcher(train, num_processes=2)
