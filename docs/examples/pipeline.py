"""Two pipelines of two stages, with averaged gradients: torchrun --nproc-per-node 4 pipeline.py"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import gradwire as hvd

MICROBATCHES = 4

hvd.init()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
number = mesh["pp"].get_local_rank()  # the stage of this rank
torch.manual_seed(0)
model = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 8)).double()
module = model[number]
stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(module.parameters(), lr=0.01),
    named_parameters=module.named_parameters(),
    backward_passes_per_step=MICROBATCHES,  # the schedule calls backward() for each, and divides by MICROBATCHES
    process_set=mesh["dp"],  # the ranks that have the same stage
)

generator = torch.Generator().manual_seed(1)
for _ in range(20):
    batch = torch.randn(32, 8, dtype=torch.float64, generator=generator)
    inputs = batch.chunk(2)[mesh["dp"].get_local_rank()]  # the stages of a pipeline have the same samples
    optimizer.zero_grad()
    losses: list[torch.Tensor] = []
    if number == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=inputs.flip(1), losses=losses)
    optimizer.step()

if mesh["dp"].get_local_rank() == 0:
    torch.save(module.state_dict(), f"stage{number}.pt")
    if losses:
        print(f"loss {torch.stack(losses).mean().item():.3f}")
hvd.shutdown()
