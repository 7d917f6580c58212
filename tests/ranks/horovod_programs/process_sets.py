"""Train two models at once, one on the even ranks and one on the odd ones."""

import torch
from torch import nn

import gradwire as hvd

hvd.init(process_sets="dynamic")
even_ranks = hvd.add_process_set(range(0, hvd.size(), 2))
odd_ranks = hvd.add_process_set(range(1, hvd.size(), 2))
mine, root = (even_ranks, 0) if hvd.rank() % 2 == 0 else (odd_ranks, 1)

torch.manual_seed(21 + hvd.rank())
model = nn.Linear(4, 2)
hvd.broadcast_parameters(model.state_dict(), root_rank=root, process_set=mine)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), process_set=mine
)
for _step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
members = hvd.allgather(torch.tensor([hvd.rank()]), name="members", process_set=mine).tolist()
objects = hvd.allgather_object({"rank": hvd.rank()}, name="objects")
hvd.remove_process_set(odd_ranks)
hvd.remove_process_set(even_ranks)
