"""Train on unequal amounts of data: who has no more waits in join() until all have finished the epoch."""

import argparse

import torch
from torch import nn

import gradwire as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batches", type=int, default=2, help="of rank 0; rank r has r more")
args = parser.parse_args()

hvd.init()
torch.manual_seed(9)
model = nn.Linear(6, 3)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

last_joined = []
for epoch in range(args.epochs):
    draw = torch.Generator().manual_seed(100 * epoch + hvd.rank())
    for _batch in range(args.batches + hvd.rank()):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=draw)).square().mean().backward()
        optimizer.step()
    last_joined.append(hvd.join())
    hvd.broadcast_parameters(model.state_dict(), root_rank=last_joined[-1])
