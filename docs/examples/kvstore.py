"""Train with a key-value store, as MXNet programs do: torchrun --nproc-per-node 2 kvstore.py"""

import functools

import torch
from torch import nn

import gradwire as hvd

hvd.init()
kv = hvd.servers.kvstore.create("dist_sync")
torch.manual_seed(kv.rank)  # different weights on each rank, until broadcast() copies those of rank 0
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
names = [name for name, _ in model.named_parameters()]
weights = list(model.parameters())
kv.broadcast(names, weights, out=weights)
# Servers update with the sum of the gradients of all ranks. To average them, divide the learning rate by the number of ranks.
kv.set_optimizer(functools.partial(torch.optim.SGD, lr=0.5 / kv.num_workers, momentum=0.9))

generator = torch.Generator().manual_seed(1 + kv.rank)
for step in range(100):
    points = torch.rand(64, 2, generator=generator) * 2 - 1
    loss = nn.functional.cross_entropy(model(points), (points.norm(dim=1) < 0.8).long())
    model.zero_grad()
    loss.backward()
    kv.push(names, [weight.grad for weight in weights])
    kv.pull(names, out=weights)
    if kv.rank == 0 and step % 33 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

kv.save_optimizer_states("optimizer.states")
if kv.rank == 0:
    torch.save(model.state_dict(), "model.pt")
    print(kv.report())
kv.close()
hvd.shutdown()
