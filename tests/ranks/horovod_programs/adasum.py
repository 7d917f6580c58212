"""Fit a line with gradients that Adasum combines, so that no learning rate has to be scaled by the number of ranks."""

import torch
from torch import nn

import gradwire as hvd

hvd.init()
torch.manual_seed(13)
model = nn.Linear(5, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters(), op=hvd.Adasum
)
draw = torch.Generator().manual_seed(hvd.rank())
losses = []
for _step in range(40):
    inputs = torch.randn(16, 5, generator=draw)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(hvd.allreduce(loss.detach(), name="loss").item())
