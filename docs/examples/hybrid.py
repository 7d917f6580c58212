"""Hybrid: averages inside two groups, asynchronous servers between them: torchrun --nproc-per-node 4 hybrid.py"""

import torch

import gradwire as hvd

hvd.init()
torch.manual_seed(0)  # all ranks start with the same weights
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
checked = torch.randn(64, 8)
generator = torch.Generator().manual_seed(1 + hvd.rank())  # every rank has its own data
groups = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]  # such as the ranks of each host
mine = groups[hvd.rank() // 2]
sgd = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = hvd.servers.ParameterServer(sgd, inner=mine, quorum=1)


def loss_of(inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


first = loss_of(checked).item()
for _ in range(40):
    optimizer.zero_grad()
    loss_of(torch.randn(16, 8, generator=generator)).backward()
    optimizer.step()
last = loss_of(checked).item()
equal = len(set(hvd.allgather_object(last, process_set=mine))) == 1
print(f"rank {hvd.rank()}: loss {first:.3f} to {last:.3f}, as in all of its group: {equal}", flush=True)
hvd.barrier()  # before close(), since with quorum=1 no rank waits for another one
if hvd.rank() == 0:
    print(optimizer.report(), flush=True)
optimizer.close()
hvd.shutdown()
