"""Compresses the gradients of a model under torch's DistributedDataParallel. slurm.sh and kubeflow.yaml start this script.

torchrun --nproc-per-node 2 ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import ddp_comm_hook

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
hook = ddp_comm_hook("int8")
model.register_comm_hook(None, hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(dist.get_rank())  # every rank has its own data
for _ in range(20):
    inputs = torch.randn(16, 64)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, 1))
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}; {hook.stats}")
hook.close()
dist.destroy_process_group()
