"""Trains the matrices of a model with Keller Jordan's Muon, which shares its work out among the ranks.

torchrun --nproc-per-node 2 muon_train.py
"""

import torch
import torch.distributed as dist
from muon import MuonWithAuxAdam
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import ddp_comm_hook

dist.init_process_group("gradwire")  # with gloo, step() raises: the matrices that it gathers differ in shape
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
hook = ddp_comm_hook("int8")  # Muon expects averaged gradients
model.register_comm_hook(None, hook)
matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
optimizer = MuonWithAuxAdam([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])

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
