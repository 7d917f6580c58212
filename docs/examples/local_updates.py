"""Ranks step alone, and exchange changes of parameters every ten steps: torchrun --nproc-per-node 2 local_updates.py"""

import torch
from torch import nn

import gradwire as hvd

EVERY, WARMUP, STEPS = 10, 50, 350  # ends right after an exchange

hvd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
rule = hvd.rules.LocalUpdates(
    every=EVERY,
    outer=torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True),  # DiLoCo's
    warmup_steps=WARMUP,  # in these steps, the ranks average gradients
)
adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)
optimizer = hvd.DistributedOptimizer(adamw, model.named_parameters(), rule=rule)

held_out = torch.randn(512, 8, generator=torch.Generator().manual_seed(99))
data = torch.Generator().manual_seed(hvd.rank())  # every rank has its own samples
for step in range(1, STEPS + 1):
    inputs = torch.randn(32, 8, generator=data)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True)).backward()
    optimizer.step()
    if step % 50 == 0:  # when all ranks have the same parameters
        loss = nn.functional.mse_loss(model(held_out), held_out.sin().sum(1, keepdim=True))
        print(f"rank {hvd.rank()}, step {step}: loss {loss.item():.6f}")
if hvd.rank() == 0:
    print(optimizer.rule.report(batch_per_rank=32))
hvd.shutdown()
