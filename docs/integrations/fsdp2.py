"""Shards a model inside groups of ranks with FSDP2, and compresses the gradients between the groups.

torchrun --nproc-per-node 4 fsdp2.py     (on several hosts, the ranks of each host are a group)
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as hvd

hvd.init()
shards = hvd.local_size() if hvd.local_size() < hvd.size() else 2  # on one host, to try it, two ranks are a group
mesh = init_device_mesh("cpu", (hvd.size() // shards, shards), mesh_dim_names=("replicate", "shard"))
replicas = mesh.get_group("replicate")  # the ranks that hold the same shards as this one

torch.manual_seed(hvd.rank())
model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(2)))
for layer in model:
    fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    named_parameters=model.named_parameters(),
    compression=hvd.ErrorFeedback("int4", warmup_steps=2),
    process_set=replicas,
)
first = torch.distributed.get_global_rank(replicas, 0)  # a root rank is a rank of the world
hvd.broadcast_parameters([parameter.to_local() for parameter in model.parameters()], first, process_set=replicas)

for _ in range(12):
    tokens = torch.randn(8, 16, 64)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(tokens), tokens.flip(1))
    loss.backward()  # FSDP2 averages inside the group, the optimizer between groups
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
if hvd.rank() == 0:
    print(f"loss {loss.item():.3f}; {optimizer.stats}")
hvd.shutdown()
