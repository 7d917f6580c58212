"""Train with a large batch by LARS and LAMB: torchrun --nproc-per-node 2 lars_lamb.py"""

import torch
from torch import nn

import gradwire as hvd

EPOCHS, STEPS_PER_EPOCH = 6, 10

hvd.init()
points = torch.randn(512, 20, generator=torch.Generator().manual_seed(hvd.rank()))  # the batch of this rank
targets = (points[:, :2].prod(1) > 0).long()
for name, make, rate in (("LARS", hvd.optimizers.LARS, 10.0), ("LAMB", hvd.optimizers.LAMB, 0.02)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 2))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    layers = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": layers}, {"params": biases, "adapt": False, "lr": rate / 1000}]
    optimizer = hvd.DistributedOptimizer(make(groups, lr=rate / hvd.size()), model.named_parameters())
    # Increases the rate to that for all ranks:
    warmup = hvd.optimizers.WarmupLR(optimizer, STEPS_PER_EPOCH, warmup_epochs=2)
    for epoch in range(EPOCHS):
        for _ in range(STEPS_PER_EPOCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), targets)
            loss.backward()
            optimizer.step()
            warmup.step()
        mean = hvd.allreduce(loss.detach())
        if hvd.rank() == 0:
            print(f"{name}, epoch {epoch + 1}: loss {mean.item():.3f}, rate {warmup.get_last_lr()[0]:g}")
hvd.shutdown()
