"""Train with sharded optimizer states: torchrun --nproc-per-node 2 shard_states.py"""

import torch
from torch import nn

import gradwire as hvd

hvd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=1e-2), model.named_parameters(), rule=hvd.rules.Sharded()
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
generator = torch.Generator().manual_seed(hvd.rank())  # every process has its own data
for _ in range(100):
    inputs = torch.randn(64, 8, generator=generator)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()  # when it returns, this process has its share of the averaged gradients
    optimizer.clip_grad_norm_(1.0)  # by the norm over all processes
    optimizer.step()  # updates this process's share, then gathers the shares of all processes
    scheduler.step()

kept = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
print(f"rank {hvd.rank()} of {hvd.size()}: loss {loss.item():.3f}, {kept} bytes of state", flush=True)
torch.save(optimizer.state_dict(), f"optimizer.rank{hvd.rank()}.pt")  # each process saves its own state
hvd.barrier()
states = [torch.load(f"optimizer.rank{rank}.pt", weights_only=True) for rank in range(hvd.size())]
optimizer.load_state_dict(states[hvd.rank()])  # with fewer processes, also=[...] takes the remaining states
hvd.shutdown()
