"""Train a small network on several processes: torchrun --nproc-per-node 2 train.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradwire as hvd

hvd.init()  # finds the other processes
generator = torch.Generator().manual_seed(0)
points = torch.rand(8192, 2, generator=generator) * 2 - 1  # put your own dataset here
dataset = TensorDataset(points, (points.norm(dim=1) < 0.8).long())
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())  # every process gets its own share
loader = DataLoader(dataset, batch_size=64, sampler=sampler)  # 64 in every process: two processes make 128

model = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=3e-3),
    named_parameters=model.named_parameters(),
    compression="none",  # between hosts try "int8": a quarter of the bytes of large layers
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all processes start with the same weights

for epoch in range(3):
    sampler.set_epoch(epoch)  # another order in every epoch
    total = torch.zeros(1)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # when it returns, every gradient is the average over all processes
        optimizer.step()
        total += loss.detach()
    mean = hvd.allreduce(total / len(loader), op=hvd.Average).item()
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {mean:.3f} on {hvd.size()} processes")

if hvd.rank() == 0:  # the weights are the same everywhere, so one file is enough
    torch.save(model.state_dict(), "model.pt")
    print(optimizer.stats)  # how many bytes were sent, and how many compression has saved
hvd.shutdown()
