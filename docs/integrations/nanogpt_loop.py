"""Accumulates gradients as nanoGPT's train.py does, and compresses what the last pass of each step exchanges.

torchrun --nproc-per-node 2 nanogpt_loop.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import ddp_comm_hook

STEPS, PASSES, VOCABULARY = 12, 4, 64

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(VOCABULARY, 64), *layers, nn.Linear(64, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model = DistributedDataParallel(model)
hook = ddp_comm_hook("int8")
model.register_comm_hook(None, hook)

torch.manual_seed(1337 + dist.get_rank())  # every rank has its own data
for _ in range(STEPS):
    for each in range(PASSES):
        model.require_backward_grad_sync = each == PASSES - 1  # as model.no_sync() does
        tokens = torch.randint(VOCABULARY, (8, 1)).add(torch.arange(17)).remainder(VOCABULARY)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / PASSES
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if dist.get_rank() == 0:
    print(f"loss {loss.item() * PASSES:.3f}; {hook.stats}")
hook.close()
dist.destroy_process_group()
