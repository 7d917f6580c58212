"""Layers split over two ranks, and two such pairs of ranks: torchrun --nproc-per-node 4 tensor_parallel.py"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradwire as hvd

hvd.init()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)  # the same weights on all ranks; each rank then keeps its part
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)).double()
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.01),
    named_parameters=model.named_parameters(),
    process_set=mesh["dp"],  # the ranks that have the same part of the layers
)

generator = torch.Generator().manual_seed(1)
for _ in range(20):
    batch = torch.randn(32, 8, dtype=torch.float64, generator=generator)
    inputs = batch.chunk(2)[mesh["dp"].get_local_rank()]  # ranks that share the layers have the same samples
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.flip(1)).square().mean()
    loss.backward()
    optimizer.step()

weights = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
if hvd.rank() == 0:
    print(f"loss {loss.item():.3f}")
    torch.save(weights, "weights.pt")
hvd.shutdown()
