"""Ranks of one host train one set of parameters, without locks: torchrun --nproc-per-node 2 hogwild.py"""

import torch
from torch import nn

import gradwire as hvd

ROWS, STEPS = 1000, 600

hvd.init()
model = nn.EmbeddingBag(ROWS, 1, mode="sum", sparse=True)  # a step touches the rows of its batch only
nn.init.zeros_(model.weight)
optimizer = hvd.servers.Hogwild(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())

truth = torch.randn(ROWS, generator=torch.Generator().manual_seed(1))
data = torch.Generator().manual_seed(hvd.rank())
unseen = truth.square().mean().item()
for _ in range(STEPS):
    words = torch.randint(ROWS, (16, 8), generator=data)
    optimizer.zero_grad()
    loss = (model(words).squeeze(1) - truth[words].sum(1)).square().mean()
    loss.backward()
    optimizer.step()  # changes the parameters of all ranks, without waiting

hvd.barrier()
error = (model.weight.squeeze(1) - truth).square().mean().item()
print(f"rank {hvd.rank()}: error {error:.6f}, from {unseen:.6f}")  # the same on all ranks
hvd.barrier()
optimizer.close()
hvd.shutdown()
