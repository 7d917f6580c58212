"""Compresses the gradients of a training loop with accelerate, and saves the residuals of error feedback with its state.

torchrun --nproc-per-node 2 accelerate_loop.py [FOLDER TO SAVE TO [FOLDER TO LOAD FROM]]
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire import ErrorFeedback, ddp_comm_hook

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs = torch.randn(512, 64)
loader = DataLoader(TensorDataset(inputs, inputs.roll(1, 1)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

hook = ddp_comm_hook(ErrorFeedback("int4"))
model.register_comm_hook(None, hook)


def file(folder):
    """Return the file of this rank. (register_for_checkpointing would save the state of rank 0 for all ranks.)"""
    return Path(folder, f"gradwire.rank{accelerator.process_index}.pt")


accelerator.register_save_state_pre_hook(lambda models, weights, folder: torch.save(hook.state_dict(), file(folder)))
accelerator.register_load_state_pre_hook(
    lambda models, folder: hook.load_state_dict(torch.load(file(folder), weights_only=True))
)

if sys.argv[2:]:
    accelerator.load_state(sys.argv[2])  # before the first backward()
for batch, targets in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), targets)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
if sys.argv[1:]:
    accelerator.save_state(sys.argv[1])
accelerator.print(f"loss {loss.item():.3f}; {hook.stats}")
accelerator.end_training()
